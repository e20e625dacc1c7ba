"""A routing trace: the experts chosen by each token of a run, the advice given, and the computing times.

`TraceRecorder` records one while a model runs, `trace_file.py` stores it, `simulation/` replays it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..expert_cache.cache_stats import CacheStats
from ..options.runtime import Prefetch, PrefetchRule
from .statistics import PhaseTimes

# Fewer bytes do not give a reliable storage rate.
LEAST_READ_BYTES = 64 << 20
Access = tuple[int, tuple[int, ...]]
"""One layer of one pass: the layer, and the experts it requests, as indices over all layers."""


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """Origin of a trace.

    bundle: SHA-256 of the bundle's manifest file.
    experts, top_k: experts and experts per token of each layer.
    prompt_tokens: tokens of the first passes. Every pass after them has one token.

    prefetch: predictor whose advice was recorded.
    prefetch_layers, prefetch_experts, prefetch_rule: values of these RuntimeOptions.

    threads: computing threads of the run.
    memory_bytes_per_s, storage_latency_ns: rates of the recording machine, as in a device profile; 0: not measured.

    storage_bytes_per_s: rate that the reads of the run reached, if there were many, else that of the device profile;
        0: not measured.

    first_decoder_layer: first layer of the decoder; 0 without an encoder. Layers before it belong to the encoder. Its
        single pass over the prompt comes first.

    little_experts: experts of the little model per token and layer; 0: half of the experts of each layer.

    architecture: digest of the model's architecture, see `manifests/expert_use.py`; empty if unknown.
    left_out: experts of each layer that the bundle leaves out; empty if unknown.
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
    architecture: str = ""
    left_out: tuple[tuple[int, ...], ...] = ()

    @property
    def has_rates(self) -> bool:
        """True if the rates of the recording machine were measured."""
        return self.memory_bytes_per_s > 0

    @property
    def first_expert(self) -> list[int]:
        """Index over all experts at which each layer's experts begin, [L + 1]."""
        return [0, *np.cumsum(self.experts).tolist()]


@dataclass(frozen=True, slots=True)
class PassScores:
    """Router outputs of one token, from which lossy modes and lookahead decide. Bytes are little-endian float32.

    logits: logits of all layers that route, concatenated, [sum of E].
    ahead: for each layer, the scores [E] of the lookahead for the layers ahead, nearest first.

    little_logits: logits of the little model for this token, after a text computed with all experts; empty if not
        recorded.
    confidence: greatest output probability of the little model; None if not recorded.
    """

    logits: bytes
    ahead: tuple[tuple[bytes, ...], ...]
    little_logits: bytes = b""
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Scores of a pass over several tokens, from which dynamic precision and lookahead decide.

    Bytes are little-endian float32.
    unimportance: least unimportance of each expert, of all layers that route, concatenated, [sum of E].
    ahead: for each layer, the scores [E] of the predictor for the layers ahead, nearest first.
    ahead_unimportance: for each layer, the least unimportance [E] that routers foresaw for the layers ahead.
    """

    unimportance: bytes
    ahead: tuple[tuple[bytes, ...], ...]
    ahead_unimportance: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, slots=True)
class TracedPass:
    """One pass over all layers. Times of each layer are int nanoseconds [L].

    Fields with one entry per layer begin with first_layer.
    chosen: T x K experts of each layer, token by token, best first.

    advice: experts to read ahead, for each layer, likeliest first, as indices over all layers.

    dense_ns: time of each layer before its routed experts.
    shared_ns: time of each layer's shared expert.
    experts_ns: time of each layer's routed experts.

    head_ns: time after the last layer.
    elapsed_ns: time of the whole pass.
    stall_ns: part of elapsed_ns spent waiting for reads.

    first_layer: first layer of the pass. It is 0, or first_decoder_layer for a decoder pass of a model with an encoder.
    scores: router outputs of a pass of one token; None if routers did not decide.
    prompt_scores: scores of a pass of several tokens; None with an encoder.

    The pass of an encoder ends before first_decoder_layer.
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
    prompt_scores: PromptScores | None = None

    @property
    def other_ns(self) -> int:
        """Time outside kernels and stalls: routing, the cache, advice."""
        kernels_ns = sum(self.dense_ns) + sum(self.experts_ns) + sum(self.shared_ns) + self.head_ns
        return max(0, self.elapsed_ns - self.stall_ns - kernels_ns)

    def accesses(self, first_expert: Sequence[int]) -> list[Access]:
        """Return the requests of each layer to the cache, in the order in which the model makes them."""
        accesses = []
        for layer, chosen in enumerate(self.chosen, self.first_layer):
            experts = chosen if self.tokens == 1 else sorted(set(chosen))
            accesses.append((layer, tuple(first_expert[layer] + expert for expert in experts)))
        return accesses


