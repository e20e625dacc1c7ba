"""Texts in `tokenizer_config.json`, such as the names of special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from moec.manifests.files.limits import MAX_TEMPLATE_FILE_BYTES, JsonLimits
from moec.manifests.files.strict_json import load_strict_json

_SETTINGS_JSON = JsonLimits(MAX_TEMPLATE_FILE_BYTES, containers=1 << 16, values=1 << 20, texts=1 << 20)
"""Bounds of `tokenizer_config.json`, which may list thousands of tokens."""


def named_texts(config: bytes | None, names: Iterable[str]) -> dict[str, str]:
    """Return those of the settings that are texts, or tokens with a text.

    config: content of the file, or None. A damaged file has no settings; it is refused where a template needs it.
    """
    try:
        plain = {} if config is None else load_strict_json(config, _SETTINGS_JSON)
    except ValueError:
        plain = {}
    found = dict[str, str]()
    for name in names:
        value = plain.get(name) if isinstance(plain, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
