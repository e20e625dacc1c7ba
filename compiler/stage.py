"""What the stages of a compile hand on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .calibration import ActivationStatistics
from .certify import DivergenceCertificate, TaskCertificate
from .cluster.session import ClusterSession
from .comparison import Comparison
from .journal import Journal
from .layerwise.sweep import SweepInputs, SweepResult
from .preparation import Prepared
from .reference import ReferenceModel
from .search.space import SearchSpace
from .sensitivity import SensitivityTable
from .trials import Trials
from .unit_store import UnitStore


@dataclass(slots=True)
class Stage(Prepared):
    """A compile that may begin, and what its stages have found so far."""

    journal: Journal | None = None
    cluster: ClusterSession | None = None
    reference: ReferenceModel | None = None
    statistics: ActivationStatistics | None = None
    store: UnitStore | None = None
    trials: Trials | None = None
    sensitivity: SensitivityTable | None = None
    space: SearchSpace | None = None
    comparison: Comparison | None = None
    swept: tuple[SweepInputs, SweepResult] | None = None
    certificates: dict[str, TaskCertificate] = field(default_factory=dict)
    divergences: dict[str, DivergenceCertificate] = field(default_factory=dict)
    modes: dict[str, Any] | None = None

    @classmethod
    def of(cls, prepared: Prepared) -> Stage:
        """Nothing found yet."""
        return cls(**{part.name: getattr(prepared, part.name) for part in fields(prepared)})
