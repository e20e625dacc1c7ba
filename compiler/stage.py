"""What the stages of a compile hand on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .bundle.certify import DivergenceCertificate, TaskCertificate
from .calibration.collect import ActivationStatistics
from .cluster.session import ClusterSession
from .preflight.preparation import Prepared
from .quantization.unit_store import UnitStore
from .reference.model import ReferenceModel
from .search.comparison import Comparison
from .search.space import SearchSpace
from .sensitivity.sensitivity import SensitivityTable
from .sensitivity.trials import Trials
from .walker.sweep import SweepInputs, SweepResult
from .workspace.journal import Journal


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
