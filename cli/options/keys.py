"""Options for keys: the private key that signs, and the public keys that are accepted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moec.manifests.errors import InputError, OptionError

from .paths import PATH, file_option

if TYPE_CHECKING:
    from moec.shipping.signatures.keys import PrivateKey, PublicKey

accepted_keys_option = partial(
    file_option, "--key", "key_files", multiple=True, help="Accepted public key. Give it again for another one."
)
"""Option `key_files`, read by `read_accepted_keys`."""
signing_key_option = click.option(
    "--key", "key_file", type=PATH, metavar="FILE", required=True, help="Private key, from `moec keygen`."
)
"""Option `key_file`, read by `read_signing_key`."""
passphrase_option = click.option(
    "--passphrase-env",
    "passphrase_variable",
    metavar="NAME",
    help="Environment variable with the passphrase of the private key.  [default: ask for it]",
)
"""Option `passphrase_variable`, for `read_signing_key`."""


def read_accepted_keys(files: Sequence[Path], option: str = "--key", others: int = 0) -> list[PublicKey]:
    """Return the public keys of an option.

    others: number of keys that are accepted in addition to them.
    Raises InputError, and OptionError if there are too many.
    """
    from moec.shipping.signatures.dsse import MAX_KEYS
    from moec.shipping.signatures.keys import read_public_key

    most = MAX_KEYS - others
    if len(files) > most:
        raise OptionError(f"`{option}` occurs {len(files)} times, at most {most} keys are accepted", "leave some out")
    return [read_public_key(path) for path in files]


def read_signing_key(path: Path, variable: str | None) -> PrivateKey:
    """Return the private key of `--key`. A passphrase is asked for on the terminal if no variable has it.

    Raises InputError, OptionError.
    """
    from moec.shipping.signatures.keys import read_private_key

    given = None if variable is None else passphrase_of(variable)
    return read_private_key(path, lambda: ask_passphrase(path) if given is None else given)


def passphrase_of(variable: str) -> bytes:
    """Return the passphrase in an environment variable. Raises OptionError if there is no such variable."""
    text = os.environ.get(variable)
    if text is None:
        raise OptionError(f"`--passphrase-env` names `{variable}`, which is not set", "set it, or leave the option out")
    return os.fsencode(text)


def ask_passphrase(path: Path, is_new: bool = False) -> bytes:
    """Return the passphrase that is typed on the terminal, without showing it. Raises InputError without a terminal.

    is_new: ask twice, and compare.
    """
    if sys.stdin is None or not sys.stdin.isatty():
        raise InputError(
            f"`{path}` needs a passphrase, and standard input is no terminal",
            "name an environment variable that has it: --passphrase-env NAME",
        )
    text = click.prompt(f"Passphrase of {path}", hide_input=True, confirmation_prompt=is_new, err=True)
    return os.fsencode(text)
