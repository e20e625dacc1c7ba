"""`moec keygen` and `moec sign`: make a key pair, and write the signature of a bundle next to its folder."""

from __future__ import annotations

from pathlib import Path

import click

from moec.manifests.errors import OptionError
from moec.manifests.files.implied_names import check_implied, write_implied

from ...options.keys import ask_passphrase, passphrase_of, passphrase_option, read_signing_key, signing_key_option
from ...options.opening import bundle_folder
from ...options.paths import PATH, bundle_argument, json_option
from ...terminal import output
from ...terminal.progress_bar import ProgressBar


@click.command("sign", short_help="Sign a bundle.")
@bundle_argument
@signing_key_option
@passphrase_option
@click.option("--check", is_flag=True, help="First compare every byte with its digest, as `moec verify` does.")
@json_option
def sign_command(bundle: Path, key_file: Path, passphrase_variable: str | None, check: bool, as_json: bool) -> None:
    """Write the signature of the bundle in folder BUNDLE to BUNDLE.sig next to the folder.

    An existing signature is replaced. `model_signing verify key` and `moec verify --key` accept it.

    The signature covers the digests that the compile wrote into `moec.json`, and that of `moec.json`. Manifest, list
    of files, sizes and headers are checked before. Bytes that were damaged since the compile differ from the signed
    digest, so every check of the bundle refuses them. --check finds them now.

    \b
    moec keygen fleet.pem
    moec sign mixtral-moec --key fleet.pem
    moec verify mixtral-moec --key fleet.pub
    """
    folder = bundle_folder(bundle)
    from moec.manifests.bundle import MANIFEST_NAME
    from moec.manifests.files.limits import MAX_MANIFEST_BYTES
    from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
    from moec.shipping.signatures.model_signature import SIGNATURE_MARK, sign_bundle, signature_file

    key = read_signing_key(key_file, passphrase_variable)
    path = signature_file(folder)
    check_implied(path, SIGNATURE_MARK)
    with open_bundle(folder) as opened:
        if check:
            with ProgressBar("verifying") as progress:
                verify_bundle(opened, progress)
        data = sign_bundle(opened.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES), opened.manifest, key)
        files = len(opened.manifest.files) + 1
    write_implied(path, data, SIGNATURE_MARK)
    if as_json:
        output.data_json({"signature": str(path), "key_id": key.public.key_id, "files": files, "checked": check})
        return
    output.data(f"signed {files} files of `{bundle}` with the key {key.public.key_id[:12]}: `{path}`")


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
