"""Gain of each freedom of a plan: a format per layer, per expert or per matrix, experts left out, swaps.

    python -m bench.search.gain MODEL --data FOLDER --task NAME --results FOLDER

A model is measured once, as in a compile. Every kind of plan is found by the search of moec, with the same predictions.
The first table compares kinds at equal bytes of the routed experts, on test items that nothing else used, with weights
alone. The last column is the share of a kind's bytes that plans with a format per matrix save at its KL. Their KL is
interpolated in log KL over bits. The second table compares kinds at a loss of the task, on validation items. The third
one compares bytes that a token reads, at the KL of plans with one format, with a cache of half of their expert bytes.
Plans of fewest bytes and of fewest bytes per token are in it. All other weights keep 16 bits. Every row is kept in
FOLDER, and a second call continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from moec.compiler.request.options import CompileOptions
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Objective, Target
from moec.compiler.search.bisect import search
from moec.compiler.search.space import SearchSpace
from moec.compiler.search.swaps import NO_SWAPS, Swaps
from moec.compiler.sensitivity.answer_walk import planned_weights
from moec.compiler.stages.planning import open_space, swaps
from moec.evaluation.tasks import Item
from moec.manifests.errors import TargetUnreachable
from moec.manifests.quant import QuantSpec
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.records import expert_records, warm_order
from moec.runtime.simulation.replay import replay
from moec.runtime.storage.interface import page_bytes

from ..equal_bytes.rows import Row, Rows, ratio_text
from ..example import Example
from .grouped_space import Grouping, by_layer_and_projection, grouped, with_formats
from .measured_model import floats, measure_model, model_options, model_parser, plan_of_size, say
from .plans import markdown

ALL, MATRIX = "all experts", "each matrix"
GROUPINGS: dict[str, Grouping] = {
    ALL: lambda unit: (),
    "each projection": lambda unit: unit.projection,
    "each layer": lambda unit: unit.layer,
    "each layer and projection": by_layer_and_projection,
    "each expert": lambda unit: (unit.layer, unit.expert),
    MATRIX: lambda unit: unit,
}
"""What has one format, by the name of the kind of plan."""
MENUS: dict[str, Callable[[QuantSpec], bool]] = {
    "2, 4, 8 bits": lambda spec: spec.bitwidth in (2, 4, 8, 16),
    "without 1 and 1.6 bits": lambda spec: spec.bitwidth >= 2,
    "without 5 and 6 bits": lambda spec: spec.bitwidth not in (5, 6),
    "groups of 64": lambda spec: spec.bitwidth == 16 or spec.group_size == 64,
}
"""Parts of the formats, for plans with a format per matrix."""
AT_LOSS = (ALL, "each layer and projection", MATRIX, "each matrix, experts left out, swaps")
LEFT_OUT, SWAPPED = "each matrix, experts left out", "each matrix, experts left out, swaps"
HEAD = ("one format for", "bits per weight", "KL", "perplexity", f"KL of {MATRIX} over it (95 %)", "bytes saved")
HEAD_AT_LOSS = ("target", "one format for", "bytes", "bits per weight", "experts left out", "KL", "loss of the search")
HEAD_OF_READS = ("plan", "bytes", "bits per weight", "KL", "hit rate", "bytes per token", "of the first")
POLICY = "lrfu"


class Routes:
    """Experts that the unquantized model chooses on texts, one token after the other.

    The same routes serve all plans. Rounding changes some of them, which is not counted.

    popularity: tokens of each expert in calibration, [L, E], for the warm start.
    """

    def __init__(self, example: Example, items: Sequence[Item], popularity: np.ndarray) -> None:
        routes = example.routes(example.texts(items))
        self.tokens, self._layers, self._experts = len(routes), popularity.shape[0], popularity.shape[1]
        self._popularity = popularity
        first = np.arange(self._layers)[:, None] * self._experts
        self._accesses = [
            (layer, tuple(sorted(experts)))
            for token in (routes + first).tolist()
            for layer, experts in enumerate(token)
        ]

    def bytes_per_token(self, plan: CompilePlan, cache_bytes: int) -> tuple[float, float]:
        """Return the bytes that a token reads, and the hit rate.

        cache_bytes: room for experts. It is full of the most popular ones at the start.
        """
        sizes = np.zeros(self._layers * self._experts, np.int64)
        for unit, spec in plan.units.items():
            rows, columns = plan.model.unit_shape(unit.layer, unit.projection)
            if not spec.is_pruned:
                sizes[unit.layer * self._experts + unit.expert] += rows * spec.row_bytes(columns)
        sizes = np.array([page_bytes(int(size)) for size in sizes], np.int64)
        layer = np.repeat(np.arange(self._layers), self._experts)
        records = expert_records(layer, self._popularity.reshape(-1), self._layers)
        stats = replay(self._accesses, CacheSpec(sizes, cache_bytes, records), POLICY, warm_order(records).tolist())
        return stats.bytes_read / self.tokens, stats.hit_rate


class Gain:
    """A model, measured once, and its kinds of plans.

    options: of the compile.
    work: folder of the measurements. A second call with the same inputs takes them from there.
    """

    def __init__(self, model: str, options: CompileOptions, work: Path) -> None:
        measured = measure_model(model, options, work)
        self._prepared, self.measured, self._space = measured.prepared, measured.measured, measured.space
        self._swaps: Swaps = swaps(measured.prepared)

    @property
    def expert_weights(self) -> int:
        """Number of weights of the routed experts."""
        return self._space.plain.expert_weights

    def spaces(self) -> dict[str, tuple[SearchSpace, Swaps]]:
        """Return the search space of each kind of plan, and how many swaps its search makes."""
        searches: dict[str, tuple[SearchSpace, Swaps]] = {}
        for name, group_of in GROUPINGS.items():
            searches[name] = grouped(self._space, group_of), NO_SWAPS
        specs = self._space.without_pruning().unit_specs

        def is_offered(has: Callable[[QuantSpec], bool], column: int) -> bool:
            return has(specs[column])

        for name, has in MENUS.items():
            searches[f"{MATRIX}, {name}"] = with_formats(self._space, partial(is_offered, has)), NO_SWAPS
        return searches | {LEFT_OUT: (self._space, NO_SWAPS), SWAPPED: (self._space, self._swaps)}

    def within(self, kind: str, size_bytes: float) -> CompilePlan | None:
        """Return the plan of one kind within some bytes of the routed experts, or None."""
        space, tried = self.spaces()[kind]
        if tried is NO_SWAPS:
            return plan_of_size(space, size_bytes)
        return search(space, self.measured.trials, Target("size", size_bytes), say, tried)

    @property
    def popularity(self) -> np.ndarray:
        """Tokens of each expert in calibration, [L, E]."""
        statistics = self.measured.statistics
        if statistics is None:
            raise RuntimeError("a measurement without data has no popularity")
        return statistics.popularity

    def at_kl_of(self, plan: CompilePlan, objective: Objective) -> CompilePlan:
        """Return the plan with a format per matrix that costs least at the KL of another plan.

        objective: the cost.
        """
        request = self._prepared.request
        options = replace(request.options, objective=objective)
        prepared = replace(self._prepared, request=replace(request, options=options))
        space = open_space(prepared, self.measured).without_pruning()
        trials = self.measured.trials
        kl = trials.kl_bound(trials.kl(plan, ALL))
        return search(space, trials, Target("kl", kl), say, self._swaps)

    def at_loss(self, kind: str, loss: float) -> CompilePlan | None:
        """Return the plan of fewest bytes of one kind that keeps a relative loss, or None."""
        space, tried = self.spaces()[kind]
        try:
            return search(space, self.measured.trials, Target("loss", loss), say, tried)
        except TargetUnreachable as error:
            say(str(error))
            return None


def saved(rows: Rows, row: Row, ours: Sequence[Row]) -> str:
    """Return the share of a row's bytes that plans of a format per matrix save at its KL, as text.

    ours: rows of those plans. Outside their range the nearest two are continued.
    """
    points = sorted((float(np.log(rows.kl(each))), rows.bits(each)) for each in ours)
    if len(points) < 2:
        return ""
    kl = float(np.log(rows.kl(row)))
    at = int(np.clip(np.searchsorted([point[0] for point in points], kl), 1, len(points) - 1))
    (low, fewer), (high, more) = points[at - 1], points[at]
    bits = fewer + (more - fewer) * (kl - low) / (high - low)
    return f"{1 - bits / rows.bits(row):.1%}"


def print_equal_bytes(gain: Gain, rows: Rows, budgets: Sequence[float]) -> None:
    """Measure every kind of plan at each budget, in bits per weight, and print the first table."""
    by_budget: dict[float, dict[str, Row]] = {}
    for bits in budgets:
        by_budget[bits] = {}
        for kind in gain.spaces():
            row = measured_row(gain, rows, kind, bits)
            if row is not None:
                by_budget[bits][kind] = row
                say(f"{bits:g} {kind}: KL {rows.kl(row):.5f}")
    ours = [each[MATRIX] for each in by_budget.values() if MATRIX in each]
    lines = []
    for kinds in by_budget.values():
        for kind, row in kinds.items():
            ratio = ratio_text(kinds[MATRIX], row) if MATRIX in kinds and kind != MATRIX else ""
            lines.append([kind, *rows.figures(row), ratio, "" if kind == MATRIX else saved(rows, row, ours)])
    print(markdown(HEAD, lines), flush=True)


def measured_row(gain: Gain, rows: Rows, kind: str, bits: float) -> Row | None:
    """Return the row of one kind within some bits per weight. It is measured once. None: there is no plan."""
    name = f"{bits:g}-{file_name(kind)}"
    if (rows.folder / f"{name}.json").exists():
        return rows.kept(name)
    plan = gain.within(kind, bits * gain.expert_weights / 8)
    if plan is None:
        say(f"{kind}: no plan within {bits:g} bits per weight")
        return None
    return rows.row(name, lambda: (planned_weights(plan, gain.measured.store), plan.expert_packed_bytes))


def file_name(kind: str) -> str:
    """Return the name of a kind for files."""
    return kind.replace(", ", "-").replace(" ", "-")


def print_at_losses(gain: Gain, folder: Path, losses: Sequence[float], kinds: Sequence[str]) -> None:
    """Search the fewest bytes of some kinds at each loss, and print the second table."""
    lines = []
    for loss in losses:
        for kind in kinds:
            path = folder / f"loss-{loss:g}-{file_name(kind)}.json"
            if not path.exists():
                path.write_text(json.dumps(at_loss(gain, kind, loss)) + "\n", encoding="utf-8")
            row = json.loads(path.read_text(encoding="utf-8"))
            lines.append([f"{loss:.1%}", kind, *(str(value) for value in row.values())])
    print(f"\n{markdown(HEAD_AT_LOSS, lines)}", flush=True)


def at_loss(gain: Gain, kind: str, loss: float) -> Mapping[str, object]:
    """Return the figures of the plan of one kind at a loss."""
    plan = gain.at_loss(kind, loss)
    if plan is None:
        return {"bytes": "no plan", "bits": "", "left out": "", "kl": "", "loss": ""}
    trials = gain.measured.trials
    measured = [trial for trial in trials.log if trial.losses and trial.expert_packed_bytes == plan.expert_packed_bytes]
    (estimate,) = measured[-1].losses.values() if measured else (None,)
    return {
        "bytes": plan.expert_packed_bytes,
        "bits": f"{plan.bits_per_weight:.3f}",
        "left out": sum(spec.is_pruned for unit, spec in plan.units.items() if unit.projection == "down"),
        "kl": f"{trials.kl(plan, 'row').mean:.5f}",
        "loss": "" if estimate is None else f"{estimate.loss:.2%} +- {estimate.standard_error:.2%}",
    }


def print_reads(gain: Gain, routes: Routes, folder: Path, budgets: Sequence[float]) -> None:
    """Replay plans of equal KL through one cache, and print the third table."""
    lines = []
    for bits in budgets:
        path = folder / f"reads-{bits:g}.json"
        if not path.exists():
            path.write_text(json.dumps(read_rows(gain, routes, bits)) + "\n", encoding="utf-8")
        lines += json.loads(path.read_text(encoding="utf-8"))
    print(f"\n{routes.tokens} held-out tokens.\n\n{markdown(HEAD_OF_READS, lines)}", flush=True)


def read_rows(gain: Gain, routes: Routes, bits: float) -> list[list[str]]:
    """Return the rows of a plan with one format within some bits per weight, and of plans with its KL."""
    first = gain.within(ALL, bits * gain.expert_weights / 8)
    if first is None:
        raise SystemExit(f"no plan with one format has {bits:g} bits per weight")
    plans = {
        "one format": first,
        "format per matrix, fewest bytes": gain.at_kl_of(first, "size"),
        "format per matrix, fewest bytes per token": gain.at_kl_of(first, "bytes-per-token"),
    }
    cache, rows = first.expert_packed_bytes // 2, []
    whole, _ = routes.bytes_per_token(first, cache)
    for name, plan in plans.items():
        read, hits = routes.bytes_per_token(plan, cache)
        size = f"{plan.expert_packed_bytes:,}", f"{plan.bits_per_weight:.3f}"
        kl = gain.measured.trials.kl(plan, "row").mean
        rows.append([name, *size, f"{kl:.5f}", f"{hits:.3f}", f"{read:,.0f}", f"{read / whole:.3f}"])
    return rows


def main() -> None:
    """Read the command line, measure and print."""
    parser = model_parser("What each freedom of a plan gains.")
    parser.add_argument("--budgets", type=floats, default=(2.5, 3.5, 4.5), help="bits per weight of the first table")
    parser.add_argument("--losses", type=floats, default=(0.02, 0.05), help="losses of the second table")
    parser.add_argument("--kinds", default=";".join(AT_LOSS), help="kinds of the second table, with semicolons")
    parser.add_argument("--reads", type=floats, default=(3.5,), help="bits per weight of the third table")
    parser.add_argument("--items", type=int, default=100, help="test items of the first and the third table")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    options = model_options(given, given.losses[0] if given.losses else 0.02)
    gain = Gain(given.model, options, given.work or given.results / "work")
    example = Example(given.model, given.data, given.task)
    if given.budgets:
        print_equal_bytes(gain, Rows(example, given.results, given.items), given.budgets)
    if given.losses:
        print_at_losses(gain, given.results, given.losses, given.kinds.split(";"))
    if given.reads:
        routes = Routes(example, example.splits.test.items[: given.items], gain.popularity)
        print_reads(gain, routes, given.results, given.reads)


if __name__ == "__main__":
    main()
