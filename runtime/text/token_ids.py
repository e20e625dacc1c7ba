"""Check token ids given by a caller."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from moec.manifests.errors import InputError


def checked_ids(tokens: Sequence[int]) -> list[int]:
    """Return token ids as a list of int. Whole numbers of numpy are accepted. The vocabulary is not checked.

    Raises InputError for a value that is not a sequence, or that contains 1.5, True, a text or the like.
    """
    try:
        ids = list(tokens)
    except TypeError:
        raise InputError(f"a prompt must be a text or token ids, found a `{type(tokens).__name__}`") from None
    for at, token in enumerate(ids):
        try:
            if isinstance(token, bool):
                raise TypeError
            ids[at] = operator.index(token)
        except TypeError:
            raise InputError(
                f"token ids must be whole numbers, found a `{type(token).__name__}` at place {at}",
                "hand in a text, or the ids that `encode` returns",
            ) from None
    return ids
