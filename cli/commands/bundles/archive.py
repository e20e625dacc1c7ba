"""`moec pack` and `moec unpack`: put a bundle into one file, and make a bundle from it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import click

from moec.manifests.bundle import PARTIAL_SUFFIX
from moec.manifests.errors import InputError, ProfileError
from moec.manifests.files.output_file import STDOUT, check_folder

from ...options.opening import bundle_folder
from ...options.paths import PATH, bundle_argument, json_option, refuse_inside_bundle
from ...terminal import output
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
        # FILE is chosen by hand and DIR may be the card of another machine: `pull` would refuse, this says it.
        try:
            difference = misfit(device_of(opened), floor_bytes, memory_limit_bytes())
        except ProfileError:  # the system does not tell its memory
            difference = None
    if difference is not None:
        output.say(f"note: the bundle for `{device}` does not fit this machine: {difference}")
    report_archive("unpacked", file, target, file.stat().st_size, after, as_json)


def check_target(target: Path) -> None:
    """Check before the work that the target can become a new archive or bundle. Raises InputError, DoesNotFit."""
    if os.path.lexists(target):
        raise InputError(f"`{target}` exists already", "remove it or name another")
    refuse_inside_bundle(target)
    if target == STDOUT:
        raise InputError("an archive or a bundle is not written to standard output", "name a file or a folder")
    check_folder(target, PARTIAL_SUFFIX)


def held_target(target: Path, option: str, run: str) -> AbstractContextManager[None]:
    """Keep other runs away from a target, and make the folders above it. Raises the errors of `hold_output`.

    option: names the target on the command line.
    run: the command, in the error.
    """
    from moec.compiler.workspace.durable import Disk
    from moec.compiler.workspace.output_lock import hold_output

    return hold_output(target, Disk(), output.say, option, run)


def report_archive(what: str, source: Path, target: Path, before: int, after: int, as_json: bool) -> None:
    if as_json:
        output.data_json({"path": str(target), "source_bytes": before, "bytes": after})
        return
    sizes = f"{output.human_bytes(before)} to {output.human_bytes(after)}"
    output.data(f"{what} `{source}` into `{target}`: {sizes}")
