"""A model that was measured as in a compile, for programs that search plans of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.preflight.preparation import prepare
from moec.compiler.preflight.prepared import Prepared
from moec.compiler.request.options import CompileOptions, Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.targets import Target
from moec.compiler.search.knapsack import least_loss
from moec.compiler.search.space import SearchSpace
from moec.compiler.stages.compile_context import CompileContext, Measured
from moec.compiler.stages.measure import measure
from moec.compiler.stages.planning import open_space
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.manifests.quant import QuantSpec
from moec.profiles.loading import load_profile

BITS = (1, 1.6, 2, 3, 4, 5, 6, 8, 16)


def floats(text: str) -> tuple[float, ...]:
    """Read numbers with commas between them."""
    return tuple(float(number) for number in filter(None, text.split(",")))


def model_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of what says which model is measured, on which data, and where the results go."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="folder of the measurements; default: `work` in FOLDER")
    parser.add_argument("--bits", type=floats, default=BITS, help="bitwidths on offer, with commas")
    parser.add_argument("--limit", type=int, help="items of each split in the measurements")
    return parser


def model_options(given: argparse.Namespace, loss: float) -> CompileOptions:
    """Return the options of a compile to a loss, from arguments of `model_parser`. Only experts are quantized."""
    return CompileOptions(
        Target("loss", loss), data=given.data, tasks=(given.task,), dense_bits=16, bits=given.bits, comparisons=False,
        limit=given.limit,
    )  # fmt: skip


def say(sentence: str) -> None:
    """Print a sentence on stderr."""
    print(sentence, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model after all measurements that come before a search.

    prepared: the checked request.
    context: the journal of the measurements.
    measured: units in every format, prices, and trials.
    space: the choices of the search.
    """

    prepared: Prepared
    context: CompileContext
    measured: Measured
    space: SearchSpace


def measure_model(model: str, options: CompileOptions, work: Path, offered: Sequence[QuantSpec] = ()) -> MeasuredModel:
    """Measure a model, as a compile does.

    options: of the compile, with a target.
    work: folder of the measurements. A second call with the same inputs takes them from there.
    offered: the formats on offer. Empty: those of the options.
    """
    work.mkdir(parents=True, exist_ok=True)
    profile = load_profile("laptop")
    prepared = prepare(CompileRequest(model, work / "out", options, profile, open_partial, Talk(say), plan_only=True))
    prepared = replace(prepared, offered=(*offered, prepared.lowering.spec_16bit) if offered else ())
    journal = Journal(work, prepared.measurement_identity(), Disk(), say)
    context = CompileContext(prepared, journal, journal.of(prepared.identity()), None)
    measured = measure(context)
    return MeasuredModel(prepared, context, measured, open_space(prepared, measured))


def plan_of_size(space: SearchSpace, size_bytes: float) -> CompilePlan | None:
    """Return the plan of least predicted loss within some bytes of the routed experts, or None if no plan fits."""
    choice = least_loss(space.size_table(), size_bytes)
    return None if choice is None else space.plan(choice)
