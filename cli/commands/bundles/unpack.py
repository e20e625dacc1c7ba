"""`moec unpack`: make a bundle from a packed file."""

from __future__ import annotations

from pathlib import Path

import click

from moec.manifests.errors import InputError, ProfileError

from ...options.archives import check_target, held_target, report_archive
from ...options.paths import PATH, json_option
from ...terminal import output
from ...terminal.progress_bar import ProgressBar


@click.command("unpack", short_help="Make a bundle from a packed file.")
@click.argument("file", type=PATH)
@click.argument("folder", metavar="[DIR]", required=False, type=PATH)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Refuse an archive that unpacks to more than SIZE, like `8GiB`.  [default: free bytes of the disk]",
)
@json_option
def unpack_command(file: Path, folder: Path | None, max_size: str | None, as_json: bool) -> None:
    """Unpack FILE into the new folder DIR, and check every byte. DIR is FILE without its suffix by default.

    The bundle is equal to the packed one, byte for byte. The folder appears when it is complete. An interrupted unpack
    continues when the command is repeated. A packed file of a few kB can unpack to any size, so bound it with
    --max-size. The size is known before anything is written.

    \b
    moec unpack mixtral.moec
    moec unpack mixtral.moec /models/mixtral --max-size 30GiB
    """
    if not file.is_file():
        raise InputError(f"`{file}` is not a file, expected a packed bundle", "name the file that `moec pack` wrote")
    target = folder or file.with_suffix("")
    if target == file:
        raise InputError(f"`{file}` has no suffix to leave out", f"name the folder: moec unpack {file} DIR")
    check_target(target)
    from moec.manifests.sizes import parse_bytes
    from moec.profiles.probe import memory_limit_bytes
    from moec.runtime.bundle.archive import unpack_bundle
    from moec.runtime.bundle.device_file import device_of
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.memory.budget import nominal_memory
    from moec.shipping.pull.choose import misfit

    max_bytes = None if max_size is None else parse_bytes(max_size)
    with held_target(target, "DIR", "unpack"), ProgressBar("unpacking") as progress:
        unpack_bundle(file, target, progress, max_bytes=max_bytes)
    after = sum(path.stat().st_size for path in target.iterdir())
    with open_bundle(target, allow_partial=True) as opened:
        floor_bytes, device = nominal_memory(opened.manifest).floor_bytes, opened.manifest.device.profile
        try:  # why `moec pull` would not choose the bundle for this machine
            difference = misfit(device_of(opened), floor_bytes, memory_limit_bytes())
        except ProfileError:  # the system does not tell its memory
            difference = None
    if difference is not None:
        output.say(f"note: the bundle for `{device}` does not fit this machine: {difference}")
    report_archive("unpacked", file, target, file.stat().st_size, after, as_json)