@dataclass(frozen=True, slots=True)
class Trace:
    """Passes in order: those of the prompt, then one for each further token.

    With an encoder: one pass of the encoder over the prompt, then one pass of the decoder for each token.
    """

    header: TraceHeader
    passes: tuple[TracedPass, ...]

    @property
    def prompt_passes(self) -> int:
        """Number of passes before the first token; with an encoder, its pass and the first one of the decoder.

        Raises ValueError if the passes are not in the order of `PassOrder`.
        """
        order = PassOrder(self.header)
        for traced in self.passes:
            order.add(traced)
        order.check_end()
        return order.prompt_passes

    def accesses(self) -> list[Access]:
        """Return the requests to the cache, pass by pass and layer by layer."""
        first = self.header.first_expert
        return [access for traced in self.passes for access in traced.accesses(first)]


class PassOrder:
    """Checks the order of passes: those of the prompt, the last of which ends with it, then one for each token.

    With an encoder: its pass over the prompt, then passes of the decoder, each over one token.
    prompt_passes: number of passes before the first token, as far as they were added.
    """

    def __init__(self, header: TraceHeader) -> None:
        self._header, self._prompt_tokens, self.prompt_passes = header, 0, 0
        self._count, self._is_decoding = 0, False

    def add(self, traced: TracedPass) -> None:
        """Take the next pass. Raises ValueError."""
        self._count += 1
        if self._header.first_decoder_layer:
            self._add_with_encoder(traced)
        elif self._is_decoding:
            _require_one_token(traced)
        else:
            self._prompt_tokens += traced.tokens
            self.prompt_passes = self._count
            self._is_decoding = self._prompt_tokens == self._header.prompt_tokens

    def _add_with_encoder(self, traced: TracedPass) -> None:
        is_encoder = self._count == 1
        expected = 0 if is_encoder else self._header.first_decoder_layer
        if traced.first_layer != expected or (is_encoder and traced.tokens != self._header.prompt_tokens):
            raise ValueError(self._expected_stacks())
        if self._count == 2 and traced.tokens != 1:
            raise ValueError(f"expected a first pass of the decoder over 1 token, found {traced.tokens}")
        if self._is_decoding:
            _require_one_token(traced)
        self.prompt_passes, self._is_decoding = min(self._count, 2), self._count >= 2

    def check_end(self) -> None:
        """Check that the prompt is complete. Raises ValueError."""
        if self._is_decoding:
            return
        if self._header.first_decoder_layer:
            raise ValueError(self._expected_stacks())
        raise ValueError(f"no pass ends with the prompt, after {self._header.prompt_tokens} tokens")

    def _expected_stacks(self) -> str:
        tokens = self._header.prompt_tokens
        return f"expected one pass of the encoder, over {tokens} tokens, then passes of the decoder"


def _require_one_token(traced: TracedPass) -> None:
    if traced.tokens != 1:
        raise ValueError("expected passes of one token after the prompt")


