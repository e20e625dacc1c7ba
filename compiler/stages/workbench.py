"""What every stage of a compile works with, and the values that stages hand on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bundle.certify import DivergenceCertificate, TaskCertificate
from ..calibration.collect import ActivationStatistics
from ..cluster.session import ClusterSession, cluster_session
from ..preflight.preparation import Prepared
from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..search.comparison import Comparison
from ..search.space import SearchSpace
from ..sensitivity.sensitivity import SensitivityTable
from ..sensitivity.trials import Trials
from ..workspace.durable import disk_errors
from ..workspace.journal import Journal
from ..workspace.output_lock import hold_output
from ..workspace.work_folder import planning_journal, work_folder, work_journal


@dataclass(frozen=True, slots=True)
class Workbench:
    """A compile that may begin.

    journal: keeps the result of every finished stage.
    cluster: workers that take jobs; None: this machine does all.
    """

    prepared: Prepared
    journal: Journal
    cluster: ClusterSession | None


@dataclass(frozen=True, slots=True)
class Measured:
    """A model of which plans can be measured.

    statistics: what calibration counted; None without data.
    store: every unit in every format on offer.
    trials: measure plans.
    """

    statistics: ActivationStatistics | None
    store: UnitStore
    trials: Trials


@dataclass(frozen=True, slots=True)
class Searched:
    """A search that has ended: what it was measured on, the predicted costs, the plans on offer, what was compared."""

    measured: Measured
    sensitivity: SensitivityTable
    space: SearchSpace
    comparison: Comparison | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan. searched: None where the format was given and nothing was searched."""

    plan: CompilePlan
    searched: Searched | None = None

    @property
    def statistics(self) -> ActivationStatistics | None:
        """What calibration counted."""
        return None if self.searched is None else self.searched.measured.statistics


@dataclass(frozen=True, slots=True)
class Certified:
    """What was measured on the bundle: tasks, divergences where no task was asked for, costs of the lossy modes."""

    tasks: Mapping[str, TaskCertificate] = field(default_factory=dict)
    divergences: Mapping[str, DivergenceCertificate] = field(default_factory=dict)
    modes: Mapping[str, Any] | None = None


@contextmanager
def planning_bench(prepared: Prepared) -> Iterator[Workbench]:
    """Open what a plan takes. It reads and adds to what an interrupted compile left, and writes nothing else."""
    request, note = prepared.request, prepared.request.talk.note
    is_shared = request.resume and work_folder(request.output).is_dir()
    held = hold_output(request.output, request.disk, note) if is_shared else nullcontext()
    opened = planning_journal(request.output, prepared.identity(), request.resume, note)
    with held, _workers(prepared) as cluster, opened as journal:
        yield Workbench(prepared, journal, cluster)


@contextmanager
def compiling_bench(prepared: Prepared, identity: str) -> Iterator[Workbench]:
    """Open what a compile takes. identity: digest of all inputs."""
    request = prepared.request
    opened = work_journal(request.output, identity, request.disk, request.resume, request.talk.note)
    with disk_errors(request.output.parent), _workers(prepared) as cluster, opened as journal:
        yield Workbench(prepared, journal, cluster)


@contextmanager
def comparing_bench(prepared: Prepared, output: Path, identity: str) -> Iterator[Workbench]:
    """Open what the comparison of a finished bundle takes. output: next to which measurements are kept."""
    request = prepared.request
    with work_journal(output, identity, request.disk, request.resume, request.talk.note) as journal:
        yield Workbench(prepared, journal, None)


@contextmanager
def _workers(prepared: Prepared) -> Iterator[ClusterSession | None]:
    """Connect to the cluster of the request; None without one."""
    request = prepared.request
    layer_specs = prepared.specs if prepared.is_layerwise else None
    if request.cluster is None:
        yield None
        return
    with cluster_session(request, prepared.lowering, layer_specs) as cluster:
        yield cluster
