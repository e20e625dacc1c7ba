"""Held-out items as samples: the question is the prompt, and the tokens of the answer are forced."""

from __future__ import annotations

from pathlib import Path

from moec.runtime.text.tokenizer import load_tokenizer
from moec.runtime.trace.trace import Trace

from ..expert_cache.eviction import texts
from .inputs import Inputs, complete_file
from .models import DATA

ANSWERS = ("\nAnswer:", "\nSummary:")
"""What ends the prompt of an item."""


def prompt_of(item: str) -> str:
    """Return the part of an item that is given. Raises ValueError for an item without an answer."""
    for mark in ANSWERS:
        if mark in item:
            return item[: item.index(mark) + len(mark)]
    raise ValueError(f"expected one of {ANSWERS} in an item, found {item[:60]!r}")


def sample(inputs: Inputs, bundle: str, number: int) -> Trace:
    """Return the trace of a bundle on one held-out item. Even numbers are problems, odd ones dialogues."""
    item = texts(DATA, "test", number + 1, 1)[number]
    tokenizer = load_tokenizer(inputs.opened(bundle))
    prompt, whole = (len(tokenizer.encode(text).ids) for text in (prompt_of(item), item))
    lengths = ("--prompt-tokens", prompt, "--tokens", whole - prompt)
    return inputs.recorded(bundle, ["item", str(number)], _file(inputs.folder, number, item), *lengths)


def _file(folder: Path, number: int, item: str) -> Path:
    path = folder / "texts" / f"item-{number}.txt"
    if not path.exists():
        with complete_file(path) as partial:
            partial.write_text(item, encoding="utf-8")
    return path
