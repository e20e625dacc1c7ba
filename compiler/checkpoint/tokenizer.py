"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import CheckpointError
from moec.manifests.files.limits import MAX_TOKENIZER_BYTES
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
    data = read_file(path, MAX_TOKENIZER_BYTES, _REMEDY)
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
