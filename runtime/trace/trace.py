"""A routing trace: which experts every token of a run chose, what was advised, and how long computing took.

`TraceRecorder` makes one while a model runs, `trace_file.py` keeps it, `simulation/` replays it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..expert_cache.counts import CacheStats
from ..options.runtime import Prefetch, PrefetchRule
from .statistics import PhaseTimes

# Less than this says little of a storage's rate.
LEAST_READ_BYTES = 64 << 20
Access = tuple[int, tuple[int, ...]]
"""One layer of one pass: the layer, and the experts it asked for, counted over all layers."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Where a trace comes from.

    bundle: SHA-256 of the bundle's manifest file. experts, top_k: per layer. prompt_tokens: of the first passes, after
    which every pass is one token. prefetch: whose advice was recorded; `prefetch_layers` and so on: how far, how much
    and by which rule, as in RuntimeOptions. first_decoder_layer: layers below are an encoder's, whose one pass comes
    first, over the whole prompt; 0: there is none.
    little_experts: of the little model that scores speak of, per token and layer; 0: half of each layer's.
    memory_bytes_per_s, storage_bytes_per_s, storage_latency_ns: of the recording machine, as a device profile has them;
    the second is what the reads of the run reached, where they were many.
    """

    bundle: str
    experts: tuple[int, ...]
    top_k: tuple[int, ...]
    prompt_tokens: int
    prefetch: Prefetch
    threads: int
    memory_bytes_per_s: int
    storage_bytes_per_s: int
    storage_latency_ns: int
    first_decoder_layer: int = 0
    prefetch_layers: int = 2
    prefetch_experts: int = 0
    prefetch_rule: PrefetchRule = "spread"
    little_experts: int = 0

    @property
    def first_expert(self) -> list[int]:
        """[L + 1]: where each layer's experts begin when they are counted over all layers."""
        return [0, *np.cumsum(self.experts).tolist()]


@dataclass(frozen=True, slots=True)
class PassScores:
    """What routers said of one token: what lossy modes and lookahead decide by. Bytes are little-endian float32.

    logits: of all layers that route, one after the other, [sum of E]. ahead: per layer the scores [E] that lookahead
    found for the layers ahead, nearest first. little_logits, confidence: of the same token computed by the little model
    behind a text computed with all, its logits and its greatest output probability; empty and None where that
    was not recorded.
    """

    logits: bytes
    ahead: tuple[tuple[bytes, ...], ...]
    little_logits: bytes = b""
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class TracedPass:
    """One pass over all layers. Times of each layer are int nanoseconds [L].

    chosen: per layer T x K experts of that layer, token by token, best first. advice: per layer the experts that were
    to be read ahead, likeliest first, counted over all layers. dense_ns: what a layer computed in front of its routed
    experts; shared_ns: its shared expert; experts_ns: its routed experts. head_ns: behind the last layer.
    elapsed_ns: the whole pass; stall_ns: the part in which it waited for reads. first_layer: where it began, which is 0
    but for decoders behind an encoder; a pass of the encoder ends there. Layers above are counted from it.
    scores: of passes of one token, where routers decided; None in files of version 1.
    """

    tokens: int
    chosen: tuple[tuple[int, ...], ...]
    advice: tuple[tuple[int, ...], ...]
    dense_ns: tuple[int, ...]
    experts_ns: tuple[int, ...]
    shared_ns: tuple[int, ...]
    head_ns: int
    elapsed_ns: int
    stall_ns: int
    first_layer: int = 0
    scores: PassScores | None = None

    @property
    def other_ns(self) -> int:
        """What is neither a kernel nor a stall: routing, the cache, advice."""
        kernels_ns = sum(self.dense_ns) + sum(self.experts_ns) + sum(self.shared_ns) + self.head_ns
        return max(0, self.elapsed_ns - self.stall_ns - kernels_ns)

    def accesses(self, first_expert: Sequence[int]) -> list[Access]:
        """What each layer asked the cache for, in the order in which the model asks."""
        asked = []
        for layer, chosen in enumerate(self.chosen, self.first_layer):
            experts = chosen if self.tokens == 1 else sorted(set(chosen))
            asked.append((layer, tuple(first_expert[layer] + expert for expert in experts)))
        return asked


