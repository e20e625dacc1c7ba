"""`moec export`: a bundle as a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path

import click

from moec.manifests.files.output_file import check_folder

from ...options.opening import bundle_folder
from ...options.paths import PATH, bundle_argument, json_option
from ...terminal import output
from ...terminal.progress_bar import ProgressBar
from ..bundles.archive import held_target

DTYPES = ("float32", "bfloat16", "float16")


@click.command("export", short_help="Write the weights of a bundle as a Hugging Face folder.")
@bundle_argument
@click.option("-o", "--output", "target", type=PATH, required=True, metavar="DIR", help="The new folder.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Type of the weights. float32 holds every value exactly; the others round.",
)
@json_option
def export_command(bundle: Path, target: Path, dtype: str, as_json: bool) -> None:
    """Write the dequantized weights of BUNDLE as a Hugging Face folder, for transformers and other engines.

    With it anyone can repeat what the certificate says, by other tools. The folder has the names of the family's
    published checkpoints, in files of at most 512 MiB, and takes up to 32 bits per weight. The runtime also rounds
    activations to 8 bits, so its logits differ a little. Experts that were left out cannot be expressed, except for
    gpt-oss: compile with `--keep-experts`. Needs `pip install "moec[compile]"`.

    \b
    moec export mixtral-moec -o mixtral-dequantized
    moec export mixtral-moec -o mixtral-dequantized --dtype bfloat16
    """
    from moec.compiler.bundle.publish import publish_directory
    from moec.compiler.checkpoint.checkpoint import is_companion
    from moec.compiler.checkpoint.model_files import CONFIG_NAME
    from moec.compiler.export.huggingface import PARTIAL_SUFFIX, ExportedBundle, export_folder
    from moec.compiler.workspace.durable import Disk
    from moec.manifests.errors import BundleIncomplete, OptionError
    from moec.manifests.files.limits import MAX_COMPANION_BYTES
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.model.dense_weights import BundleWeights

    if os.path.lexists(target):
        raise OptionError(f"`{target}` exists", "choose another folder, or remove it")
    check_folder(target, PARTIAL_SUFFIX)
    disk, partial = Disk(), target.with_name(target.name + PARTIAL_SUFFIX)
    with open_bundle(bundle_folder(bundle)) as opened:
        copied = [entry.name for entry in opened.manifest.files if is_companion(entry.name)]
        files = {name: opened.read_file(name, MAX_COMPANION_BYTES, verify=True) for name in copied}
        if CONFIG_NAME not in files:
            raise BundleIncomplete(f"`{bundle}` has no `{CONFIG_NAME}`", "copy the bundle again")
        exported = ExportedBundle(bundle, opened.manifest, BundleWeights(opened), files)
        with held_target(target, "--output", "export"), ProgressBar("writing weights") as progress:
            size = export_folder(exported, partial, dtype, disk, progress)
            publish_directory(disk, partial, target)
    if as_json:
        output.data_json({"folder": str(target), "dtype": dtype, "weight_bytes": size})
    else:
        output.data(f"wrote `{target}`: {size:,} bytes of weights in {dtype}")
