"""Plans as bundles in passing: how a plan answers where the model does not fit in memory.

The bundle lies beside the output while the runtime that ships runs it, within what the compile may take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from moec.manifests.bundle import PARTIAL_SUFFIX, DeviceSummary
from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec

from ..bundle.emit import BundleContent, emit
from ..calibration.collect import ActivationStatistics
from ..checkpoint.checkpoint import Checkpoint
from ..families import Lowering
from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..request.ports import BundleEngine, OpenRuntime
from ..request.request import CompileRequest
from ..workspace.durable import Disk, disk_errors, require_free_bytes
from ..workspace.work_folder import WORK_SUFFIX, check_partial

_NO_DEVICE = DeviceSummary("trial", "0" * 64, 0, 0)


TRIAL, UNQUANTIZED = "trial", "unquantized"


def trial_folder(output: Path, name: str) -> Path:
    """Where a bundle in passing lies: beside the output, under a name that no output has."""
    return output.with_name(f"{output.name}{WORK_SUFFIX}-{name}{PARTIAL_SUFFIX}")


def clear_trials(output: Path, disk: Disk) -> None:
    """Remove what a killed compile left of its bundles in passing. Raises OptionError for what is not ours."""
    for name in (TRIAL, UNQUANTIZED):
        check_partial(trial_folder(output, name))
    with disk_errors(output.parent):
        for name in (TRIAL, UNQUANTIZED):
            disk.remove_tree(trial_folder(output, name))


def require_trials(request: CompileRequest, model: ModelSpec) -> None:
    """Before any work for a loss: whether bundles in passing can be written, the checkpoint's own weights among them.

    Raises OptionError where there is no folder to write to, DoesNotFit without room for them.
    """
    if request.options.target.kind != "loss":
        return
    parent = request.output.parent
    if not parent.is_dir():
        raise OptionError(f"there is no folder `{parent}`, where plans are tried", "make it, or name another output")
    experts = sum(prod(model.unit_shape(unit.layer, unit.projection)) for unit in model.unit_keys())
    require_free_bytes(parent, 2 * (experts + sum(prod(shape) for shape in model.dense_shapes().values())))


@dataclass(frozen=True)
class PlanBundles:
    """request: beside whose output bundles lie. store: of quantized units. open_runtime: who answers.

    room_bytes: what a runtime may take of this machine.
    """

    request: CompileRequest
    checkpoint: Checkpoint
    lowering: Lowering
    statistics: ActivationStatistics
    store: UnitStore
    room_bytes: int
    open_runtime: OpenRuntime

    @contextmanager
    def opened(self, plan: CompilePlan, name: str = TRIAL, share: int = 1) -> Iterator[BundleEngine]:
        """The runtime on the bundle of a plan, which is gone afterwards. share: a part of the room, one of so many.

        Raises as emit does, and as the runtime where it does not fit into the room.
        """
        partial, disk = trial_folder(self.request.output, name), self.request.disk
        check_partial(partial)
        try:
            emit(
                self.lowering,
                BundleContent(plan, _NO_DEVICE, statistics=self.statistics),
                partial,
                packed_units=self.store.for_bundle,
                disk=disk,
                progress=self.request.talk.progress(f"writing a bundle of {plan.bits_per_weight:.3f} bits per weight"),
            )
            with self.open_runtime(partial, self.room_bytes // share) as engine:
                yield engine
        finally:
            with disk_errors(partial):
                disk.remove_tree(partial)
