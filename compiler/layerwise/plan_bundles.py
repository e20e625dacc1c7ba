"""Plans as bundles in passing: how a plan answers where the model does not fit in memory.

The bundle lies beside the output while the runtime that ships runs it, within what the compile may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moec.manifests.bundle import PARTIAL_SUFFIX, DeviceSummary

from ..calibration import ActivationStatistics
from ..certify import BundleEngine
from ..checkpoint import Checkpoint
from ..durable import disk_errors
from ..emit import emit
from ..families import Lowering
from ..plan import CompilePlan
from ..request import CompileRequest
from ..unit_store import UnitStore
from ..work_folder import check_partial

_NO_DEVICE = DeviceSummary("trial", "0" * 64, 0, 0)


@dataclass(frozen=True)
class PlanBundles:
    """request: whose runtime it is, and beside whose output bundles lie. store: of quantized units.

    room_bytes: what a runtime may take.
    """

    request: CompileRequest
    checkpoint: Checkpoint
    lowering: Lowering
    statistics: ActivationStatistics
    store: UnitStore
    room_bytes: int

    @contextmanager
    def opened(self, plan: CompilePlan, name: str = "trial", share: int = 1) -> Iterator[BundleEngine]:
        """The runtime on the bundle of a plan, which is gone afterwards. share: a part of the room, one of so many.

        Raises as emit does, and as the runtime where it does not fit into the room.
        """
        output, disk = self.request.output, self.request.disk
        partial = output.with_name(f"{output.name}-{name}{PARTIAL_SUFFIX}")
        check_partial(partial)
        try:
            emit(
                self.checkpoint,
                self.lowering,
                plan,
                partial,
                device=_NO_DEVICE,
                disk=disk,
                statistics=self.statistics,
                packed_units=self.store.for_bundle,
                progress=self.request.talk.progress(f"writing a bundle of {plan.bits_per_weight:.3f} bits per weight"),
            )
            with self.request.open_runtime(partial, self.room_bytes // share) as engine:
                yield engine
        finally:
            with disk_errors(partial):
                disk.remove_tree(partial)
