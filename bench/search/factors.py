"""Bytes at a loss with and without the search, the formats and the pruning of moec, in all combinations.

    python -m bench.search.factors examples/plain_model --data examples/data/gsm8k --task gsm8k --loss 0.02

Takes 20 to 40 minutes for a shipped example. Prints a Markdown table of 2 x 2 x 2 plans with dense weights of 8 bits.

Search: that of `moec compile`, or EdgeMoE's. Formats: those of `moec compile`, quantized by GPTQ, or those that EdgeMoE
publishes: 2, 4 and 8 bits with a scale per row, rounded to nearest. Pruning: the search may leave out experts.
EdgeMoE's search leaves none out. Here it lowers its least important experts to nothing where that takes fewer bytes
than lowering them to the next bitwidth. Importance is then the loss when one expert is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moec.compiler.quantization.quantized import LEFT_OUT
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Target
from moec.compiler.request.uniform import uniform_like
from moec.compiler.search.baselines import TargetRule, best_uniform, edgemoe, last_kept
from moec.compiler.search.bisect import search
from moec.compiler.search.comparison import edgemoe_group_size, offered_to_edgemoe, target_rule
from moec.compiler.search.comparison_budget import EDGEMOE_BITWIDTHS
from moec.compiler.search.pruning import prunable
from moec.compiler.sensitivity.exact import importance_list, with_lowered_experts
from moec.compiler.stages.planning import swaps
from moec.manifests.errors import TargetUnreachable
from moec.manifests.model import ExpertKey
from moec.manifests.quant import QuantSpec

from .measured_model import measure_model, say
from .plans import kl_text, markdown

DENSE_BITS = 8
PUBLISHED = tuple(QuantSpec(bits, 0, symmetric=True) for bits in EDGEMOE_BITWIDTHS)
HEAD = ("search", "formats", "may leave out experts", "bytes", "bits per weight", "left out", "KL")


@dataclass(frozen=True, slots=True)
class Cell:
    """One plan of the table. plan: None if no plan of its kind keeps the target."""

    search: str
    formats: str
    prunes: bool
    plan: CompilePlan | None
    kl: float = 0.0

    def row(self) -> list[str]:
        """Return the cells of the table."""
        kind = [self.search, self.formats, "yes" if self.prunes else "no"]
        if self.plan is None:
            return [*kind, "no plan", "", "", ""]
        gone = sum(self.plan.units[unit].is_pruned for unit in self.plan.units if unit.projection == "down")
        bits = f"{self.plan.bits_per_weight:.3f}"
        return [*kind, f"{self.plan.expert_packed_bytes:,}", bits, str(gone), kl_text(self.kl)]


class Factors:
    """A model, measured in one menu of formats, and its four plans.

    options: of the compile, with a target.
    formats: name of the menu.
    offered: the menu. Empty: that of the options.
    work: folder of the measurements. A second call with the same inputs takes them from there.
    """

    def __init__(
        self, model: str, options: CompileOptions, formats: str, offered: Sequence[QuantSpec], work: Path
    ) -> None:
        measured = measure_model(model, options, work, offered)
        self._prepared, self._measured, self._space = measured.prepared, measured.measured, measured.space
        self._formats, self._target = formats, options.target
        (dense,) = self._prepared.dense_formats()
        self._base = replace(self._prepared.plain_plan(), dense=dense)

    def cells(self) -> list[Cell]:
        """Return the plans of both searches, without and with pruning."""
        return [*map(self._by_knapsack, (False, True)), *self._by_edgemoe()]

    def _cell(self, search_name: str, prunes: bool, plan: CompilePlan | None) -> Cell:
        kl = 0.0 if plan is None else self._measured.trials.kl(plan, "cell").mean
        return Cell(search_name, self._formats, prunes, plan, kl)

    def _by_knapsack(self, prunes: bool) -> Cell:
        space = self._space if prunes else self._space.without_pruning()
        try:
            plan = search(space, self._measured.trials, self._target, say, swaps(self._prepared))
        except TargetUnreachable as error:
            say(str(error))
            plan = None
        return self._cell("moec", prunes, plan)

    def _by_edgemoe(self) -> list[Cell]:
        trials, store, base = self._measured.trials, self._measured.store, self._base
        rule = target_rule(trials, self._target, 0, "EdgeMoE", store)
        specs = self._prepared.specs
        uniform = best_uniform(base, specs, trials, rule)
        plain = self._prepared.lowering.spec_16bit
        formats = offered_to_edgemoe(base, specs, edgemoe_group_size(base, uniform, specs)) | {16.0: plain}
        lowest, second = sorted(formats)[:2]
        losses = self._importance(formats[lowest], formats[second])
        plain_plan = edgemoe("EdgeMoE", base, formats, losses, trials, store, rule).plan
        pruned = self._pruned(formats, rule)
        plans = [plan for plan in (plain_plan, pruned) if plan is not None]
        least = min(plans, key=lambda plan: plan.expert_packed_bytes, default=None)
        return [self._cell("EdgeMoE", False, plain_plan), self._cell("EdgeMoE", True, least)]

    def _pruned(self, formats: Mapping[float, QuantSpec], rule: TargetRule) -> CompilePlan | None:
        """Return the plan of the lowest bitwidth that keeps the target, without as many experts as that allows."""
        widths = sorted(formats, reverse=True)
        last = last_kept([uniform_like(self._base, formats[width]) for width in widths], rule.keeps)
        if last < 0:
            return None
        spec = formats[widths[last]]
        losses = prunable(self._importance(LEFT_OUT, spec), self._base.model)
        order = sorted(losses, key=lambda key: (losses[key], key))
        plain = uniform_like(self._base, spec)
        plans = [with_lowered_experts(plain, order[:count], LEFT_OUT) for count in range(len(order) + 1)]
        return plans[max(last_kept(plans, rule.keeps), 0)]

    def _importance(self, low: QuantSpec, high: QuantSpec) -> dict[ExpertKey, float]:
        progress = self._prepared.request.talk.progress(f"importance of each expert at {low}")
        trials, store = self._measured.trials, self._measured.store
        return importance_list(self._base, low, high, trials, store, progress)


def main() -> None:
    """Read the command line, search, and print the table."""
    parser = argparse.ArgumentParser(description="What search, formats and pruning bring, each alone and together.")
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--task", required=True)
    parser.add_argument("--loss", type=float, default=0.02)
    parser.add_argument("--limit", type=int, help="items of each split")
    parser.add_argument("--work", type=Path, default=Path("build/factors"), help="folder of the measurements")
    given = parser.parse_args()
    rows: list[list[str]] = []
    for formats, quantizer, offered in (("moec", "gptq", ()), ("published", "rtn", PUBLISHED)):
        options = CompileOptions(
            Target("loss", given.loss), data=given.data, tasks=(given.task,), dense_bits=DENSE_BITS,
            quantizer=quantizer, limit=given.limit, comparisons=False,
        )  # fmt: skip
        factors = Factors(given.model, options, formats, offered, given.work / formats)
        rows += [cell.row() for cell in factors.cells()]
    print(markdown(HEAD, rows))


if __name__ == "__main__":
    main()
