"""The result of a compile, a sweep or an estimate on stdout, and the files next to a bundle.

Checks before the work find out whether these files have a place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moec.manifests.bundle import PARTIAL_SUFFIX, WORK_SUFFIX
from moec.manifests.errors import OptionError
from moec.manifests.files.implied_names import check_implied, write_implied
from moec.manifests.files.output_file import check_folder

from . import output
from .compile_log import LOG_MARK, LOG_SUFFIX, forecast_table
from .report import comparison_table, curve_table, loss_table, plan_heat_map, verdict_line

LONGEST_SUFFIX = ".moec-replaced"
"""The longest suffix of a file or folder next to a bundle."""

if TYPE_CHECKING:
    from moec.compiler.forecast import StageForecast
    from moec.compiler.request.plan import CompileResult, LossCurve

REPORT_SUFFIX = ".report.html"
"""Name of the report next to its bundle: NAME and this."""
REPORT_MARK = re.compile(
    rb'\A<!doctype html>\n.*(?:<meta name="generator" content="moec">|from <code>moec\.json</code> and)', re.DOTALL
)
"""A report of any version: earlier ones have no generator, and a foot that names their sources."""
CURVE_SUFFIX, PICTURE_SUFFIX = ".curve.json", ".curve.svg"
CURVE_MARK = re.compile(rb'\A\{\s*"curve": \[')
PICTURE_MARK = re.compile(rb'\A<svg xmlns="http://www\.w3\.org/2000/svg" class="chart"')


def print_curve(curve: LossCurve, destination: Path, as_json: bool) -> None:
    """Print the table of a sweep. Write JSON and a plot next to the path of the bundle."""
    from moec.reporting.card import sweep_svg
    from moec.reporting.curves import curves_of_sweep

    plain = {"curve": [point.to_json() for point in curve]}
    data = destination.with_name(destination.name + CURVE_SUFFIX)
    picture = destination.with_name(destination.name + PICTURE_SUFFIX)
    write_implied(data, (json.dumps(plain, indent=1) + "\n").encode(), CURVE_MARK)
    write_implied(picture, sweep_svg(destination.name, curves_of_sweep(plain["curve"])).encode(), PICTURE_MARK)
    if as_json:
        output.data_json(plain)
        return
    output.data(curve_table(plain["curve"]))
    output.data(f"curve    {data}, {picture.name}")
    output.data("losses are those of validation items: only a compiled bundle is certified on held-out ones")


def print_forecast(stages: Sequence[StageForecast], as_json: bool) -> None:
    """Print the predicted cost of every stage."""
    plain = [stage.to_json() for stage in stages]
    if as_json:
        output.data_json({"stages": plain})
        return
    output.data(forecast_table(plain))


def print_result(result: CompileResult, stages: str = "", run: str = "") -> None:
    """Print the report as text.

    stages: table of the cost of each stage, printed first.
    run: settings of a run on the device of the bundle, or empty.
    """
    quality = result.quality
    for table in (stages, plan_heat_map(quality), loss_table(quality), comparison_table(quality)):
        if table:
            output.data(f"{table}\n")
    if result.path is not None:
        output.data(f"bundle   {result.path}")
        output.data(f"report   {result.path / 'quality.json'}, {result.path.name}{REPORT_SUFFIX}")
    if run:
        output.data(f"run      {run}")
    output.data(verdict_line(quality))


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
