"""Token ids as a caller hands them in."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from moec.manifests.errors import InputError


def checked_ids(tokens: Sequence[int]) -> list[int]:
    """Return whole numbers as a list of int; numpy's are taken. The vocabulary is not looked at.

    Raises InputError: not a sequence, or with something in it that is no whole number, like 1.5, True or a text.
    """
    try:
        found = list(tokens)
    except TypeError:
        raise InputError(f"a prompt must be a text or token ids, found a `{type(tokens).__name__}`") from None
    for at, token in enumerate(found):
        try:
            if isinstance(token, bool):
                raise TypeError
            found[at] = operator.index(token)
        except TypeError:
            raise InputError(
                f"token ids must be whole numbers, found a `{type(token).__name__}` at place {at}",
                "hand in a text, or the ids that `encode` returns",
            ) from None
    return found
