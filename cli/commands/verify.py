"""`moec verify`: check every byte of a bundle against its digests."""

from __future__ import annotations

from pathlib import Path

import click

from ..options.opening import bundle_folder
from ..options.paths import bundle_argument
from ..terminal import output
from ..terminal.progress_bar import ProgressBar


@click.command("verify", short_help="Check every file of a bundle against its digest.")
@bundle_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a sentence.")
def verify_command(bundle: Path, as_json: bool) -> None:
    """Check the bundle in folder BUNDLE: manifest, list of files, headers, and every byte.

    It compares the SHA-256 of every file, and the XXH3 of every expert and of every other weight.

    The exit code is 0 for a valid bundle. It is 3 if a byte differs, or if a file is missing, too short or not listed.
    The error names the file.

    \b
    moec verify mixtral-moec && scp -r mixtral-moec device:
    """
    folder = bundle_folder(bundle)
    from moec.runtime.bundle.device_file import device_of
    from moec.runtime.bundle.opening import open_bundle, verify_bundle

    opened = open_bundle(folder)
    opened.tables()
    device_of(opened)
    with ProgressBar("verifying") as progress:
        verify_bundle(opened, progress)
    files, size = len(opened.manifest.files), sum(entry.size_bytes for entry in opened.manifest.files)
    if as_json:
        name, experts = opened.manifest.name, len(opened.manifest.experts)
        output.data_json({"ok": True, "name": name, "files": files, "bytes": size, "experts": experts})
    else:
        output.data(
            f"`{bundle}` is whole: {files} files, {output.human_bytes(size)}, {len(opened.manifest.experts)} experts"
        )
