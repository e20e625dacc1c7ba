"""Checks before a compile that what it writes has a place."""

from __future__ import annotations

from pathlib import Path

import click

from moec.manifests.bundle import PARTIAL_SUFFIX, WORK_SUFFIX
from moec.manifests.errors import OptionError
from moec.manifests.files.implied_names import check_implied
from moec.manifests.files.output_file import check_folder

from ...terminal.compile_log import LOG_MARK, LOG_SUFFIX
from ...terminal.compile_result import (
    CURVE_MARK,
    CURVE_SUFFIX,
    PICTURE_MARK,
    PICTURE_SUFFIX,
    REPORT_MARK,
    REPORT_SUFFIX,
)

LONGEST_SUFFIX = ".moec-replaced"
"""The longest suffix of a file or folder next to a bundle."""


def check_measurements(folder: Path, destination: Path, is_many: bool) -> None:
    """Check before the work that a folder can hold measurements.

    is_many: the bundles are those of several devices, whose names begin with that of the destination.
    Raises InputError, DoesNotFit.
    """
    check_folder(folder, LONGEST_SUFFIX)
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"`--measurements {folder}` is a file, expected a folder", "name another one")
    place, bundle = folder.resolve(), destination.resolve()
    taken = [bundle.name + ending for ending in ("", PARTIAL_SUFFIX, WORK_SUFFIX)]
    above = [path.name for path in (place, *place.parents) if path.parent == bundle.parent]
    is_taken = any(name in taken or (is_many and name.startswith(f"{bundle.name}-")) for name in above)
    if is_taken or place in bundle.parents:
        raise OptionError(
            f"`--measurements {folder}` is in the way of the bundle `{destination}`", "name a folder apart from it"
        )


def check_outputs(destination: Path, writes_nothing: bool, is_sweep: bool) -> None:
    """Check before the work that the outputs can be written. Raises BadParameter, InputError, DoesNotFit."""
    for suffix in (PARTIAL_SUFFIX, WORK_SUFFIX):
        if destination.name.endswith(suffix):
            raise click.BadParameter(f"`{destination}` ends in `{suffix}`, the name of an unfinished compile.")
    check_folder(destination, LONGEST_SUFFIX)
    if writes_nothing:
        return
    curves = ((CURVE_SUFFIX, CURVE_MARK), (PICTURE_SUFFIX, PICTURE_MARK))
    reports = ((LOG_SUFFIX, LOG_MARK), (REPORT_SUFFIX, REPORT_MARK))
    for suffix, mark in curves if is_sweep else reports:
        check_implied(destination.with_name(destination.name + suffix), mark, "move it, or name another `-o`")
