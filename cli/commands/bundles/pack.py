"""`moec pack`: put a bundle into one file."""

from __future__ import annotations

from pathlib import Path

import click

from ...options.archives import check_target, held_target, report_archive
from ...options.opening import bundle_folder
from ...options.paths import PATH, bundle_argument, json_option
from ...terminal.progress_bar import ProgressBar

SUFFIX = ".moec"


@click.command("pack", short_help="Put a bundle into one file.")
@bundle_argument
@click.argument("file", required=False, type=PATH)
@json_option
def pack_command(bundle: Path, file: Path | None, as_json: bool) -> None:
    """Pack the bundle in folder BUNDLE into FILE, by default BUNDLE.moec.

    Every member is a frame with a checksum, compressed if that makes it smaller. An interrupted pack continues when
    the command is repeated. A packed bundle cannot run: unpack it first.

    \b
    moec pack mixtral-moec
    moec pack mixtral-moec /media/stick/mixtral.moec
    """
    folder = bundle_folder(bundle)
    target = file or folder.resolve().with_name(folder.resolve().name + SUFFIX)
    check_target(target)
    from moec.runtime.bundle.archive import pack_bundle

    with held_target(target, "FILE", "pack"), ProgressBar("packing") as progress:
        pack_bundle(folder, target, progress)
    before = sum(path.stat().st_size for path in folder.iterdir())
    report_archive("packed", folder, target, before, target.stat().st_size, as_json)
