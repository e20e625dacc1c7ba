"""`moec compile`: a checkpoint and a target in, a certified bundle out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.files.output_file import check_folder, check_output, write_output

from ..lossy_modes.mode_sweep import mode_sweep_option
from ..options.paths import PATH, PLACE
from ..terminal import output
from ..terminal.compile_log import CompileLog, forecast_table, stage_table
from ..terminal.report import comparison_table, curve_table, loss_table, plan_heat_map, verdict_line

if TYPE_CHECKING:
    from moec.compiler.forecast import StageForecast
    from moec.compiler.request.options import CompileOptions
    from moec.compiler.request.ports import MeasureModes
    from moec.compiler.request.request import CompileRequest
    from moec.compiler.request.result import CompileResult, LossCurve

    from ..measuring.text_engines import BundleEngine

LOG_SUFFIX = ".log.json"
PICTURE_SUFFIX = ".report.png"
CURVE_SUFFIX = ".curve.json"
LONGEST_SUFFIX = ".moec-replaced"
"""The longest that is added to the name of a bundle for what lies next to it."""
CERTIFY_SLOTS = 64
MAX_DIGITS = 9
"""Digits of a number in a list."""
MAX_SHOWN = 80
"""Characters of a wrong value that an error repeats."""


def _numbers(text: str | None) -> tuple[int, ...]:
    """`2,3,4` -> (2, 3, 4). Raises OptionError."""
    from moec.manifests.errors import OptionError

    if text is None:
        return ()
    parts = text.split(",")
    if not all(part.strip().isdecimal() and len(part.strip()) <= MAX_DIGITS for part in parts):
        raise OptionError(f"`{text[:MAX_SHOWN]}` is not a list of numbers", "write them with commas, like `32,64`")
    return tuple(int(part) for part in parts)


def _bitwidths(text: str) -> tuple[float, ...]:
    """`1,1.6,2` -> (1, 1.6, 2). Raises OptionError."""
    from moec.manifests.quant import TERNARY

    found: list[float] = []
    for part in text.split(","):
        found += (TERNARY,) if part.strip() == str(TERNARY) else _numbers(part)
    return tuple(found)


@click.command("compile", short_help="Find the fewest bytes that keep a target; write a bundle.")
@click.argument("model", type=PLACE)
@click.option("-o", "--output", "target_path", type=PATH, help="Bundle folder.  [default: NAME-moec]")
@click.option("--loss", metavar="SHARE", help="Target: relative loss of the task's metric, like `2%` or `0.02`.")
@click.option(
    "--kl", type=float, metavar="NATS", help="Target: mean KL to the checkpoint, nats per token, like `0.05`."
)
@click.option("--bits-per-weight", type=float, metavar="BITS", help="Target: of routed experts, scales included.")
@click.option("--size", metavar="SIZE", help="Target: bytes of the routed experts, like `2.1GiB`.")
@click.option("--uniform", type=float, metavar="BITS", help="One bitwidth for all experts: no search, no data.")
@click.option(
    "--data",
    type=PLACE,
    metavar="DIR_OR_JSONL",
    help="Task items: train/validation/test files, or one JSONL to divide.",
)
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="gsm8k, samsum, mmlu, ...; repeatable.")
@click.option(
    "--device",
    type=PLACE,
    default="host",
    show_default=True,
    metavar="PROFILE",
    help="Device profile, a name or a TOML.",
)
@click.option("--dense-bits", type=int, metavar="16|8|4", help="Of attention, embedding, lm_head.  [default: searched]")
@click.option(
    "--bits", metavar="LIST", default="1,1.6,2,3,4,8,16", show_default=True, help="Bitwidths offered to experts."
)
@click.option(
    "--group-size", metavar="LIST", help="Columns per scale; 0 is one per row.  [default: 32,64,128; of 1.6 bits 0,128]"
)
@click.option(
    "--symmetric/--asymmetric",
    default=None,
    help="With --uniform: no minima.  [default: of 4 and 8 bits in groups of 32, which makes 4.5 and 8.5]",
)
@click.option(
    "--sensitivity",
    type=click.Choice(["auto", "fisher", "proxy", "exact"]),
    default="auto",
    show_default=True,
    help="fisher (auto): from gradients; proxy: from output errors; exact: each expert alone, as EdgeMoE does.",
)
@click.option(
    "--search",
    type=click.Choice(["knapsack", "edgemoe"]),
    default="knapsack",
    show_default=True,
    help="edgemoe: importance list and count.",
)
@click.option(
    "--objective",
    type=click.Choice(["tpot", "bytes-per-token", "size"]),
    help="What a byte costs.  [default: the device's]",
)
@click.option(
    "--quantizer",
    type=click.Choice(["gptq", "rtn", "quanto"]),
    default="gptq",
    show_default=True,
    help="rtn: round to nearest; quanto: optimum-quanto's optimizers.",
)
@click.option("--shots", type=int, default=0, show_default=True, help="Solved examples in front of each item.")
@click.option(
    "--confidence",
    type=float,
    metavar="SHARE",
    help="With --loss: stop certifying as soon as a verdict has it, at 500, 1,000, 2,000, ... items.",
)
@click.option(
    "--fallback-bits",
    type=int,
    metavar="BITS",
    help="Store a second version of every larger expert in 1 to 4 bits, for `moec run --dynamic-precision`.",
)
@click.option(
    "--prune-experts/--keep-experts",
    "prune",
    default=None,
    help="Whether the search may leave experts out.  [default: with --loss and --kl, where gradients set prices]",
)
@click.option(
    "--swaps",
    type=int,
    metavar="N",
    help="Plans of equal bytes that the search measures for a better one.  [default: 24; one layer at a time 0]",
)
@mode_sweep_option("Measure all lossy modes, or these settings, on up to 500 held-out items, for quality.json.")
@click.option("--limit", type=int, metavar="N", help="Use N items of each split.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the choice of items and the order of calibration."
)
@click.option(
    "--comparisons/--no-comparisons",
    default=None,
    help="Measure the best uniform format and EdgeMoE's search, or neither.  [default: up to a third of the measuring]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="What the compile may take; larger models go one layer at a time.  [default: 7/8 of the machine's]",
)
@click.option(
    "--cluster", metavar="ADDRESS", help="Hand work to a Ray cluster: `auto`, or its address like `10.0.0.1:6379`."
)
@click.option("--plan-only", is_flag=True, help="Print the plan and what each stage took, write no bundle.")
@click.option("--estimate", is_flag=True, help="Only say what time, memory and disk each stage will take.")
@click.option("--sweep", metavar="RANGE", help="No bundle: bytes over losses, like `0.5%..20%` or `1%,2%`.")
@click.option("--resume", is_flag=True, help="Go on where an interrupted compile of the same inputs stopped.")
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle once the new one is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print quality.json's content.")
def compile_command(model: str, target_path: Path | None, as_json: bool, **values: Any) -> None:
    """Compile the checkpoint in folder MODEL (or a hub id, or a URL that fsspec knows) for a device. Give exactly one
    target.

    Every promise is measured: the search looks at the validation items, the certificate at the test items, with the
    runtime that ships.

    \b
    moec compile mixtral --loss 2% --data gsm8k/        fewest bytes that lose at most 2 %
    moec compile mixtral --uniform 4                    4 bits everywhere, no data needed
    moec compile mixtral --size 2.1GiB --data a.jsonl   best quality in that many bytes
    moec compile mixtral --sweep 0.5%..20% --data d/    the fewest bytes at each loss, as a table, JSON and a plot

    On many machines, to the same plan and bytes; all of them have the same moec[cluster], and MODEL is a path that they
    share or a URL:

    \b
    ray start --head                                    on this machine, and on each of the others:
    ray start --address=10.0.0.1:6379                   with the address that this one printed; then, here:
    moec compile s3://models/mixtral --loss 2% --data d/ --cluster auto
    """
    from moec.compiler.forecast import forecast
    from moec.compiler.pipeline import compile_checkpoint
    from moec.manifests.errors import OptionError

    sweep = _sweep(values)
    options = _options(values)
    destination = target_path or Path(f"{Path(model.rstrip('/')).resolve().name or 'model'}-moec")
    if not destination.name:
        raise OptionError(f"`-o {destination}` names no folder of its own", "name the bundle, like `-o name-moec`")
    _check_outputs(destination, values["estimate"] or values["plan_only"], bool(sweep))
    log = CompileLog(destination)
    log.sources = _sources(model, options.data)
    request = _request(model, destination, options, log, values)
    request.sweep, request.plan_only = sweep, values["plan_only"] or bool(sweep)
    with log:
        if values["estimate"]:
            print_forecast(forecast(request), as_json)
            return
        result = compile_checkpoint(request)
    if result.curve is not None:
        print_curve(result.curve, destination, as_json)
        return
    if as_json:
        output.data_json(result.quality)
        return
    print_result(result, stage_table(log.stages()) if values["plan_only"] else "")


def _check_outputs(destination: Path, writes_nothing: bool, is_sweep: bool) -> None:
    """Refuse before the work what cannot be written after it. Raises InputError, DoesNotFit."""
    check_folder(destination, LONGEST_SUFFIX)
    curve = destination.with_name(destination.name + CURVE_SUFFIX)
    curves = (curve, curve.with_suffix(".png"))
    reports = [destination.with_name(destination.name + suffix) for suffix in (LOG_SUFFIX, PICTURE_SUFFIX)]
    if not writes_nothing:
        for path in curves if is_sweep else reports:
            check_output(path)


def _request(
    model: str, destination: Path, options: CompileOptions, log: CompileLog, values: dict[str, Any]
) -> CompileRequest:
    """What the command line asks for, its sweep apart."""
    from moec.compiler.request.options import Talk
    from moec.compiler.request.request import CompileRequest
    from moec.manifests.sizes import parse_bytes

    return CompileRequest(
        source=model,
        output=destination,
        options=options,
        profile=_profile(values["device"], destination),
        open_runtime=open_partial,
        measure_modes=_modes_measurement(values, options),
        talk=Talk(log.note, log.progress),
        resume=values["resume"],
        overwrite=values["overwrite"],
        cluster=values["cluster"],
        published=lambda result: write_beside(result, log),
        memory_bytes=0 if values["memory"] is None else parse_bytes(values["memory"], "--memory"),
    )


def _sources(model: str, data: str | None) -> dict[str, str]:
    """Where checkpoint and data were, for `moec compare`: a path as an absolute one, anything else as it was given."""
    given = {"model": model, **({} if data is None else {"data": data})}
    return {name: str(Path(text).absolute()) if os.path.exists(text) else text for name, text in given.items()}


def _modes_measurement(values: dict[str, Any], options: CompileOptions) -> MeasureModes | None:
    """What `--modes` measures. Raises OptionError where there is nothing to measure it on."""
    from moec.manifests.errors import OptionError

    from ..lossy_modes.modes_measurement import ModesMeasurement

    if values["modes"] is None:
        return None
    if options.data is None or values["plan_only"]:
        raise OptionError(
            "`--modes` is measured on held-out items of a whole bundle",
            "add `--data`, leave out `--plan-only`; `moec eval --modes sweep` measures any bundle",
        )
    return ModesMeasurement(values["modes"])


def _sweep(values: dict[str, Any]) -> tuple[float, ...]:
    """The losses of `--sweep`, the largest of which becomes the target. Raises OptionError."""
    from moec.compiler.request.targets import parse_sweep
    from moec.manifests.errors import OptionError

    if values["sweep"] is None:
        return ()
    losses = parse_sweep(values["sweep"])
    if values["loss"] is not None:
        raise OptionError("`--sweep` and `--loss` both name losses", "drop one of them")
    values["loss"] = f"{100 * losses[-1]:.6f}%"
    return losses


def _options(values: dict[str, Any]) -> CompileOptions:
    from moec.compiler.request.options import CompileOptions
    from moec.compiler.request.targets import choose_target

    target = choose_target(values["loss"], values["kl"], values["bits_per_weight"], values["size"], values["uniform"])
    return CompileOptions(
        target=target,
        data=values["data"],
        tasks=tuple(values["tasks"]),
        dense_bits=values["dense_bits"],
        bits=_bitwidths(values["bits"]),
        group_sizes=_numbers(values["group_size"]),
        sensitivity=values["sensitivity"],
        search=values["search"],
        objective=values["objective"],
        quantizer=values["quantizer"],
        shots=values["shots"],
        limit=values["limit"],
        seed=values["seed"],
        comparisons=values["comparisons"],
        symmetric=values["symmetric"],
        confidence=values["confidence"],
        fallback_bits=values["fallback_bits"],
        prune=values["prune"],
        swaps=values["swaps"],
    )


def _profile(name: str, destination: Path) -> Any:
    from moec.compiler.workspace.output_lock import existing_parent
    from moec.profiles.loading import load_profile

    return load_profile(name, existing_parent(destination))


@contextmanager
def open_partial(path: Path, memory_bytes: int = 0) -> Iterator[BundleEngine]:
    """The runtime on a bundle that is not published yet: how a compile certifies itself. memory_bytes 0: its own."""
    from moec.runtime.bundle.opening import open_bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.options.runtime import RuntimeOptions

    from ..measuring.text_engines import BundleEngine
    from ..options.opening import with_fitting_slots

    bundle = open_bundle(path, allow_partial=True)
    options = RuntimeOptions(slots=CERTIFY_SLOTS, memory=str(memory_bytes) if memory_bytes else None)
    with with_fitting_slots(lambda fitting: Engine(bundle, fitting), options) as engine:
        if memory_bytes:  # what it takes must be there to be counted, where another one shares the memory
            engine.cache.finish_warming()
        yield BundleEngine(engine)


def write_beside(result: CompileResult, log: CompileLog) -> None:
    """Write the log with times and the picture next to the bundle. Raises DoesNotFit, InputError."""
    from moec.compiler.bundle.plots import report_picture

    if result.path is None:
        return
    log.done()
    base = result.path
    lines = json.dumps({"events": log.events, "stages": log.stages(), **log.sources}, indent=1)
    write_output(base.with_name(base.name + LOG_SUFFIX), lines.encode())
    write_output(base.with_name(base.name + PICTURE_SUFFIX), report_picture(base.name, result.quality))


def print_curve(curve: LossCurve, destination: Path, as_json: bool) -> None:
    """A sweep: the table, and beside where a bundle would lie, JSON and a plot."""
    from moec.compiler.bundle.plots import curve_picture

    plain = {"curve": [point.to_json() for point in curve]}
    data = destination.with_name(destination.name + CURVE_SUFFIX)
    picture = data.with_suffix(".png")
    write_output(data, (json.dumps(plain, indent=1) + "\n").encode())
    write_output(picture, curve_picture(destination.name, plain["curve"]))
    if as_json:
        output.data_json(plain)
        return
    output.data(curve_table(plain["curve"]))
    output.data(f"curve    {data}, {picture.name}")
    output.data("losses are those of validation items: only a compiled bundle is certified on held-out ones")


def print_forecast(stages: Sequence[StageForecast], as_json: bool) -> None:
    """What every stage will take."""
    plain = [stage.to_json() for stage in stages]
    if as_json:
        output.data_json({"stages": plain})
        return
    output.data(forecast_table(plain))


def print_result(result: CompileResult, stages: str = "") -> None:
    """The report for people, on stdout. stages: what each stage took, in front of it."""
    quality = result.quality
    for part in (stages, plan_heat_map(quality), loss_table(quality), comparison_table(quality)):
        if part:
            output.data(part)
            output.data("")
    if result.path is not None:
        output.data(f"bundle   {result.path}")
        output.data(f"report   {result.path / 'quality.json'}, {result.path.name}{PICTURE_SUFFIX}")
    output.data(verdict_line(quality))
