"""Plans of moec for given bytes of the routed experts, and simpler ones. The rest of the model keeps 16 bits."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from moec.cli.commands.compile import open_partial
from moec.compiler.preflight.preparation import prepare
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.options import CompileOptions, Talk
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.targets import Target
from moec.compiler.request.uniform import fits_all, uniform_like
from moec.compiler.search.bisect import search
from moec.compiler.search.knapsack import ChoiceTable, least_loss
from moec.compiler.stages.compile_context import CompileContext
from moec.compiler.stages.measure import measure, plan_bundles
from moec.compiler.stages.planning import open_space, swaps
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.manifests.errors import TargetUnreachable
from moec.profiles.loading import load_profile


def say(sentence: str) -> None:
    """Print a sentence on stderr."""
    print(sentence, file=sys.stderr, flush=True)


class OurPlans:
    """A model that was measured once, and its plans for any number of bytes.

    model, data: folders. task: name of the task.
    work: folder of the measurements. A second call with the same inputs takes them from there.
    bits: bitwidths on offer.
    swap_count: swaps of each search; None: as many as a compile makes.
    """

    def __init__(
        self, model: str, data: str, task: str, work: Path, bits: tuple[float, ...], swap_count: int | None
    ) -> None:
        options = CompileOptions(
            Target("bits_per_weight", 4.0),
            data=data,
            tasks=(task,),
            dense_bits=16,
            bits=bits,
            comparisons=False,
            swaps=swap_count,
        )
        profile, talk = load_profile("laptop"), Talk(say)
        prepared = prepare(CompileRequest(model, work / "out", options, profile, open_partial, talk, plan_only=True))
        context = CompileContext(prepared, Journal(work, prepared.identity(), Disk(), say), None)
        measured = measure(context)
        self.store: UnitStore = measured.store
        self.bundles = plan_bundles(context)
        self._space, self._specs = open_space(prepared, measured), prepared.specs
        self._trials, self._swaps = measured.trials, swaps(prepared)

    @property
    def plain(self) -> CompilePlan:
        """The plan at 16 bits."""
        return self._space.plain

    def within(self, size_bytes: int) -> CompilePlan | None:
        """Return the plan of `moec compile --size` for the experts. None if none fits."""
        try:
            return search(self._space, self._trials, Target("size", size_bytes), say, self._swaps)
        except TargetUnreachable:
            return None

    def uniform(self) -> dict[str, CompilePlan]:
        """Return the plans with one format for all experts, by the name of the format."""
        plain = self._space.plain
        fitting = [spec for spec in self._specs if spec.bitwidth < 16 and fits_all(plain, spec)]
        return {str(spec): uniform_like(plain, spec) for spec in fitting}

    def by_layer_and_projection(self, size_bytes: int) -> CompilePlan | None:
        """Return the best plan whose experts of one layer share one format for each projection."""
        space = self._space.without_pruning()
        table, units = space.size_table(), len(space.units)
        groups = {(unit.layer, unit.projection): 0 for unit in space.units}
        index = {group: at for at, group in enumerate(groups)}
        rows = np.array([index[unit.layer, unit.projection] for unit in space.units])
        costs, losses = (np.zeros((len(groups), values.shape[1])) for values in (table.costs, table.losses))
        np.add.at(costs, rows, table.costs[:units])
        np.add.at(losses, rows, table.losses[:units])
        costs, losses = (
            np.concatenate([sums, values[units:]]) for sums, values in ((costs, table.costs), (losses, table.losses))
        )
        choice = least_loss(ChoiceTable(costs, losses), size_bytes)
        if choice is None:
            return None
        return space.plan(np.concatenate([choice[rows], choice[len(groups) :]]))
