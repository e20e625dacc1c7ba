"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from moec.manifests.errors import CheckpointError

from .checkpoint import TOKENIZER_NAME


def load_tokenizer(root: Path) -> Tokenizer:
    """The fast tokenizer of a folder; padding and truncation that the file may ask for are off.

    Raises CheckpointError.
    """
    path = root / TOKENIZER_NAME
    if not path.is_file():
        raise CheckpointError(f"no `{TOKENIZER_NAME}` in `{root}`", "save the fast tokenizer with transformers")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise CheckpointError(f"`{path}` is not a tokenizer: {error}", "copy the file again") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
