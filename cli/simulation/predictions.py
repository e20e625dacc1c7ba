"""Predictions of `moec simulate`: all settings, cache sizes and policies on one trace and device, and the energy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..lossy_modes.mode_sweep import modes_of
from ..terminal import output
from ..terminal.progress_bar import ProgressBar
from .lossy_replay import LossyReplay

if TYPE_CHECKING:
    from moec.profiles.device_parts import Power
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.expert_cache.policies import PolicyScore
    from moec.runtime.options.runtime import Prefetch
    from moec.runtime.simulation.accelerator_replay import ReplayedDevice
    from moec.runtime.simulation.timeline import Advice, DeviceRates, TimedPass, Timeline, Watch
    from moec.runtime.trace.trace import Trace

    from .traces import ReplayedBundle


@dataclass(frozen=True)
class Row:
    """One prediction.

    options: options of the lossy modes; empty for the exact run.
    decisions: decisions of the modes; None for the exact run.
    gain: its tokens per second divided by those of the exact run.
    """

    timeline: Timeline
    options: dict[str, str]
    decisions: dict[str, Any] | None
    gain: float | None

    @property
    def mode(self) -> str:
        """Text of the `mode:` line of a run; empty if it is exact."""
        return modes_of(self.options).to_text()

    def to_plain(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        modes = {"mode": self.mode, "options": self.options, "decisions": self.decisions, "x_exact": self.gain}
        return {**self.timeline.to_plain(), **modes}


@dataclass(frozen=True)
class Simulation:
    """A trace of a bundle on a device.

    advice: experts read ahead in passes that are replayed as recorded.
    shared: accelerator that computes some of the experts; None without one.
    watch: receives every simulated event; None: nothing is told.
    """

    bundle: Bundle
    trace: Trace
    replayed: ReplayedBundle
    rates: DeviceRates
    prefetch: Prefetch
    advice: Advice
    shared: ReplayedDevice | None = None
    watch: Watch | None = None

    def rows(
        self, capacities: Sequence[int], policies: dict[str, str | PolicyScore], settings: Sequence[dict[str, str]]
    ) -> list[Row]:
        """Return a row for each capacity, policy and setting. The exact setting comes first.

        A capacity that does not hold the experts of a layer is left out with a message.
        """
        rows: list[Row] = []
        count = len(capacities) * len(policies) * len(settings)
        with ProgressBar("simulating") as progress:
            for capacity in capacities:
                least = self.replayed.minimum_bytes
                if capacity < least:
                    output.say(f"a cache of {capacity} bytes is under the {least} of one layer, left out")
                    continue
                for name, policy in policies.items():
                    exact: float | None = None
                    for options in settings:
                        timeline, decisions = self._predict(capacity, policy, options)
                        rate = timeline.tokens_per_s
                        exact = rate if not options else exact
                        gain = rate / exact if rate and exact else None
                        rows.append(Row(replace(timeline, policy=name), options, decisions, gain))
                        progress(len(rows), count)
        return rows

    def _predict(
        self, capacity: int, policy: str | PolicyScore, options: dict[str, str]
    ) -> tuple[Timeline, dict[str, Any] | None]:
        from moec.runtime.simulation.recorded_advice import no_advice
        from moec.runtime.simulation.replay import OPTIMUM, named_score
        from moec.runtime.simulation.timeline import SimulatedMachine, predict_steps, timed_pass

        replayed, header, passes = self.replayed, self.trace.header, self.trace.passes
        cached_bytes = min(capacity, replayed.total_bytes)
        advice = self.advice if capacity < replayed.total_bytes else no_advice
        on_device = frozenset[int]() if self.shared is None else self.shared.resident
        lossy = LossyReplay(self.bundle, replayed, self.prefetch, on_device)
        steps: Sequence[Sequence[TimedPass]]
        decisions: dict[str, Any] | None = None
        # Advice of the rule `first-miss` depends on the cache. It is decided again if the trace has the scores.
        is_decided_again = (
            not has_static_routers(self.bundle)
            and self.prefetch == "lookahead"
            and header.prefetch_rule == "first-miss"
            and all(step.scores is not None for step in passes[self.trace.prompt_passes :])
        )
        if options or (is_decided_again and policy != OPTIMUM):
            score = named_score(policy)
            if score is None:
                raise ValueError("lossy modes decide without the later requests that the optimum knows")
            decided = lossy.decide(self.trace, cached_bytes, score, options, advice)
            steps, decisions = decided.steps, decided.counts.to_plain()
        else:
            steps = [(timed_pass(step, header.first_expert, advice),) for step in passes]
        timeline = predict_steps(
            steps,
            self.trace.prompt_passes,
            replayed.cache_spec(cached_bytes),
            policy,
            SimulatedMachine(self.rates, self.shared, replayed.next_in_file, self.watch),
            lossy.warm,
        )
        return timeline, decisions if options else None


def has_static_routers(bundle: Bundle) -> bool:
    """Return whether the tokens alone decide the experts of a layer. Such a trace is not decided again."""
    return any(layer.experts.router.static is not None for layer in bundle.manifest.model.layers)


def token_joules(power: Power | None, timeline: Timeline) -> float | None:
    """Return the joules of a decoded token; None if the profile states no draw, or no token was decoded."""
    from moec.profiles.predict import predicted_joules

    if power is None or timeline.tpot_mean_ns is None:
        return None
    return predicted_joules(power, timeline.tpot_mean_ns, timeline.stall, timeline.cooperation is not None)


def joules_text(joules: float | None) -> str:
    """Return an energy as text for people."""
    if joules is None:
        return "-"
    return f"{joules:.2f} J" if joules >= 1 else f"{joules * 1e3:.1f} mJ"


def power_text(power: Power, uses_gpu: bool) -> str | None:
    """Return the stated draws that the energy counts; None if one that is needed is not stated."""
    if power.load_watts is None or (uses_gpu and power.gpu_watts is None):
        return None
    parts = [f"{power.load_watts:g} W computing"]
    if power.idle_watts is not None:
        parts.append(f"{power.idle_watts:g} W waiting")
    if uses_gpu:
        parts.append(f"{power.gpu_watts:g} W of the GPU")
    return f"{', '.join(parts)}, as the profile states"
