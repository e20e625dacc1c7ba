"""Plans of moec for given bytes of the routed experts, and simpler ones. The rest of the model keeps 16 bits."""

from __future__ import annotations

from pathlib import Path

from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.targets import Target
from moec.compiler.request.uniform import fits_all, uniform_like
from moec.compiler.search.bisect import search
from moec.compiler.stages.planning import swaps
from moec.manifests.errors import TargetUnreachable

from ..search.grouped_space import Grouping, grouped
from ..search.measured_model import measure_model, plan_of_size, say


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
        measured = measure_model(model, options, work)
        self.store: UnitStore = measured.measured.store
        self.bundles = measured.context.bundles
        self._space, self._specs = measured.space, measured.prepared.specs
        self._trials, self._swaps = measured.measured.trials, swaps(measured.prepared)

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

    def grouped(self, size_bytes: int, group_of: Grouping) -> CompilePlan | None:
        """Return the best plan in which the units of a group share one format. None if none fits."""
        return plan_of_size(grouped(self._space, group_of), size_bytes)
