"""Decide a trace again under lossy modes, with a cache of any size and policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.errors import OptionError

from ..lossy_modes.mode_sweep import modes_of

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.expert_cache.policies import PolicyScore
    from moec.runtime.modes.mode_counts import ModeCounts
    from moec.runtime.options.runtime import Prefetch
    from moec.runtime.prefetch.predictors import Predictor
    from moec.runtime.simulation.timeline import Advice, TimedPass
    from moec.runtime.trace.trace import Trace

    from .traces import ReplayedBundle


@dataclass(frozen=True)
class Decided:
    """Result of a replay.

    steps: passes of the prompt, then the passes of each token.
    counts: decisions.
    bytes_read: bytes that a cache reads if reads take no time.
    """

    steps: list[tuple[TimedPass, ...]]
    counts: ModeCounts
    bytes_read: int


@dataclass(frozen=True)
class LossyReplay:
    """Replays of traces of a bundle.

    prefetch: predictor of the experts that are read ahead.
    on_device: experts that stay on an accelerator.
    """

    bundle: Bundle
    replayed: ReplayedBundle
    prefetch: Prefetch
    on_device: Collection[int] = ()

    @property
    def warm(self) -> list[int]:
        """Experts in host memory at the start, in order. Those on the accelerator come last."""
        return sorted(self.replayed.warm, key=lambda index: index in self.on_device)

    def decide(
        self, trace: Trace, capacity: int, score: PolicyScore, options: dict[str, str], advice: Advice
    ) -> Decided:
        """Return the passes of a trace under lossy modes. The trace must have the scores that the modes need.

        options: options of the modes; empty for an exact run.
        advice: advice during the prompt.
        """
        from moec.runtime.modes.expert_choice import Versions, low_version_indices
        from moec.runtime.modes.logical_cache import LogicalCache
        from moec.runtime.prefetch.advisor import Advisor
        from moec.runtime.prefetch.predictors import table_predictor
        from moec.runtime.simulation.lossy_replay import RecordedPredictor, TracedModel, replay_modes

        cache = LogicalCache(self.replayed.cache_spec(capacity), score, self.warm, self.on_device)
        header, spec = trace.header, self.bundle.manifest.model
        predictor: Predictor | None = None
        if capacity < self.replayed.total_bytes and self.prefetch == "lookahead":
            predictor = RecordedPredictor(spec)
        elif capacity < self.replayed.total_bytes:
            predictor = table_predictor(self.prefetch, self.bundle.tables(), spec)
        advisor = Advisor(
            spec,
            header.first_expert,
            predictor,
            header.prefetch_layers,
            header.prefetch_experts,
            header.prefetch_rule,
            cache.is_resident,
        )
        model = TracedModel(spec, header.first_expert, self.replayed.sizes, advisor)
        versions = Versions(model.first_expert, low_version_indices(self.bundle.manifest))
        steps, counts = replay_modes(trace, modes_of(options), model, versions, cache, advice)
        return Decided(steps, counts, cache.bytes_read)


def require_scores(path: Path, trace: Trace, options: dict[str, str]) -> None:
    """Refuse modes that need scores which a trace lacks, or change what it has recorded. Raises OptionError."""
    from moec.runtime.simulation.lossy_replay import missing_scores

    if "expert_activations" in options:
        raise OptionError(
            "`--modes`: `expert-activations` changes the activations of a trace, which decide", "leave it out"
        )
    missing = missing_scores(trace, modes_of(options))
    if missing is not None:
        raise OptionError(
            f"`--modes`: `{modes_of(options).to_text()}` needs scores that `{path}` has not recorded: {missing}",
            "record it with `moec bench BUNDLE --trace-out FILE`, `--trace-little` for the little model's experts",
        )
