"""`moec verify`: check a bundle's signature, every byte against its digest, and what this machine computes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import OptionError

from ...options.keys import accepted_keys_option, read_accepted_keys
from ...options.opening import bundle_folder, open_engine
from ...options.paths import bundle_argument, file_option, json_option, test_memory_option
from ...terminal import output
from ...terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from moec.manifests.bundle import BundleManifest
    from moec.manifests.self_test import SelfTest
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.shipping.signatures.keys import PublicKey


@click.command("verify", short_help="Check every byte of a bundle, and what it computes here.")
@bundle_argument
@accepted_keys_option()
@file_option("--signature", "signature_path", help="With --key: the signature.  [default: BUNDLE.sig]")
@click.option("--self-test", is_flag=True, help="Also compute a few texts. Their logits must be those of the compile.")
@test_memory_option
@click.option("--kernels", metavar="NAME", help="With --self-test: instruction set, for example `scalar`.")
@json_option
def verify_command(
    bundle: Path,
    key_files: tuple[Path, ...],
    signature_path: Path | None,
    self_test: bool,
    memory: str | None,
    kernels: str | None,
    as_json: bool,
) -> None:
    """Check the bundle in folder BUNDLE: manifest, list of files, headers, and every byte.

    It compares the SHA-256 of every file, and the XXH3 of every expert and of every other weight.

    --key checks before that one of the accepted keys signed this bundle. Without it, the bytes are compared with the
    bundle's own manifest alone: that shows damage, and no forgery.

    --self-test computes three short texts with the bundle, in seconds. Lossless runs give the same bits on all
    processors, so the digest of the logits must be that of the compile.

    The exit code is 0 for a valid bundle. It is 3 if a byte, the signature or the logits differ, or if a file is
    missing, too short or not listed; the error names the file. It is 1 if the self-test cannot run here: the bundle
    holds none, another moec made it, or the memory is too small.

    \b
    moec verify mixtral-moec && scp -r mixtral-moec device:
    moec verify mixtral-moec --key fleet.pub
    moec verify mixtral-moec --self-test --memory 2GiB
    """
    _check_options((memory, kernels), self_test, signature_path is not None and not key_files)
    folder, keys = bundle_folder(bundle), read_accepted_keys(key_files)
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.engine.self_test import self_test_of

    opened = open_bundle(folder)
    signer = _signer(opened, signature_path, keys) if keys else None
    test = self_test_of(opened) if self_test else None
    _check_content(opened)
    told = _facts(opened.manifest, signer)
    if not as_json:
        output.data(_sentence(bundle, told))
    if test is not None:
        used = _run(bundle, test, memory, kernels)
        told["self_test"] = {"texts": len(test.texts), "tokens": test.token_count, "kernels": used}
        if not as_json:
            output.data(_test_sentence(test, used))
    if as_json:
        output.data_json(told)


def _check_options(self_test_options: Sequence[str | None], self_test: bool, is_signature_unused: bool) -> None:
    """Raise OptionError for options without an effect."""
    if not self_test and any(value is not None for value in self_test_options):
        raise OptionError("`--memory` and `--kernels` belong to `--self-test`", "add it, or leave them out")
    if is_signature_unused:
        raise OptionError("`--signature` has no effect without an accepted key", "add `--key FILE.pub`")


def _check_content(bundle: Bundle) -> None:
    """Read the tables and the device, and compare every byte. Raises BundleError."""
    from moec.runtime.bundle.device_file import device_of
    from moec.runtime.bundle.open_bundle import verify_bundle

    bundle.tables()
    device_of(bundle)
    with ProgressBar("verifying") as progress:
        verify_bundle(bundle, progress)


def _facts(manifest: BundleManifest, signer: PublicKey | None) -> dict[str, Any]:
    """Return the values of `--json` for a whole bundle."""
    size = sum(entry.size_bytes for entry in manifest.files)
    told: dict[str, Any] = {"ok": True, "name": manifest.name, "files": len(manifest.files), "bytes": size}
    told["experts"] = len(manifest.experts)
    return told if signer is None else {**told, "key_id": signer.key_id}


def _sentence(bundle: Path, told: Mapping[str, Any]) -> str:
    """Return a sentence with the values of `_facts`."""
    signed = f", signed by the key {told['key_id'][:12]}" if "key_id" in told else ""
    size = output.human_bytes(told["bytes"])
    return f"`{bundle}` is whole: {told['files']} files, {size}, {told['experts']} experts{signed}"


def _test_sentence(test: SelfTest, kernels: str) -> str:
    tokens = f"the logits of {test.token_count} tokens are those of the compile"
    return f"self-test: {tokens}, with the kernels {kernels}"


def _signer(bundle: Bundle, path: Path | None, keys: Sequence[PublicKey]) -> PublicKey:
    """Return the accepted key that signed a bundle. Raises SignatureInvalid."""
    from moec.manifests.bundle import MANIFEST_NAME
    from moec.manifests.files.limits import MAX_MANIFEST_BYTES
    from moec.shipping.signatures.model_signature import read_signature_file, signature_file, verify_signature

    path = signature_file(bundle.path) if path is None else path
    manifest_bytes = bundle.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    return verify_signature(read_signature_file(path), manifest_bytes, bundle.manifest, keys, str(path))


def _run(bundle: Path, test: SelfTest, memory: str | None, kernels: str | None) -> str:
    """Run a self-test, and return the kernels. Raises the errors of a run, and ChecksumMismatch."""
    from moec.runtime import kernels as runtime_kernels
    from moec.runtime.engine.self_test import run_self_test
    from moec.runtime.options.runtime import RuntimeOptions

    options = RuntimeOptions() if memory is None else RuntimeOptions(memory=memory)
    with open_engine(bundle, options, kernels) as engine:
        run_self_test(engine, test)
        return runtime_kernels.active()