@dataclass(frozen=True, slots=True)
class Trace:
    """Passes in order: the prompt's, then one per further token. With an encoder its pass over the prompt, then one of
    the decoder per token.
    """

    header: TraceHeader
    passes: tuple[TracedPass, ...]

    @property
    def prompt_passes(self) -> int:
        """How many passes come before the first token: with an encoder its own and the decoder's first.

        Raises ValueError if no pass ends where the prompt ends, or passes of an encoder are not as they must be.
        """
        if self.header.first_decoder_layer:
            return self._passes_with_encoder()
        done = 0
        for number, each in enumerate(self.passes, 1):
            done += each.tokens
            if done == self.header.prompt_tokens:
                return number
        raise ValueError(f"no pass ends with the prompt, behind {self.header.prompt_tokens} tokens")

    def _passes_with_encoder(self) -> int:
        first, tokens = self.header.first_decoder_layer, [each.tokens for each in self.passes]
        starts = [each.first_layer for each in self.passes]
        if len(starts) < 2 or starts != [0, *[first] * (len(starts) - 1)] or tokens[0] != self.header.prompt_tokens:
            raise ValueError(
                f"expected one pass of the encoder, over {self.header.prompt_tokens} tokens, then passes of the decoder"
            )
        if tokens[1] != 1:
            raise ValueError(f"expected a first pass of the decoder over 1 token, found {tokens[1]}")
        return 2

    def accesses(self) -> list[Access]:
        """What the cache was asked for, pass by pass and layer by layer."""
        first = self.header.first_expert
        return [access for each in self.passes for access in each.accesses(first)]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of the pass under way. logits, ahead: as in PassScores."""

    index: int
    chosen: np.ndarray
    advice: tuple[int, ...]
    times: PhaseTimes
    logits: bytes
    ahead: tuple[bytes, ...]


def _float_bytes(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


def _scores_of(layers: Sequence[_Layer]) -> PassScores | None:
    """None for passes of many tokens, of models with an encoder, and where tokens alone decide."""
    logits = b"".join(each.logits for each in layers)
    return PassScores(logits, tuple(each.ahead for each in layers)) if logits else None


class TraceRecorder:
    """Notes passes while they run. times: of the running model, which go on counting. cache: tells its cache's.

    first_decoder_layer: the passes of an encoder end there.
    """

    def __init__(self, times: PhaseTimes, cache: Callable[[], CacheStats], first_decoder_layer: int = 0) -> None:
        self._times, self._cache, self._before = times, cache, cache().copy()
        self._first_layers = {0, first_decoder_layer}
        self._has_encoder = first_decoder_layer > 0
        self._layers: list[_Layer] = []
        self.passes: list[TracedPass] = []
        self.begin()

    @property
    def read_bytes_per_s(self) -> int | None:
        """What storage gave while it was reading, latency included; None where too little was read to tell."""
        since = self._cache().since(self._before)
        if since.bytes_read < LEAST_READ_BYTES or not since.busy_ns:
            return None
        return since.bytes_read * 10**9 // since.busy_ns

    def begin(self) -> None:
        """A pass begins; what was recorded of one that did not end is dropped."""
        self._layers.clear()
        self._started_ns, self._stall_ns = time.perf_counter_ns(), self._cache().stall_ns
        self._start_times = self._times.copy()

    def add_layer(
        self,
        layer: int,
        chosen: np.ndarray,
        advice: Sequence[int],
        logits: np.ndarray | None = None,
        foreseen: Sequence[np.ndarray] = (),
        times: PhaseTimes | None = None,
    ) -> None:
        """The next layer has chosen its experts, int32 [T, K]. A first layer ends the pass under way, if any.

        logits: [T, E], what it chose by; foreseen: [E] each, what was found for layers ahead, nearest first. times: the
        counters before any of its experts was computed; None: they are so now.
        """
        if layer in self._first_layers and self._layers:
            self.end()
        is_one = len(chosen) == 1 and not self._has_encoder
        own = _float_bytes(logits) if is_one and logits is not None else b""
        ahead = tuple(map(_float_bytes, foreseen)) if is_one else ()
        self._layers.append(_Layer(layer, chosen, tuple(advice), times or self._times.copy(), own, ahead))

    def end(self) -> None:
        """The pass is over, the head included where it ran."""
        if not self._layers:
            return
        layers = self._layers
        marks = [*(each.times for each in layers), self._times.copy()]
        # Between two marks: the experts of the first layer, its shared expert, and what is dense of the second.
        gained = [later.since(earlier) for earlier, later in pairwise(marks)]
        dense = [marks[0].since(self._start_times).dense_ns, *(each.dense_ns - each.shared_ns for each in gained)]
        self.passes.append(
            TracedPass(
                tokens=len(layers[0].chosen),
                chosen=tuple(tuple(each.chosen.reshape(-1).tolist()) for each in layers),
                advice=tuple(each.advice for each in layers),
                dense_ns=tuple(dense[:-1]),
                experts_ns=tuple(each.experts_ns for each in gained),
                shared_ns=tuple(each.shared_ns for each in gained),
                head_ns=dense[-1],
                elapsed_ns=time.perf_counter_ns() - self._started_ns,
                stall_ns=self._cache().stall_ns - self._stall_ns,
                first_layer=layers[0].index,
                scores=_scores_of(layers),
            )
        )
        self.begin()
