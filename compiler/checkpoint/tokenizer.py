"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import CheckpointError
from moec.manifests.files.limits import MAX_TEMPLATE_FILE_BYTES, MAX_TOKENIZER_BYTES
from moec.manifests.tokenizer.special_tokens import (
    SPECIAL_TOKENS_MAP_NAME,
    TOKENIZER_CONFIG_NAME,
    token_text,
    tokenizer_settings,
    with_special_tokens,
)
from moec.manifests.tokenizer.tokenizer_file import UnsafeTokenizer, check_tokenizer

from .weight_files import read_file

_SAMPLE = "Question: a pen and 12 boxes?\n"
"""Text that every tokenizer must encode and decode."""
_REMEDY = "copy the file again, or save the fast tokenizer with transformers"


def load_tokenizer(root: Path) -> Tokenizer:
    """Load the fast tokenizer of a folder and try it on a short text. Padding and truncation are switched off.

    Raises CheckpointError.
    """
    path = root / TOKENIZER_NAME
    return _with_begin_token(_parsed(read_file(path, MAX_TOKENIZER_BYTES, _REMEDY), path), root)[0]


def tokenizer_bytes(root: Path) -> bytes:
    """Return the content of `tokenizer.json` for a bundle.

    It is the file itself, unless `add_bos_token` asks for a token that the file does not add. Raises CheckpointError.
    """
    path = root / TOKENIZER_NAME
    data = read_file(path, MAX_TOKENIZER_BYTES, _REMEDY)
    if not tokenizer_texts(root).get("add_bos_token"):
        return data
    tokenizer, is_changed = _with_begin_token(_parsed(data, path), root)
    return str(tokenizer.to_str(pretty=True)).encode() if is_changed else data


def tokenizer_texts(root: Path) -> dict[str, Any]:
    """Return what `tokenizer_config.json` and `special_tokens_map.json` say; empty if they are missing or damaged."""
    contents = {
        name: read_file(root / name, MAX_TEMPLATE_FILE_BYTES, "remove it") if (root / name).is_file() else None
        for name in (TOKENIZER_CONFIG_NAME, SPECIAL_TOKENS_MAP_NAME)
    }
    try:
        return tokenizer_settings(
            with_special_tokens(contents[TOKENIZER_CONFIG_NAME], contents[SPECIAL_TOKENS_MAP_NAME])
        )
    except ValueError:
        return {}


def _with_begin_token(tokenizer: Tokenizer, root: Path) -> tuple[Tokenizer, bool]:
    """Let the tokenizer add the token that `add_bos_token` asks for. Returns it, and whether it is changed.

    transformers before release 5 and llama.cpp follow this key.
    """
    settings = tokenizer_texts(root)
    token = token_text(settings.get("bos_token"))
    number = tokenizer.token_to_id(token) if token and settings.get("add_bos_token") is True else None
    plain = tokenizer.encode(_SAMPLE).ids
    if number is None or number in plain:
        return tokenizer, False
    begin = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B:1"], special_tokens=[(token, number)]
    )
    before = tokenizer.post_processor
    # After a processor that adds tokens of its own, the text and these tokens count as a pair.
    tokenizer.post_processor = begin if before is None else processors.Sequence([before, begin])
    if tokenizer.encode(_SAMPLE).ids == [number, *plain]:
        return tokenizer, True
    tokenizer.post_processor = before
    return tokenizer, False


def _parsed(data: bytes, path: Path) -> Tokenizer:
    try:
        check_tokenizer(data)  # the runtime makes the same check
    except UnsafeTokenizer as error:
        raise CheckpointError(f"`{path}` is not a tokenizer: {error}", _REMEDY) from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.decode(tokenizer.encode(_SAMPLE).ids)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the package raises bare Exception, and BaseException when it panics
        raise CheckpointError(f"`{path}` is not a tokenizer: {error}", _REMEDY) from error
    return tokenizer
