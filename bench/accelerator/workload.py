"""Times of prefill, decoding and beam search on a simulated device, for each strategy of splitting the experts.

The experts of a token are drawn from their popularity, without replacement and independently of other tokens. All
strategies have the same draws. All experts are in host memory.
The layers of a pass run one after the other on a DeviceClock. Dense weights run on the processor, then
the experts as planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.runtime.accelerator.latency import LatencyModel
from moec.runtime.accelerator.planner import Action, ExpertLoad, plan_layer
from moec.runtime.options.runtime import Cooperation
from moec.runtime.simulation.accelerator_replay import DeviceClock

STRATEGIES: dict[str, Cooperation | None] = {
    "CPU only": None,
    "copy only": "gpu",
    "static placement": "cpu",
    "published rule": "twiddler",
    "planner": "auto",
}
"""Rule for experts that are not resident, by name of the strategy; None: no device. The others have equal residents."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Properties of a model that its time depends on.

    popularity: tokens that each expert received, [L, E].
    top_k: experts per token.
    expert_bytes: bytes of an expert.

    dense_fixed_ns, dense_token_ns: time of a layer's dense weights on the processor, fixed and per token.
    head_ns: time of the head, once per pass.
    """

    popularity: np.ndarray
    top_k: int
    expert_bytes: int
    dense_fixed_ns: float = 0.0
    dense_token_ns: float = 0.0
    head_ns: float = 0.0

    def residents(self, count: int) -> np.ndarray:
        """Return a mask of the most popular experts, bool [L, E]."""
        flat = np.zeros(self.popularity.size, bool)
        flat[np.argsort(-self.popularity.reshape(-1), kind="stable")[:count]] = True
        return flat.reshape(self.popularity.shape)

    def draw(self, layer: int, tokens: int, source: np.random.Generator) -> np.ndarray:
        """Draw the number of tokens that each expert of a layer receives, int [E]."""
        scores = np.log(self.popularity[layer] + 1e-9) + source.gumbel(size=(tokens, self.popularity.shape[1]))
        chosen = np.argpartition(-scores, self.top_k - 1, axis=1)[:, : self.top_k]
        return np.bincount(chosen.reshape(-1), minlength=self.popularity.shape[1])


def layer_ns(loads: Sequence[ExpertLoad], latency: LatencyModel, cooperation: Cooperation) -> float:
    """Return the time from the first begin to the last end of a layer's experts, on the clock of a device."""
    plan, by_index = plan_layer(loads, latency, cooperation), {load.index: load for load in loads}
    device = DeviceClock(latency)
    if any(action is not Action.CPU for action in plan.actions.values()):
        device.begin_layer()
    for load in loads:
        if plan.actions[load.index] is Action.RESIDENT:
            device.compute(load.tokens)
    for index in plan.order:
        load = by_index[index]
        if plan.actions[index] is Action.COPY:
            device.compute(load.tokens, device.copy(load.size_bytes))
        else:
            device.now_ns += latency.cpu_ns(load.tokens)
    device.synchronize()
    return device.now_ns


def pass_ns(
    work: Workload, latency: LatencyModel, residents: np.ndarray, strategy: str, tokens: int, seed: int
) -> float:
    """Return the time of one pass.

    residents: experts that stay on the device, bool [L, E].
    strategy: name in STRATEGIES.
    seed: seed of the draws.
    Raises KeyError for an unknown strategy.
    """
    cooperation, source = STRATEGIES[strategy], np.random.default_rng([seed, tokens])
    layers, experts = work.popularity.shape
    total: float = work.head_ns + layers * (work.dense_fixed_ns + work.dense_token_ns * tokens)
    for layer in range(layers):
        counts = work.draw(layer, tokens, source)
        resident = residents[layer] if cooperation is not None else np.zeros(experts, bool)
        loads = [
            ExpertLoad(expert, int(counts[expert]), work.expert_bytes, bool(resident[expert]), is_in_host=True)
            for expert in range(experts)
            if counts[expert]
        ]
        total += layer_ns(loads, latency, cooperation or "cpu")
    return total


def prefill_ns(
    work: Workload, latency: LatencyModel, residents: np.ndarray, strategy: str, tokens: int, seed: int = 0
) -> float:
    """Return the time to the first token of a prompt. Its passes are as long as those of the engine."""
    starts = range(0, tokens, MAX_PASS_TOKENS)
    return sum(
        pass_ns(work, latency, residents, strategy, min(MAX_PASS_TOKENS, tokens - start), seed + start)
        for start in starts
    )


def decode_ns(
    work: Workload, latency: LatencyModel, residents: np.ndarray, strategy: str, width: int, steps: int, seed: int = 0
) -> float:
    """Return the mean time of a decoding step of `width` sequences or beams, over `steps` steps."""
    return sum(pass_ns(work, latency, residents, strategy, width, seed + step) for step in range(steps)) / steps
