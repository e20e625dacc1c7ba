"""`moec export-plan`: the plan of a bundle in the terms of another engine."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.compiler.export.engine_formats import ENGINES, GPTQMODEL, LLAMA_CPP, MLX
from moec.manifests.errors import OptionError
from moec.manifests.files.output_file import STDOUT, write_output

from ...options.opening import bundle_folder
from ...options.paths import OUTPUT_FILE, bundle_argument, json_option, work_memory_option
from ...terminal import output
from ...terminal.compile_log import CompileLog, measurement_inputs

if TYPE_CHECKING:
    from moec.compiler.export.coarse_plan import EnginePlan
    from moec.runtime.bundle.open_bundle import Bundle

_PROJECTIONS = ("gate", "up", "down")
_USES = {
    LLAMA_CPP: "llama-quantize --tensor-type-file {file} MODEL-F16.gguf TARGET.gguf Q8_0",
    MLX: "python {file} MODEL TARGET",
    GPTQMODEL: "QuantizeConfig(bits=4, dynamic=json.load(open({file})))",
}


@click.command("export-plan", short_help="Write the plan of a bundle for another engine's quantizer.")
@bundle_argument
@click.option("--for", "engine", type=click.Choice(ENGINES), required=True, help="The engine.")
@click.option("-o", "--output", "target", type=OUTPUT_FILE, required=True, metavar="FILE", help="The new file.")
@click.option("--model", metavar="FOLDER", help="Measure the plan: the checkpoint of the compile.")
@click.option("--data", metavar="DATA", help="Measure the plan: the task items of the compile.")
@work_memory_option
@click.option("--resume", is_flag=True, help="Continue an interrupted measurement.")
@json_option
def export_plan_command(
    bundle: Path,
    engine: str,
    target: Path,
    model: str | None,
    data: str | None,
    memory: str | None,
    resume: bool,
    as_json: bool,
) -> None:
    """Write the plan of BUNDLE as the configuration of another engine's quantizer. It holds no weights.

    For llama.cpp it is the file of `llama-quantize --tensor-type-file`. For mlx it is a Python file with the
    `quant_predicate` of mlx-lm. For gptqmodel it is the JSON of `QuantizeConfig(dynamic=...)`. llama.cpp and mlx have
    one format for each layer and projection. They get the formats of least predicted loss within the bytes of the
    bundle's experts. GPTQModel keeps the bitwidth and the group size of each matrix.

    With `--model` or `--data` the plan is measured: its KL in our formats of about the same bits, next to that of the
    bundle. A path that is not given comes from the log next to the bundle. Both must be those of the compile. Needs
    `pip install "moec[compile]"`.

    \b
    moec export-plan mixtral-moec --for llama.cpp -o types.txt
    moec export-plan mixtral-moec --for mlx --model mixtral --data gsm8k/ -o plan.py
    """
    from moec.compiler.export.coarse_plan import coarse_plan
    from moec.compiler.export.engine_files import engine_file
    from moec.compiler.export.plan_cost import summary
    from moec.compiler.preflight.finished import plan_of
    from moec.runtime.bundle.open_bundle import open_bundle

    _check_target(target)
    is_measured = model is not None or data is not None
    given = "--memory" if memory is not None else "--resume" if resume else None
    if given is not None and not is_measured:
        raise OptionError(f"`{given}` has no effect without a measurement", "add `--model` and `--data`")
    cost: dict[str, Any] | None = None
    with open_bundle(bundle_folder(bundle)) as opened:
        if is_measured:
            plan, cost = _measured(opened, bundle, engine, (model, data), memory, resume)
        else:
            plan = coarse_plan(engine, plan_of(opened.manifest))
    _check_target(target)
    write_output(target, engine_file(plan, target.name).encode())
    facts = summary(plan, cost)
    if as_json:
        output.data_json({"file": str(target), **facts})
    else:
        output.data(_page(facts))
    for note in facts["notes"]:
        output.say(f"note: {note}")
    if facts["measured"] is None:
        output.say("the KL that this plan costs is not measured: add `--model` and `--data` of the compile")
    file = repr(str(target)) if engine == GPTQMODEL else shlex.quote(str(target))
    output.say(f"wrote `{target}`, for: {_USES[engine].format(file=file)}")


def _check_target(target: Path) -> None:
    """Raise OptionError if the file exists, or is standard output, where the tables go."""
    if target == STDOUT:
        raise OptionError("`-o -` is standard output, where the tables go", "name a file")
    if os.path.lexists(target):
        raise OptionError(f"`{target}` exists", "choose another file, or remove it")


def _measured(
    opened: Bundle, bundle: Path, engine: str, given: tuple[str | None, str | None], memory: str | None, resume: bool
) -> tuple[EnginePlan, dict[str, Any]]:
    """Measure the plan. Return it and its cost.

    given: values of `--model` and `--data`.
    """
    from moec.compiler.export.plan_cost import COST_SUFFIX, measured_plan
    from moec.compiler.measured_bundle import BundleRequest
    from moec.compiler.request.options import Talk
    from moec.manifests.sizes import parse_bytes
    from moec.profiles.loading import load_profile

    from ..bundles.inspect import read_quality
    from .partial_bundle import open_partial

    folder = bundle.resolve()
    log = CompileLog(folder.with_name(folder.name + COST_SUFFIX))
    request = BundleRequest(
        folder, opened.manifest, read_quality(opened) or {}, *measurement_inputs(folder, *given),
        load_profile("host", folder.parent), open_partial, Talk(log.note, log.progress), resume,
        0 if memory is None else parse_bytes(memory, "--memory"),
    )  # fmt: skip
    with log:
        return measured_plan(engine, request)


def _page(facts: Mapping[str, Any]) -> str:
    """Return the page of a plan.

    facts: what `summary` of `compiler/export/plan_cost.py` returns.
    """
    engine, measured = facts["engine"], facts["measured"]
    names = [name for name in _PROJECTIONS if any(name in row for row in facts["layers"])]
    formats = [[row["layer"], *(_formats(row.get(name, {})) for name in names)] for row in facts["layers"]]
    sizes = [
        [name, output.human_bytes(facts[f"{key}expert_bytes"]), f"{facts[f'{key}bits_per_weight']:.3f}"]
        for name, key in (("bundle", "bundle_"), (engine, ""))
    ]
    dense = ", ".join(f"{count} x {name}" for name, count in Counter(facts["dense"].values()).items())
    size_table = output.table(sizes, ["routed experts", "bytes", "bits per weight"])
    page = f"{output.table(formats, ['layer', *names])}\n\n{size_table}\ndense weights   {dense}"
    if measured is None:
        return page
    tasks, rows = list(measured["bundle"]["losses"]), []
    for name, cost in (("bundle", measured["bundle"]), (f"plan for {engine}", measured["plan"])):
        estimates, kl = [cost["losses"].get(task) for task in tasks], cost["kl"]
        losses = ["-" if estimate is None else output.human_share(estimate["loss"]) for estimate in estimates]
        size = output.human_bytes(cost["expert_packed_bytes"])
        rows.append([name, size, f"{kl['mean']:.5f}", f"{kl['agreement']:.2%}", *losses])
    header = ["measured in our formats", "expert bytes", "KL", "top-1 agree", *(f"loss of {task}" for task in tasks)]
    tried = ", ".join(f"{kl:.5f} {way}" for way, kl in measured["tried"].items())
    chosen = f"The formats are those of the least KL: {tried}.\n" if len(measured["tried"]) > 1 else ""
    return (
        f"{page}\n\n{output.table(rows, header)}\n{chosen}"
        f"KL in nats per token to the checkpoint, on {measured['items']} validation items. Each matrix is quantized\n"
        f"in a format of ours with about the bits of {engine}'s. The quantizer of {engine} differs, so its KL does too."
    )


def _formats(counts: Mapping[str, int]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
