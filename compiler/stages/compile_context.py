"""The context in which the stages of a compile run, and the values that they return."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..bundle.certify import DivergenceCertificate, TaskCertificate
from ..bundle.plan_bundles import PlanBundles
from ..calibration.collect import ActivationStatistics
from ..calibration.tables import Tables
from ..cluster.session import ClusterSession, cluster_session
from ..preflight.prepared import Prepared
from ..quantization.swept_store import SweptStore
from ..request.plan import CompilePlan
from ..search.boundary import Boundaries
from ..search.comparison import Comparison
from ..search.space import SearchSpace
from ..sensitivity.sensitivity import SensitivityTable
from ..sensitivity.trials import Trials
from ..workspace.durable import disk_errors
from ..workspace.journal import Journal
from ..workspace.output_lock import hold_output
from ..workspace.work_folder import certified_stage, planning_journal, work_folder, work_journal
from .encode_texts import CompileTexts


@dataclass(frozen=True, slots=True)
class CompileContext:
    """The needs of every stage of a compile: the checked request, the journal, and the cluster.

    journal: keeps the result of every measurement.
    decisions: keeps results that other targets, searches and devices do not share, in the same folder.
    cluster: workers that take jobs; None: this machine does all.
    """

    prepared: Prepared
    journal: Journal
    decisions: Journal
    cluster: ClusterSession | None

    @property
    def bundles(self) -> PlanBundles:
        """Opens the runtime on plans, on this machine or on workers."""
        prepared, request = self.prepared, self.prepared.request
        opens = request.open_runtime if self.cluster is None else self.cluster.open_runtime
        return PlanBundles(request, prepared.lowering, prepared.runtime_bytes, opens, self.journal)

    @property
    def boundaries(self) -> Boundaries | None:
        """The ends of the searches of other devices; None for one device."""
        shared = self.prepared.request.shared
        return None if shared is None else Boundaries(self.decisions, shared.is_first)


@dataclass(frozen=True, slots=True)
class Measured:
    """A model of which plans can be measured.

    statistics: counts of calibration; None without data.
    store: every unit in every format on offer.
    trials: measure plans.
    prices: predicted KL of every unit in every format.
    texts: the texts; None without data.
    held_out_states: normed residual stream of the unquantized model at the scored held-out tokens, by task.
    """

    statistics: ActivationStatistics | None
    store: SweptStore
    trials: Trials
    prices: SensitivityTable
    texts: CompileTexts | None
    held_out_states: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan.

    statistics: counts of calibration; None without data.
    store: the quantized units; None if they are made when the bundle is written.
    measured, space: measurements and choices of the search; None if the request names the format.
    comparison: the baselines of the search, or None.
    safer: plans of less KL, and their comparisons. The certificate tests them in this order if it does not support
        the plan.
    """

    plan: CompilePlan
    statistics: ActivationStatistics | None = None
    store: SweptStore | None = None
    measured: Measured | None = None
    space: SearchSpace | None = None
    comparison: Comparison | None = None
    safer: Sequence[tuple[CompilePlan, Comparison | None]] = ()


@dataclass(frozen=True, slots=True)
class Certified:
    """Measurements of the bundle.

    tasks: certificates of tasks.
    divergences: KL on held-out answers, if no task is measured.
    modes: costs of the lossy modes, or None.
    files: what was learned from its routing, as further files of the bundle by name.
    reports: what quality.json says of them.
    tested: what quality.json says of each plan that was tested, if there are several.
    share: share of the error that the plan's test had.
    is_cut: the tasks were left out, because the KL refuses the plan.
    """

    tasks: Mapping[str, TaskCertificate] = field(default_factory=dict)
    divergences: Mapping[str, DivergenceCertificate] = field(default_factory=dict)
    modes: Mapping[str, Any] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    reports: Mapping[str, Any] = field(default_factory=dict)
    tested: Sequence[Mapping[str, Any]] = ()
    share: float = 1.0
    is_cut: bool = False


@contextmanager
def open_for_plan(prepared: Prepared) -> Iterator[CompileContext]:
    """Open the journal and the cluster for a plan without a bundle.

    The plan reads the journal of an interrupted compile and adds to it. It writes nothing else.
    """
    request, note = prepared.request, prepared.talk.note
    if request.shared is not None or request.measurements is not None:
        with open_for_compile(prepared) as context:
            yield context
        return
    is_shared = request.resume and work_folder(request.output).is_dir()
    lock = hold_output(request.output, request.disk, note) if is_shared else nullcontext()
    opened = planning_journal(request.output, prepared.measurement_identity(), request.resume, note)
    with lock, _workers(prepared) as cluster, opened as journal:
        yield CompileContext(prepared, journal, journal.of(prepared.identity()), cluster)


@contextmanager
def open_for_compile(prepared: Prepared) -> Iterator[CompileContext]:
    """Open the journal and the cluster for a compile."""
    request = prepared.request
    identity, last = prepared.measurement_identity(), certified_stage(request.profile.name)
    opened = work_journal(
        request.work, identity, request.disk, request.takes_up, request.talk.note, last, request.keeps_work
    )
    with disk_errors(request.output.parent), _workers(prepared) as cluster, opened as journal:
        yield CompileContext(prepared, journal, journal.of(prepared.identity()), cluster)


@contextmanager
def open_for_comparison(prepared: Prepared, identity: str) -> Iterator[CompileContext]:
    """Open the journal for the comparison of a finished bundle.

    identity: digest of everything that its measurements depend on, the bundle's plan included. In a folder of kept
        measurements, it is that of the decisions alone.
    """
    request, last = prepared.request, certified_stage(prepared.profile.name)
    shared = identity if request.measurements is None else prepared.measurement_identity()
    opened = work_journal(
        request.work, shared, request.disk, request.takes_up, request.talk.note, last, request.keeps_work
    )
    with opened as journal:
        yield CompileContext(prepared, journal, journal.of(identity), None)


@contextmanager
def _workers(prepared: Prepared) -> Iterator[ClusterSession | None]:
    """Connect to the cluster of the request; None without one."""
    request = prepared.request
    if request.cluster is None:
        yield None
        return
    with cluster_session(request, prepared.lowering, prepared.stored_specs, prepared.runtime_bytes) as cluster:
        yield cluster


def with_use_on_devices(prepared: Prepared, statistics: ActivationStatistics | None) -> ActivationStatistics | None:
    """Return the statistics with the use of experts on devices, if the request names it, and tell so."""
    use, talk = prepared.use, prepared.talk
    if use is None:
        return statistics
    for note in use.notes(None if statistics is None else statistics.num_tokens):
        talk.note(note)
    return None if statistics is None else use.statistics(statistics, prepared.options.path_keys)


def used_tables(prepared: Prepared, statistics: ActivationStatistics | None) -> Tables | None:
    """Return the tables of the bundle; None if nothing is known.

    statistics: result of `with_use_on_devices`; None without data.
    """
    if statistics is not None:
        return Tables.of(statistics)
    return None if prepared.use is None else prepared.use.tables(prepared.options.path_keys)


def used_popularity(prepared: Prepared, statistics: ActivationStatistics | None) -> NDArray[np.uint32] | None:
    """Return the tokens of each expert, uint32 [L, E]; None if nothing is known.

    statistics: result of `with_use_on_devices`; None without data.
    """
    if statistics is not None:
        return statistics.popularity
    return None if prepared.use is None else prepared.use.popularity(None)
