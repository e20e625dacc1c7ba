"""`moec verify`: check a bundle's signature, every byte against its digest, and what this machine computes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moec.manifests.errors import OptionError

from ...options.keys import accepted_keys_option, read_accepted_keys
from ...options.opening import bundle_folder, open_engine
from ...options.paths import bundle_argument, file_option, json_option, test_memory_option
from ...terminal import output
from ...terminal.progress_bar import ProgressBar


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

    --self-test computes three short texts with the bundle, in seconds. Exact runs give the same bits on all
    processors, so the digest of the logits must be that of the compile.

    The exit code is 0 for a valid bundle. It is 3 if a byte, the signature or the logits differ, or if a file is
    missing, too short or not listed; the error names the file. It is 1 if the self-test cannot run here: the bundle
    holds none, another moec made it, or the memory is too small.

    \b
    moec verify mixtral-moec && scp -r mixtral-moec device:
    moec verify mixtral-moec --key fleet.pub
    moec verify mixtral-moec --self-test --memory 2GiB
    """
    if not self_test and (memory is not None or kernels is not None):
        raise OptionError("`--memory` and `--kernels` belong to `--self-test`", "add it, or leave them out")
    if signature_path is not None and not key_files:
        raise OptionError("`--signature` has no effect without an accepted key", "add `--key FILE.pub`")
    folder, keys = bundle_folder(bundle), read_accepted_keys(key_files)
    from moec.manifests.bundle import MANIFEST_NAME
    from moec.manifests.files.limits import MAX_MANIFEST_BYTES
    from moec.runtime import kernels as runtime_kernels
    from moec.runtime.bundle.device_file import device_of
    from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
    from moec.runtime.engine.self_test import run_self_test, self_test_of
    from moec.runtime.options.runtime import RuntimeOptions

    opened = open_bundle(folder)
    manifest = opened.manifest
    size, experts, signed = sum(entry.size_bytes for entry in manifest.files), len(manifest.experts), ""
    facts: dict[str, Any] = {
        "ok": True, "name": manifest.name, "files": len(manifest.files), "bytes": size, "experts": experts,
    }  # fmt: skip
    if keys:
        from moec.shipping.signatures.model_signature import read_signature_file, signature_file, verify_signature

        path = signature_file(opened.path) if signature_path is None else signature_path
        manifest_bytes = opened.read_file(MANIFEST_NAME, MAX_MANIFEST_BYTES)
        signer = verify_signature(read_signature_file(path), manifest_bytes, manifest, keys, str(path))
        facts["key_id"], signed = signer.key_id, f", signed by the key {signer.key_id[:12]}"
    test = self_test_of(opened) if self_test else None
    opened.tables()
    device_of(opened)
    with ProgressBar("verifying") as progress:
        verify_bundle(opened, progress)
    if not as_json:
        whole = f"{len(manifest.files)} files, {output.human_bytes(size)}, {experts} experts{signed}"
        output.data(f"`{bundle}` is whole: {whole}")
    if test is not None:
        options = RuntimeOptions() if memory is None else RuntimeOptions(memory=memory)
        with open_engine(bundle, options, kernels) as engine:
            run_self_test(engine, test)
            used = runtime_kernels.active()
        facts["self_test"] = {"texts": len(test.texts), "tokens": test.token_count, "kernels": used}
        if not as_json:
            tokens = f"the logits of {test.token_count} tokens are those of the compile"
            output.data(f"self-test: {tokens}, with the kernels {used}")
    if as_json:
        output.data_json(facts)
