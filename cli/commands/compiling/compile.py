"""`moec compile`: from a checkpoint and a target to a certified bundle."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.files.implied_names import write_implied

from ...compile_devices import MakeRequest, compile_all, run_on
from ...lossy_modes.mode_sweep import mode_sweep_option
from ...options.paths import (
    PATH,
    PLACE,
    item_seed_option,
    limit_option,
    long_items_option,
    shots_option,
    work_memory_option,
)
from ...options.set_option import COMPILE_SETTINGS, set_option
from ...options.systems import COMPILED_SYSTEMS, as_option, prescribed_compile
from ...options.task_options import TemplateProcesses, task_options, task_settings
from ...simulation.compile_eviction import fit_to_texts
from ...terminal import output
from ...terminal.compile_log import LOG_MARK, LOG_SUFFIX, CompileLog, stage_table
from ...terminal.compile_result import check_measurements, check_outputs, print_curve, print_forecast, print_result
from ...terminal.help_sections import SectionCommand, section_option
from ..bundles.report import draw_card, report_beside
from .partial_bundle import open_partial, torch_threads

if TYPE_CHECKING:
    from moec.compiler.request.options import CompileOptions
    from moec.compiler.request.plan import CompileResult
    from moec.compiler.request.request import CompileRequest
    from moec.manifests.errors import CheckpointError

_task = section_option("Task")
_machine = section_option("Machine")
_search = section_option("Formats and search")
_planned = section_option("Plans and measurements")
TARGETS = ("loss", "kl", "bits_per_weight", "size", "uniform", "keep_codes")
MAX_DIGITS = 9
"""Digits of a number in a list."""
MAX_SHOWN = 80
"""Characters of a wrong value that an error repeats."""


@click.command(
    "compile",
    cls=SectionCommand,
    shown=("", "Machine"),
    short_help="Find the fewest bytes that keep a target; write a bundle.",
)
@click.argument("model", type=PLACE)
@click.option("-o", "--output", "target_path", type=PATH, help="Bundle folder.  [default: NAME-moec]")
@click.option("--loss", metavar="SHARE", help="Target: relative loss of the task's metric, like `2%` or `0.02`.")
@click.option(
    "--kl", type=float, metavar="NATS", help="Target: mean KL to the checkpoint, nats per token, like `0.05`."
)
@click.option(
    "--bits-per-weight", type=float, metavar="BITS", help="Target: bits per weight of routed experts, scales included."
)
@click.option("--size", metavar="SIZE", help="Target: bytes of routed experts, like `2.1GiB`.")
@click.option(
    "--uniform",
    type=float,
    metavar="BITS",
    help="One bitwidth for all experts: no search. With --data: statistics, and GPTQ.",
)
@click.option("--keep-codes", is_flag=True, help="Keep the codes of a quantized MODEL: no search.")
@click.option(
    "--data",
    type=PLACE,
    metavar="DATA",
    help="Task items: a folder with train, validation and test files, one file to divide, or a hub name.",
)
@click.option(
    "--task", "tasks", multiple=True, metavar="NAME_OR_FILE", help="gsm8k, mmlu, ..., or a TOML file; repeatable."
)
@click.option(
    "--effort",
    type=click.Choice(["quick", "default", "thorough"]),
    default="default",
    metavar="LEVEL",
    help="quick (the KL alone chooses the plan), default or thorough.",
)
@_machine(
    "--device",
    "devices",
    type=PLACE,
    multiple=True,
    default=("host",),
    show_default=True,
    metavar="PROFILE,...",
    help="Device profile: a name or a TOML file. Several (with commas) give one bundle each, `NAME-DEVICE`.",
)
@_search(
    "--dense-bits",
    type=int,
    metavar="16|8|6|5|4",
    help="Bits of attention, embedding, lm_head.  [default: searched; 8 with --uniform]",
)
@_search("--bits", metavar="LIST", help="Bitwidths offered to experts, 5 and 6 too.  [default: 1,1.6,2,3,4,8,16]")
@_search(
    "--group-size",
    metavar="LIST",
    help="Columns per scale; 0: one scale per row.  [default: 32,64,128; at 1.6 bits 0,128]",
)
@_search(
    "--symmetric/--asymmetric",
    default=None,
    help="With --uniform: formats without minima, or with.  [default: without minima at 4 to 8 bits in groups of 32]",
)
@_search(
    "--sensitivity",
    type=click.Choice(["auto", "fisher", "proxy", "exact"]),
    default="auto",
    show_default=True,
    help="Loss prediction. fisher (auto): gradients; proxy: output errors; exact: one expert at a time, as EdgeMoE.",
)
@_search(
    "--search",
    type=click.Choice(["knapsack", "edgemoe", "edgemoe-popularity"]),
    default="knapsack",
    show_default=True,
    help="knapsack: every unit its own format; edgemoe: importance list and count; edgemoe-popularity: the list weighs "
    "uses.",
)
@_search(
    "--objective",
    type=click.Choice(["tpot", "bytes-per-token", "size"]),
    help="What the search minimises. size: bytes; bytes-per-token: bytes that a token reads; tpot: the longer time, "
    "reading or computing.  [default: by the device]",
)
@_search(
    "--quantizer",
    type=click.Choice(["gptq", "rtn", "quanto", "auto-gptq"]),
    default="gptq",
    show_default=True,
    help="gptq: with calibration data; rtn: round to nearest; quanto: optimum-quanto's optimizers; auto-gptq: the "
    "archived package's GPTQ.",
)
@shots_option
@long_items_option
@task_options
@_task(
    "--confidence",
    type=float,
    metavar="SHARE",
    help="With --loss: confidence of the verdict, which may come before the last item.",
)
@_search(
    "--fallback-bits",
    type=int,
    metavar="BITS",
    help="Store a second version of every larger expert in 1 to 6 bits, for `moec run --as hobbit`.",
)
@_search(
    "--prune-experts/--keep-experts",
    "prune",
    default=None,
    help="Let the search leave out experts.  [default: with --loss and --kl]",
)
@_search(
    "--swaps",
    type=int,
    metavar="N",
    help="Plans of equal bytes that the search also measures.  [default: 24; 0 for large models]",
)
@mode_sweep_option
@limit_option
@item_seed_option
@_search(
    "--comparisons/--no-comparisons",
    default=None,
    help="Compare with the best uniform format and EdgeMoE's search, or not.  [default: as far as they are cheap]",
)
@work_memory_option
@_machine("--threads", type=int, metavar="N", help="Threads that compute.  [default: all processors of the process]")
@_machine(
    "--torch-device",
    default="cpu",
    show_default=True,
    metavar="cpu|cuda|cuda:N",
    help="Device of calibration, quantization, gradients and KL of plans.",
)
@_machine(
    "--cluster", metavar="ADDRESS", help="Use the workers of a Ray cluster: `auto`, or an address like `10.0.0.1:6379`."
)
@_task(
    "--popularity",
    type=PATH,
    metavar="FILE",
    help="Use of experts on devices, from `moec merge-traces`, instead of that in the data.",
)
@_planned("--plan-only", is_flag=True, help="Print the plan and the cost of each stage. Write no bundle.")
@_planned("--estimate", is_flag=True, help="Print the predicted time, memory and disk of each stage, and stop.")
@_planned(
    "--sweep", metavar="RANGE", help="Print the fewest bytes at each loss, like `0.5%..20%` or `1%,2%`. No bundle."
)
@_planned(
    "--measurements",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Keep measurements in FOLDER; take those of earlier compiles of the same checkpoint and data. "
    "Implies --resume.",
)
@as_option(COMPILED_SYSTEMS)
@set_option(COMPILE_SETTINGS)
@click.option("--resume", is_flag=True, help="Continue an interrupted compile of the same inputs.")
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle when the new one is complete.")
@click.option("--json", "as_json", is_flag=True, help="Print the content of quality.json.")
def compile_command(model: str, target_path: Path | None, as_json: bool, **values: Any) -> None:
    """Compile folder MODEL for a device. MODEL may also be a hub id, a GGUF file, or a URL that fsspec can open.

    Give exactly one target. The search measures plans on the validation items. The certificate runs the bundle on the
    test items, with the same runtime as on the device.

    \b
    moec compile mixtral --loss 2% --data gsm8k/        fewest bytes that lose at most 2 %
    moec compile mixtral --uniform 4                    4 bits for all experts; add --data for GPTQ
    moec compile mixtral --size 2.1GiB --data a.jsonl   best quality in 2.1 GiB
    moec compile mixtral --sweep 0.5%..20% --data d/    fewest bytes at each loss: a table, JSON and a plot
    moec compile mixtral --loss 2% --data gsm8k/ --device jetson-agx-orin,laptop    one bundle for each

    On many machines the plan and the bytes are the same. All need the same version of moec[cluster], and MODEL is a
    shared path or a URL.

    \b
    ray start --head                                    on this machine
    ray start --address=10.0.0.1:6379                   on each other machine, with the address that was printed
    moec compile s3://models/mixtral --loss 2% --data d/ --cluster auto
    """
    from moec.manifests.errors import OptionError

    context, source = click.get_current_context(), click.core.ParameterSource.COMMANDLINE
    given = {name for name in values if context.get_parameter_source(name) is source}
    values |= prescribed_compile(values["preset"], given)
    sweep = _check_before_imports(values)
    options = compile_options(values)
    destination = target_path or Path(f"{Path(model.rstrip('/')).resolve().name.removesuffix('.gguf') or 'model'}-moec")
    if not destination.name:
        raise OptionError(f"`-o {destination}` names no folder of its own", "name the bundle, like `-o name-moec`")
    if values["threads"] is not None and values["cluster"]:
        raise OptionError("`--threads` is of this machine, and `--cluster` computes on others", "leave out `--threads`")
    devices = [name for given in values["devices"] for name in given.split(",")]
    if values["measurements"] is not None:
        check_measurements(values["measurements"], destination, len(devices) > 1)
    writes_nothing = values["estimate"] or values["plan_only"] or len(devices) > 1  # the names of several come later
    check_outputs(destination, writes_nothing, bool(sweep))
    with TemplateProcesses() as processes, torch_threads(values["threads"]):

        def make_request(device: str, target: Path, log: CompileLog) -> CompileRequest:
            # Checkpoint and data, for `moec compare`. An existing path becomes absolute, other texts stay.
            for name, text in (("model", model), ("data", options.data)):
                if text is not None:
                    log.sources[name] = str(Path(text).absolute()) if os.path.exists(text) else text
            log.work = values["measurements"] or log.work
            request = _request(model, target, options, log, {**values, "device": device})
            request.sweep, request.plan_only = sweep, values["plan_only"] or bool(sweep)
            request.templates = processes.of_model
            return request

        if len(devices) > 1:
            for name in ("estimate", "sweep", "cluster"):
                if values[name]:
                    raise OptionError(f"`--{name}` takes one device, found several", "name one with `--device`")
            check_output = partial(check_outputs, writes_nothing=values["plan_only"], is_sweep=False)
            compile_all(devices, destination, make_request, check_output, values["plan_only"], as_json)
        else:
            _compile_one(make_request, devices[0], destination, values, as_json)


def _check_before_imports(values: dict[str, Any]) -> tuple[float, ...]:
    """Check what needs no model: target, data, tasks and devices. The import of torch takes seconds.

    Return the losses of `--sweep`. The largest becomes the target.
    Raises the errors of these options.
    """
    from moec.compiler.request.targets import choose_target, parse_sweep, require_data
    from moec.evaluation.sources import check_source
    from moec.evaluation.tasks import find_task
    from moec.manifests.errors import OptionError
    from moec.profiles.device import HOST_NAME
    from moec.profiles.loading import load_profile

    losses: tuple[float, ...] = ()
    if values["sweep"] is not None:
        losses = parse_sweep(values["sweep"])
        if values["loss"] is not None:
            raise OptionError("`--sweep` and `--loss` both name losses", "drop one of them")
        values["loss"] = f"{100 * losses[-1]:.6f}%"
    target = choose_target(*(values[name] for name in TARGETS))
    require_data(target, values["data"])
    if values["data"] is not None:
        check_source(values["data"])
    for task in values["tasks"]:
        find_task(task, values["trust_metric_code"])
    for given in values["devices"]:
        for name in given.split(","):
            if name.strip() not in ("", HOST_NAME):
                load_profile(name.strip())
    return losses


def _compile_one(
    make_request: MakeRequest, device: str, destination: Path, values: dict[str, Any], as_json: bool
) -> None:
    """Compile for one device, or predict the cost, and print the result."""
    from moec.compiler.forecast import forecast
    from moec.compiler.pipeline import compile_checkpoint

    log = CompileLog(destination)
    request = make_request(device, destination, log)
    with log:
        if values["estimate"]:
            print_forecast(forecast(request), as_json)
            return
        result = compile_checkpoint(request)
    if result.curve is not None:
        print_curve(result.curve, destination, as_json)
    elif as_json:
        output.data_json(result.quality)
    else:
        print_result(result, stage_table(log.stages()) if values["plan_only"] else "", run_on(request.profile, result))


def _request(
    model: str, destination: Path, options: CompileOptions, log: CompileLog, values: dict[str, Any]
) -> CompileRequest:
    """Return the request of the command line, without the sweep. Raises OptionError."""
    from moec.compiler.request.options import Talk
    from moec.compiler.request.request import CompileRequest
    from moec.compiler.workspace.output_lock import existing_parent
    from moec.manifests.errors import OptionError
    from moec.manifests.sizes import parse_bytes
    from moec.profiles.loading import load_profile

    from ...lossy_modes.mode_sweep import DYNAMIC, ModesMeasurement

    profile, measure_modes = load_profile(values["device"], existing_parent(destination)), None
    has_bundle = options.data is not None and not values["plan_only"]
    if values["modes"] is None:
        if has_bundle and options.fallback_bits is not None:
            measure_modes = ModesMeasurement(DYNAMIC, is_asked=False)
    elif has_bundle:
        measure_modes = ModesMeasurement(values["modes"])
    else:
        raise OptionError(
            "`--modes` is measured on held-out items of a whole bundle",
            "add `--data`, leave out `--plan-only`; `moec eval --modes sweep` measures any bundle",
        )
    return CompileRequest(
        source=model,
        output=destination,
        options=options,
        profile=profile,
        open_runtime=partial(open_partial, threads=values["threads"]) if values["threads"] else open_partial,
        measure_modes=measure_modes,
        fit_eviction=fit_to_texts if values["preset"] == "hobbit" else None,
        draw_card=draw_card,
        check_companions=companion_problems,
        talk=Talk(log.note, log.progress, lambda result: write_beside(result, log), log.forecast),
        resume=values["resume"],
        measurements=values["measurements"],
        overwrite=values["overwrite"],
        cluster=values["cluster"],
        popularity=values["popularity"],
        memory_bytes=0 if values["memory"] is None else parse_bytes(values["memory"], "--memory"),
    )


def companion_problems(folder: Path) -> list[CheckpointError]:
    """Return the problems of the recommended sampling and of the chat template.

    A template that refuses one message may take others. Raises ExecutionError if its process cannot start.
    """
    from moec.manifests.errors import CheckpointError, InputError, ManifestInvalid, MissingDependency
    from moec.manifests.files.input_file import read_input
    from moec.manifests.files.limits import MAX_CONFIG_BYTES
    from moec.runtime.text.generation_defaults import GENERATION_NAME, sampling_in
    from moec.runtime.text.template_process import CONFIG_NAME, TEMPLATE_NAME, render_chat

    problems = list[CheckpointError]()
    generation = folder / GENERATION_NAME
    try:
        if generation.is_file():
            sampling_in(read_input(generation, MAX_CONFIG_BYTES, follow_links=True), generation)
    except ManifestInvalid as error:
        problems.append(CheckpointError(error.message, "repair the file, or remove it"))
    if not any((folder / name).is_file() for name in (TEMPLATE_NAME, CONFIG_NAME)):
        return problems
    try:
        render_chat(folder, [{"role": "user", "content": "a"}])
    except ManifestInvalid as error:
        problems.append(CheckpointError(error.message, "repair the file, or remove it"))
    except (InputError, MissingDependency):  # no template, a template for other messages, or no jinja2
        pass
    return problems


def write_beside(result: CompileResult, log: CompileLog) -> None:
    """Write the log with times and the report next to the bundle. Raises DoesNotFit, InputError."""
    if result.path is None:
        return
    log.done()
    base = result.path
    lines = json.dumps({"events": log.events, "stages": log.stages(), **log.sources}, indent=1)
    write_implied(base.with_name(base.name + LOG_SUFFIX), lines.encode(), LOG_MARK)
    report_beside(base)


def compile_options(values: dict[str, Any]) -> CompileOptions:
    """Return the options of the command line. Raises OptionError."""
    from moec.compiler.request.options import DEFAULT_BITS, CompileOptions
    from moec.compiler.request.targets import choose_target

    given = {field.name: values[field.name] for field in fields(CompileOptions) if field.name in values}
    given |= {
        "target": choose_target(*(values[name] for name in TARGETS)),
        "tasks": tuple(values["tasks"]),
        "bits": _bitwidths(values["bits"]) if values["bits"] is not None else DEFAULT_BITS,
        "group_sizes": _numbers(values["group_size"]),
        "task_settings": task_settings(values),
    }
    return CompileOptions(**given)


def _numbers(text: str | None) -> tuple[int, ...]:
    """Parse a list: `2,3,4` -> (2, 3, 4). Raises OptionError."""
    from moec.manifests.errors import OptionError

    if text is None:
        return ()
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and len(number.strip()) <= MAX_DIGITS for number in numbers):
        raise OptionError(f"`{text[:MAX_SHOWN]}` is not a list of numbers", "write them with commas, like `32,64`")
    return tuple(map(int, numbers))


def _bitwidths(text: str) -> tuple[float, ...]:
    """Parse a list of bitwidths: `1,1.6,2` -> (1, 1.6, 2). Raises OptionError."""
    from moec.manifests.quant import TERNARY

    bitwidths: list[float] = []
    for number in text.split(","):
        bitwidths += (TERNARY,) if number.strip() == str(TERNARY) else _numbers(number)
    return tuple(bitwidths)
