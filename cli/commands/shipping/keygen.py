"""`moec keygen`: make the key pair that signs bundles and channels."""

from __future__ import annotations

from pathlib import Path

import click

from moec.manifests.errors import OptionError

from ...options.keys import ask_passphrase, passphrase_of
from ...options.paths import PATH, json_option
from ...terminal import output


@click.command("keygen", short_help="Make a key pair that signs bundles.")
@click.argument("file", type=PATH)
@click.option("--passphrase", is_flag=True, help="Encrypt the private key with a passphrase that is asked for.")
@click.option(
    "--passphrase-env",
    "passphrase_variable",
    metavar="NAME",
    help="Encrypt it with the passphrase in this environment variable.",
)
@json_option
def keygen_command(file: Path, passphrase: bool, passphrase_variable: str | None, as_json: bool) -> None:
    """Write a private key on NIST P-256 to FILE, and its public key next to it with the suffix `.pub`.

    The owner alone can read FILE. It stays where bundles are signed: `moec sign` and `moec push`. Devices get the
    public key: `moec verify` and `moec pull`. No file is replaced.

    \b
    moec keygen fleet.pem
    moec keygen fleet.pem --passphrase
    """
    if passphrase and passphrase_variable is not None:
        raise OptionError("`--passphrase` and `--passphrase-env` name two passphrases", "leave one out")
    from moec.shipping.signatures.keys import make_key_pair

    given = None
    if passphrase_variable is not None:
        given = passphrase_of(passphrase_variable)
    elif passphrase:
        given = ask_passphrase(file, is_new=True)
    public_path, key = make_key_pair(file, given)
    if as_json:
        output.data_json({"private_key": str(file), "public_key": str(public_path), "key_id": key.key_id})
        return
    output.data(f"private key: `{file}`; keep it secret, and keep a copy")
    output.data(f"public key:  `{public_path}`, id {key.key_id}")