@dataclass(frozen=True, slots=True, eq=False)
class LayerScores:
    """Scores of a layer's router and of the predictor in one pass.

    logits: router logits of the choice, [T, E].
    foreseen: predicted scores of layers ahead, [E] each, nearest first.
    unimportance: of this layer and the layers ahead, [E] each, as of `PassState.unimportance`.
    """

    logits: np.ndarray | None = None
    foreseen: Sequence[np.ndarray] = ()
    unimportance: Sequence[np.ndarray] = ()


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of the pass in progress.

    logits, ahead: as in PassScores.
    unimportance: of this layer, then of layers ahead, as in PromptScores; empty for one token.
    """

    index: int
    chosen: np.ndarray
    advice: tuple[int, ...]
    times: PhaseTimes
    logits: bytes
    ahead: tuple[bytes, ...]
    unimportance: tuple[bytes, ...]


def _float_bytes(values: np.ndarray) -> bytes:
    return values.astype("<f4").tobytes()


class TraceRecorder:
    """Records passes while they run.

    times: phase times of the running model, which keep counting.
    cache: returns the statistics of its cache.
    first_decoder_layer: layer at which the passes of an encoder end.
    keeps_scores: whether router outputs are recorded. With them, who has the model can compute the text.
    take: receives each pass at its end; None: `passes` keeps them.
    """

    def __init__(
        self,
        times: PhaseTimes,
        cache: Callable[[], CacheStats],
        first_decoder_layer: int = 0,
        keeps_scores: bool = True,
        take: Callable[[TracedPass], object] | None = None,
    ) -> None:
        self._times, self._cache, self._before = times, cache, cache().copy()
        self.keeps_scores = keeps_scores
        self._first_layers = {0, first_decoder_layer}
        self._has_encoder = first_decoder_layer > 0
        self._layers: list[_Layer] = []
        self.passes: list[TracedPass] = []
        self._take = take or self.passes.append
        self.begin()

    @property
    def read_bytes_per_s(self) -> int | None:
        """Rate of storage while it was reading, bytes per s, latency included; None if too little was read."""
        since = self._cache().since(self._before)
        if since.bytes_read < LEAST_READ_BYTES or not since.busy_ns:
            return None
        return since.bytes_read * 10**9 // since.busy_ns

    def begin(self) -> None:
        """Begin a pass. A pass that did not end is dropped."""
        self._layers.clear()
        self._started_ns, self._stall_ns = time.perf_counter_ns(), self._cache().stall_ns
        self._start_times = self._times.copy()

    def add_layer(
        self,
        layer: int,
        chosen: np.ndarray,
        advice: Sequence[int],
        scores: LayerScores = LayerScores(),
        times: PhaseTimes | None = None,
    ) -> None:
        """Add the next layer, which has chosen its experts. A first layer ends the pass in progress, if any.

        chosen: int32 [T, K].
        times: phase times before any of its experts was computed; None for the current ones.
        """
        if layer in self._first_layers and self._layers:
            self.end()
        has_scores = self.keeps_scores and not self._has_encoder
        is_one = len(chosen) == 1 and has_scores
        logits = _float_bytes(scores.logits) if is_one and scores.logits is not None else b""
        least = tuple(map(_float_bytes, scores.unimportance)) if has_scores else ()
        ahead = tuple(map(_float_bytes, scores.foreseen)) if is_one or least else ()
        self._layers.append(_Layer(layer, chosen, tuple(advice), times or self._times.copy(), logits, ahead, least))

    def end(self) -> None:
        """End the pass, including the head if it ran."""
        if not self._layers:
            return
        layers = self._layers
        marks = [*(recorded.times for recorded in layers), self._times.copy()]
        # Between two marks lie the routed experts and the shared expert of one layer, and the dense part of the next
        # one.
        gained = [later.since(earlier) for earlier, later in pairwise(marks)]
        dense = [marks[0].since(self._start_times).dense_ns, *(gain.dense_ns - gain.shared_ns for gain in gained)]
        # There are no logits of passes of several tokens, of models with an encoder, and where tokens alone decide.
        # There is no unimportance of one token, and of models with an encoder.
        logits, ahead = b"".join(layer.logits for layer in layers), tuple(layer.ahead for layer in layers)
        least = b"".join(values for layer in layers for values in layer.unimportance[:1])
        later_least = tuple(layer.unimportance[1:] for layer in layers)
        self._take(
            TracedPass(
                tokens=len(layers[0].chosen),
                chosen=tuple(tuple(recorded.chosen.reshape(-1).tolist()) for recorded in layers),
                advice=tuple(recorded.advice for recorded in layers),
                dense_ns=tuple(dense[:-1]),
                experts_ns=tuple(gain.experts_ns for gain in gained),
                shared_ns=tuple(gain.shared_ns for gain in gained),
                head_ns=dense[-1],
                elapsed_ns=time.perf_counter_ns() - self._started_ns,
                stall_ns=self._cache().stall_ns - self._stall_ns,
                first_layer=layers[0].index,
                scores=PassScores(logits, ahead) if logits else None,
                prompt_scores=PromptScores(least, ahead, later_least) if least else None,
            )
        )
        self.begin()
