"""What prefill, decoding and beam search would take on a simulated device, under every way to share the experts.

Which experts a token chooses is drawn from their popularity, without replacement and independently of other tokens;
every strategy sees the same draws. The host's memory holds all experts. A pass is its layers one after the other: dense
weights on the processor, then the experts as planned, on the clock of a SimulatedDevice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from ..accelerator.latency import LatencyModel
from ..accelerator.planner import Action, ExpertLoad, plan_layer
from ..options.runtime import Cooperation
from .accelerator_device import SimulatedDevice

STRATEGIES: dict[str, Cooperation | None] = {
    "CPU only": None,
    "copy only": "gpu",
    "static placement": "cpu",
    "published rule": "published",
    "planner": "auto",
}
"""By name: how missing experts are treated; None: there is no device. All others have the same residents."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model as far as time depends on it. popularity: tokens that each expert received, [L, E].

    dense_fixed_ns, dense_token_ns: of a layer's other weights on the processor; head_ns: of the head, once a pass.
    """

    popularity: np.ndarray
    top_k: int
    expert_bytes: int
    dense_fixed_ns: float = 0.0
    dense_token_ns: float = 0.0
    head_ns: float = 0.0

    def residents(self, count: int) -> np.ndarray:
        """The most popular experts, bool [L, E]."""
        flat = np.zeros(self.popularity.size, bool)
        flat[np.argsort(-self.popularity.reshape(-1), kind="stable")[:count]] = True
        return flat.reshape(self.popularity.shape)

    def draw(self, layer: int, tokens: int, source: np.random.Generator) -> np.ndarray:
        """Tokens that each expert of a layer receives, int [E]."""
        scores = np.log(self.popularity[layer] + 1e-9) + source.gumbel(size=(tokens, self.popularity.shape[1]))
        chosen = np.argpartition(-scores, self.top_k - 1, axis=1)[:, : self.top_k]
        return np.bincount(chosen.reshape(-1), minlength=self.popularity.shape[1])


def layer_ns(loads: Sequence[ExpertLoad], latency: LatencyModel, cooperation: Cooperation) -> float:
    """The experts of one layer, from the first to begin to the last to end, on a device's clock."""
    plan, by_index = plan_layer(loads, latency, cooperation), {load.index: load for load in loads}
    device = SimulatedDevice(latency, memory_bytes=1 << 62)
    kept = device.keep_bytes(0)
    for load in loads:
        if plan.actions[load.index] is Action.RESIDENT:
            device.run_tokens(kept, load.tokens)
    for index in plan.order:
        load = by_index[index]
        if plan.actions[index] is Action.COPY:
            device.run_tokens(device.copy_bytes(load.size_bytes), load.tokens)
        else:
            device.advance(latency.cpu_ns(load.tokens))
    device.synchronize()
    return device.now_ns


def pass_ns(
    work: Workload, latency: LatencyModel, residents: np.ndarray, strategy: str, tokens: int, seed: int
) -> float:
    """One pass of so many tokens. residents: bool [L, E]; seed: of the draws. Raises KeyError on another strategy."""
    cooperation, source = STRATEGIES[strategy], np.random.default_rng([seed, tokens])
    layers, experts = work.popularity.shape
    total: float = work.head_ns + layers * (work.dense_fixed_ns + work.dense_token_ns * tokens)
    for layer in range(layers):
        counts = work.draw(layer, tokens, source)
        kept = residents[layer] if cooperation is not None else np.zeros(experts, bool)
        loads = [
            ExpertLoad(expert, int(counts[expert]), work.expert_bytes, bool(kept[expert]), is_in_host=True)
            for expert in range(experts)
            if counts[expert]
        ]
        total += layer_ns(loads, latency, cooperation or "cpu")
    return total


def prefill_ns(
    work: Workload, latency: LatencyModel, residents: np.ndarray, strategy: str, tokens: int, seed: int = 0
) -> float:
    """A prompt, in passes as long as the engine makes them: the time to its first token."""
    starts = range(0, tokens, MAX_PASS_TOKENS)
    return sum(
        pass_ns(work, latency, residents, strategy, min(MAX_PASS_TOKENS, tokens - start), seed + start)
        for start in starts
    )


def decode_ns(
    work: Workload, latency: LatencyModel, residents: np.ndarray, strategy: str, width: int, steps: int, seed: int = 0
) -> float:
    """One step of so many sequences side by side, or of a beam search of this width: the mean of some steps."""
    return sum(pass_ns(work, latency, residents, strategy, width, seed + step) for step in range(steps)) / steps
