"""Texts in `tokenizer_config.json`, such as the names of special tokens."""

from __future__ import annotations

from collections.abc import Iterable

from moec.manifests.tokenizer.special_tokens import token_text, tokenizer_settings


def named_texts(config: bytes | None, names: Iterable[str]) -> dict[str, str]:
    """Return those of the settings that are texts, or tokens with a text.

    config: content of the file, or None. A damaged file has no settings; it is refused where a template needs it.
    """
    try:
        plain = tokenizer_settings(config)
    except ValueError:
        plain = {}
    texts = {name: token_text(plain.get(name)) for name in names}
    return {name: text for name, text in texts.items() if text}
