"""The result of a compile, a sweep or an estimate on stdout, and the files of a sweep."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.files.implied_names import write_implied

from . import output
from .compile_log import forecast_table
from .report import comparison_table, curve_table, loss_table, plan_heat_map, verdict_line

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
