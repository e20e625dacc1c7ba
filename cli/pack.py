"""`moec pack` and `moec unpack`: a bundle as one file to ship, and back."""

from __future__ import annotations

import os
from pathlib import Path

import click

from moec.manifests.bundle import PARTIAL_SUFFIX
from moec.manifests.errors import InputError
from moec.manifests.output_file import STDOUT, check_folder, made_folders

from . import output
from .paths import PATH, bundle_argument
from .runtime_options import bundle_folder

SUFFIX = ".moec"


@click.command("pack", short_help="Put a bundle into one file to ship.")
@bundle_argument
@click.argument("file", required=False, type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a sentence.")
def pack_command(bundle: Path, file: Path | None, as_json: bool) -> None:
    """Pack the bundle in folder BUNDLE into FILE, by default BUNDLE.moec.

    Every member is a checksummed frame, compressed where that pays; an interrupted pack goes on where it stopped. To
    run the bundle, unpack it: experts are never read through compression.

    \b
    moec pack mixtral-moec
    moec pack mixtral-moec /media/stick/mixtral.moec
    """
    folder = bundle_folder(bundle)
    target = file or folder.resolve().with_name(folder.resolve().name + SUFFIX)
    _check_target(target)
    from moec.runtime.archive import pack_bundle

    with made_folders(target), output.Progress("packing") as progress:
        pack_bundle(folder, target, progress)
    before = sum(path.stat().st_size for path in folder.iterdir())
    _report("packed", folder, target, before, target.stat().st_size, as_json)


@click.command("unpack", short_help="Make a bundle from a packed file.")
@click.argument("file", type=PATH)
@click.argument("folder", metavar="[DIR]", required=False, type=PATH)
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Refuse an archive that unpacks to more than SIZE, like `8GiB`.  [default: what the disk has free]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a sentence.")
def unpack_command(file: Path, folder: Path | None, max_size: str | None, as_json: bool) -> None:
    """Unpack FILE into the new folder DIR, by default FILE without its ending, and check every byte.

    The bundle is the one that was packed, byte for byte. The folder appears when it is complete; an interrupted unpack
    goes on where it stopped. A packed file of a few kB can unpack to any size: bound it with --max-size. The size is
    known before anything is written.

    \b
    moec unpack mixtral.moec
    moec unpack mixtral.moec /models/mixtral --max-size 30GiB
    """
    if not file.is_file():
        raise InputError(f"`{file}` is not a file, expected a packed bundle", "name the file that `moec pack` wrote")
    target = folder or file.with_suffix("")
    if target == file:
        raise InputError(f"`{file}` has no ending to leave out", f"name the folder: moec unpack {file} DIR")
    _check_target(target)
    from moec.runtime.archive import unpack_bundle
    from moec.runtime.options import parse_bytes

    max_bytes = None if max_size is None else parse_bytes(max_size)
    with made_folders(target), output.Progress("unpacking") as progress:
        unpack_bundle(file, target, progress, max_bytes=max_bytes)
    after = sum(path.stat().st_size for path in target.iterdir())
    _report("unpacked", file, target, file.stat().st_size, after, as_json)


def _check_target(target: Path) -> None:
    """Refuse before the work what cannot become a new archive or a new bundle. Raises InputError, DoesNotFit."""
    if os.path.lexists(target):
        raise InputError(f"`{target}` exists already", "remove it or name another")
    if target == STDOUT:
        raise InputError("an archive or a bundle is not written to standard output", "name a file or a folder")
    check_folder(target, PARTIAL_SUFFIX)


def _report(what: str, source: Path, target: Path, before: int, after: int, as_json: bool) -> None:
    if as_json:
        output.data_json({"path": str(target), "source_bytes": before, "bytes": after})
        return
    sizes = f"{output.human_bytes(before)} to {output.human_bytes(after)}"
    output.data(f"{what} `{source}` into `{target}`: {sizes}")
