"""The names of special tokens, from the two files of a model folder that define them.

`tokenizer_config.json` has them. Older tools wrote them to `special_tokens_map.json`, which then takes precedence.
Source: transformers, tokenization_utils_base.py, `_from_pretrained`: a `tokenizer_config.json` with
`added_tokens_decoder` is complete, and the other file is not read.
"""

from __future__ import annotations

import json
from typing import Any

from ..files.limits import MAX_TEMPLATE_FILE_BYTES, JsonLimits
from ..files.strict_json import load_strict_json

TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
SPECIAL_TOKENS_MAP_NAME = "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_JSON = JsonLimits(MAX_TEMPLATE_FILE_BYTES, containers=1 << 16, values=1 << 20, texts=1 << 20)
"""Bounds of both files, which may list thousands of tokens."""


def tokenizer_settings(config: bytes | None) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`, empty if it is missing. Raises ValueError."""
    plain = {} if config is None else load_strict_json(config, _JSON)
    if not isinstance(plain, dict):
        raise ValueError("expected an object")
    return plain


def with_special_tokens(config: bytes | None, special_map: bytes | None) -> bytes | None:
    """Return the content of `tokenizer_config.json` with the special tokens of both files.

    It is `config` itself if the other file adds nothing, or if a file is damaged. Nothing else of the map is taken.
    config: content of `tokenizer_config.json`, or None.
    special_map: content of `special_tokens_map.json`, or None.
    """
    if special_map is None:
        return config
    try:
        settings, named = tokenizer_settings(config), load_strict_json(special_map, _JSON)
    except ValueError:
        return config
    if not isinstance(named, dict) or "added_tokens_decoder" in settings:
        return config
    added = {name: named[name] for name in SPECIAL_TOKENS if token_text(named.get(name))}
    if all(token_text(settings.get(name)) == token_text(token) for name, token in added.items()):
        return config
    return json.dumps({**settings, **added}, ensure_ascii=False).encode("utf-8", "surrogatepass")


def token_text(token: Any) -> str:
    """Return the text of a token, which is a text or an object with one. Empty for anything else."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""
