"""Parts common to `moec pack` and `moec unpack`: the check of the target before the work, and the report after it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from moec.manifests.bundle import PARTIAL_SUFFIX
from moec.manifests.errors import InputError
from moec.manifests.files.output_file import STDOUT, check_folder

from ..terminal import output
from .paths import refuse_inside_bundle


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
