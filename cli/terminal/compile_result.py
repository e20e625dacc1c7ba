"""The result of a compile, a sweep or an estimate on stdout, and the files of a sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.files.output_file import write_output

from . import output
from .compile_log import forecast_table
from .report import comparison_table, curve_table, loss_table, plan_heat_map, verdict_line

if TYPE_CHECKING:
    from moec.compiler.forecast import StageForecast
    from moec.compiler.request.result import CompileResult, LossCurve

REPORT_SUFFIX = ".report.html"
"""Name of the report next to its bundle: NAME and this."""
CURVE_SUFFIX = ".curve.json"


def print_curve(curve: LossCurve, destination: Path, as_json: bool) -> None:
    """Print the table of a sweep. Write JSON and a plot next to the path of the bundle."""
    from moec.reporting.curves import curves_of_sweep
    from moec.reporting.sweep import sweep_svg

    plain = {"curve": [point.to_json() for point in curve]}
    data = destination.with_name(destination.name + CURVE_SUFFIX)
    picture = data.with_suffix(".svg")
    write_output(data, (json.dumps(plain, indent=1) + "\n").encode())
    write_output(picture, sweep_svg(destination.name, curves_of_sweep(plain["curve"])).encode())
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
    for part in (stages, plan_heat_map(quality), loss_table(quality), comparison_table(quality)):
        if part:
            output.data(part)
            output.data("")
    if result.path is not None:
        output.data(f"bundle   {result.path}")
        output.data(f"report   {result.path / 'quality.json'}, {result.path.name}{REPORT_SUFFIX}")
    if run:
        output.data(f"run      {run}")
    output.data(verdict_line(quality))
