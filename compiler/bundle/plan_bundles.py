"""Plans as temporary bundles: how a plan answers on the runtime that ships.

The bundle lies next to the output while the runtime reads it, within the memory of the compile. For `moec eval` a
checkpoint becomes a temporary bundle, too.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from moec.evaluation.engine import TextEngine
from moec.manifests.bundle import MANIFEST_NAME, PARTIAL_SUFFIX, WORK_SUFFIX, DeviceSummary
from moec.manifests.errors import DoesNotFit, OptionError
from moec.manifests.files.output_file import require_free_bytes
from moec.manifests.model import ModelSpec
from moec.manifests.progress import Progress

from ..families import Lowering
from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan, plain_plan
from ..request.ports import OpenEngine
from ..request.request import CompileRequest
from ..workspace.durable import Disk, disk_errors
from ..workspace.journal import Journal
from ..workspace.work_folder import check_partial
from .emit import BundleContent, emit
from .recorded_answers import RecordedAnswers

_NO_DEVICE = DeviceSummary("trial", "0" * 64, 0, 0)
TRIAL, UNQUANTIZED = "trial", "unquantized"


def trial_folder(output: Path, name: str) -> Path:
    """Return the folder of a temporary bundle: next to the output, under a name that no output has."""
    return output.with_name(f"{output.name}{WORK_SUFFIX}-{name}{PARTIAL_SUFFIX}")


def clear_trials(output: Path, disk: Disk) -> None:
    """Remove the temporary bundles of a killed compile. Raises OptionError if a folder was not left by a compile."""
    for name in (TRIAL, UNQUANTIZED):
        check_partial(trial_folder(output, name))
    with disk_errors(output.parent):
        for name in (TRIAL, UNQUANTIZED):
            disk.remove_tree(trial_folder(output, name))


def require_trials(request: CompileRequest, model: ModelSpec) -> None:
    """Check, before any work for a loss, that temporary bundles can be written, one of them with 16-bit weights.

    Raises OptionError if there is no folder to write to.
    Raises DoesNotFit without room for them.
    """
    if request.options.target.kind != "loss":
        return
    parent = Path(tempfile.gettempdir()) if request.plan_only else request.output.parent
    if not parent.is_dir():
        raise OptionError(f"there is no folder `{parent}`, where plans are tried", "make it, or name another output")
    experts = sum(prod(model.unit_shape(unit.layer, unit.projection)) for unit in model.unit_keys())
    require_free_bytes(parent, 2 * (experts + sum(prod(shape) for shape in model.dense_shapes().values())))


def answers_name(partial: Path) -> str:
    """Return the name of a bundle's answers: the digest of its manifest, which has that of every file."""
    return hashlib.sha256((partial / MANIFEST_NAME).read_bytes()).hexdigest()[:16]


@contextmanager
def unquantized_bundle(lowering: Lowering, progress: Progress) -> Iterator[Path]:
    """Write a checkpoint with its own 16-bit weights as a bundle into a temporary folder. It is removed afterwards.

    Raises DoesNotFit, before any work if the disk of temporary folders lacks room, and the other errors of emit.
    """
    plan = plain_plan(lowering.model, lowering.spec_16bit, "rtn")
    with tempfile.TemporaryDirectory(prefix="moec-eval-") as folder:
        partial = Path(folder) / f"{UNQUANTIZED}{PARTIAL_SUFFIX}"
        try:
            emit(lowering, BundleContent(plan, _NO_DEVICE), partial, progress=progress)
        except DoesNotFit as error:
            raise DoesNotFit(error.message, "free space, or name another temporary folder with `TMPDIR`") from error
        yield partial


@dataclass(frozen=True)
class PlanBundles:
    """Writes plans as temporary bundles and opens the runtime on them.

    request: its output names the bundles, which lie next to it.
    room_bytes: memory of the process with the runtime.
    open_runtime: opens a bundle.
    journal: keeps every answer of the runtime.
    """

    request: CompileRequest
    lowering: Lowering
    room_bytes: int
    open_runtime: OpenEngine
    journal: Journal

    @contextmanager
    def opened(self, plan: CompilePlan, store: UnitStore | None) -> Iterator[TextEngine]:
        """Open the runtime on the bundle of a plan. The bundle is removed afterwards.

        store: quantized units. None for a plan without any.
        Raises the errors of emit, and those of the runtime if it does not fit into the room.
        """
        with self.written(plan, store) as partial, self.running(partial) as engine:
            yield engine

    @contextmanager
    def running(self, partial: Path) -> Iterator[TextEngine]:
        """Open the runtime on a bundle. Answers of the journal are not computed again."""
        with (
            self.open_runtime(partial, self.room_bytes) as engine,
            self.recorded(answers_name(partial), lambda: engine) as answers,
        ):
            yield answers

    @contextmanager
    def recorded(self, name: str, runtime: Callable[[], TextEngine]) -> Iterator[TextEngine]:
        """Open the answers that the journal keeps under a name. The runtime is called for if one is missing."""
        with self.journal.records(f"answers-{name}") as records:
            yield RecordedAnswers(runtime, records)

    @contextmanager
    def written(self, plan: CompilePlan, store: UnitStore | None, name: str = TRIAL) -> Iterator[Path]:
        """Write the bundle of a plan, which is removed afterwards. Raises the errors of emit."""
        with self._folder(name) as partial:
            emit(
                self.lowering,
                BundleContent(plan, _NO_DEVICE),
                partial,
                packed_units=None if store is None else store.for_bundle,
                disk=self.request.disk,
                progress=self.request.talk.progress(f"writing a bundle of {plan.bits_per_weight:.3f} bits per weight"),
            )
            yield partial

    @contextmanager
    def _folder(self, name: str) -> Iterator[Path]:
        """Return where a temporary bundle is written, and remove it afterwards. A plan alone writes nothing near it."""
        if self.request.plan_only:
            with tempfile.TemporaryDirectory(prefix="moec-plan-") as folder:
                yield trial_folder(Path(folder) / self.request.output.name, name)
            return
        partial, disk = trial_folder(self.request.output, name), self.request.disk
        check_partial(partial)
        try:
            yield partial
        finally:
            with disk_errors(partial):
                disk.remove_tree(partial)
