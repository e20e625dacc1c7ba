"""Normalizers that insert a text at an empty match. Byte-level parts cannot follow them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .regex_cost import CostlyPattern, check_pattern


def check_empty_matches(sections: Mapping[str, Any]) -> None:
    """Refuse a normalizer that inserts text at an empty match before a byte-level pre-tokenizer.

    The tokenizers library panics on such a text. With other pre-tokenizers the same normalizer works.

    sections: `normalizer` and `pre_tokenizer` of a `tokenizer.json`, each None if it is missing.
    Raises CostlyPattern.
    """
    is_byte_level = any(step.get("type") == "ByteLevel" for step in _steps(sections.get("pre_tokenizer")))
    if is_byte_level and any(_writes_at_nothing(step) for step in _steps(sections.get("normalizer"))):
        raise CostlyPattern("of a normalizer matches an empty text, and byte-level parts cannot follow it")


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a section, also those inside sequences."""
    if not isinstance(step, Mapping):
        return
    yield step
    for name in ("normalizers", "pretokenizers"):
        for inner in step.get(name) or ():
            yield from _steps(inner)


def _writes_at_nothing(step: Mapping[str, Any]) -> bool:
    """Return whether a step replaces an empty text by a text. Raises CostlyPattern."""
    if step.get("type") != "Replace" or not step.get("content"):
        return False
    pattern = step.get("pattern")
    if not isinstance(pattern, Mapping):
        return False
    regex = pattern.get("Regex")
    return pattern.get("String") == "" or (isinstance(regex, str) and check_pattern(regex) == 0)
