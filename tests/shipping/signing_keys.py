"""Key pairs for tests: made once per process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from moec.shipping.signatures.keys import PrivateKey, make_key_pair, read_private_key


def signing_key(name: str = "fleet") -> PrivateKey:
    """Return the private key of a name. Different names have different keys."""
    return _made(name)


@functools.cache
def _made(name: str) -> PrivateKey:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.pem"
        make_key_pair(path)
        return read_private_key(path)
