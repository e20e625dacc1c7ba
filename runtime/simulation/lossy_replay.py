"""Decide a recorded run again under lossy modes, with the code that decides in a run.

`LossyDecoder`, `PassChoice`, `LogicalCache` and `Advisor` are those of the runtime. The trace replaces the arithmetic.
Router logits are those of the recorded, lossless run. The confidence of the little model was recorded with them.
Decisions differ from those of a lossy run as far as its hidden states differ from the lossless ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.model import ModelSpec

from ..layers.routing import Router
from ..model.expert_requests import choose_experts
from ..modes.choice import ModeCounts, PassChoice, Versions
from ..modes.decoder import LossyDecoder, MakeChoice
from ..modes.logical_cache import LogicalCache
from ..options.lossy import BigLittle, LossyModes
from ..prefetch.advisor import Advisor, routed_ahead
from ..prefetch.pass_state import PassState
from ..prefetch.predictors import Predictor
from ..trace.trace import PassScores, Trace, TracedPass, TraceHeader
from ..trace.trace_scores import as_floats, layer_logits
from .timeline import Advice, TimedPass, timed_pass

_ONE = (0,)


class RecordedPredictor(Predictor):
    """Predicts with the scores of lookahead that were recorded."""

    def __init__(self, model: ModelSpec) -> None:
        self._model, self.recorded = model, tuple[tuple[bytes, ...], ...]()

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        by_rank = self.recorded[state.layer] if self.recorded else ()
        rank = routed_ahead(self._model, state.layer).index(ahead)
        return as_floats(by_rank[rank]) if rank < len(by_rank) else None


@dataclass(slots=True)
class TracedModel:
    """The model of a LossyDecoder. It computes nothing, routes as recorded, and keeps the requests.

    first_expert: offset of each layer's experts among all stored experts, [L + 1].
    sizes: bytes of all stored experts, int64 [N].

    advisor: chooses the experts to read ahead.
    unread: cache that no mode reads. It receives all requests, because the advisor reads it.

    passes: passes of the current token, in the form of a timeline.
    """

    spec: ModelSpec
    first_expert: Sequence[int]
    sizes: np.ndarray
    advisor: Advisor
    unread: LogicalCache | None = None
    passes: list[TimedPass] = field(default_factory=list)
    _routers: list[Router | None] = field(init=False)
    _preload: tuple[int, ...] = ()
    _recorded: TracedPass = field(init=False)
    _scores: PassScores = field(init=False)

    def __post_init__(self) -> None:
        self._routers = []
        for layer, first in zip(self.spec.layers, self.first_expert, strict=False):
            count = layer.experts.count
            pruned = np.flatnonzero(self.sizes[first : first + count] == 0).tolist()
            self._routers.append(Router(layer.experts, None, None, pruned) if count else None)

    def begin(self, recorded: TracedPass, scores: PassScores) -> None:
        """Take this pass as the next token."""
        self._recorded, self._scores, self.passes = recorded, scores, []

    def routers(self) -> list[Router | None]:
        """Return routers with rules and without matrices."""
        return self._routers

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Return zeros. The decoder takes the confidence from the trace."""
        return np.zeros((len(hidden), 1), np.float32)

    def prefetch(self, experts: Sequence[int]) -> None:
        """Read experts ahead before the next pass."""
        self._preload = tuple(experts)
        if self.unread is not None:
            self.unread.advise(experts)

    def run(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], choice: PassChoice
    ) -> np.ndarray:
        """Run one pass over the current token: request the experts of each layer under the choice.

        Returns zeros in place of hidden states, float32 [1, 1].
        """
        layers = self.spec.layers
        is_little = any(choice.top_k(layer.experts.top_k) < layer.experts.top_k for layer in layers)
        counts = [layer.experts.count for layer in layers]
        logits = layer_logits(self._scores.little_logits if is_little else self._scores.logits, counts)
        state = PassState(0, np.empty((1, 0), np.float32), [], choice=choice)
        accesses, advice, experts_ns = [], [], []
        for layer, router in enumerate(self._routers):
            state.layer, requested = layer, list[int]()
            if router is None:
                state.chosen.append(np.empty((1, 0), np.int32))
            else:
                first = self.first_expert[layer]
                by_expert, _ = choose_experts(state, layers[layer].experts, first, router.rule, logits[layer][None])
                requested = list(by_expert)
            _, ahead = self.advisor.advise(state)
            choice.requested(layer, requested, ahead)
            if self.unread is not None:
                self.unread.request(layer, requested, ahead)
            accesses.append((layer, tuple(requested)))
            advice.append(tuple(ahead))
            experts_ns.append(self._experts_ns(layer, requested))
        each = self._recorded
        self.passes.append(
            TimedPass(
                tokens=1,
                accesses=tuple(accesses),
                advice=tuple(advice),
                dense_ns=each.dense_ns,
                experts_ns=tuple(experts_ns),
                shared_ns=each.shared_ns,
                head_ns=each.head_ns,
                other_ns=each.other_ns,
                preload=self._preload,
            )
        )
        self._preload = ()
        return np.zeros((1, 1), np.float32)

    def _experts_ns(self, layer: int, requested: Sequence[int]) -> float:
        """Return the time of the requested experts, from that of the recorded ones, by bytes.

        A single token takes the time in which its weights are read from memory.
        """
        first = self.first_expert[layer]
        recorded = int(self.sizes[[first + expert for expert in self._recorded.chosen[layer]]].sum())
        return self._recorded.experts_ns[layer] * int(self.sizes[list(requested)].sum()) / max(recorded, 1)


class TracedDecoder(LossyDecoder):
    """Falls back where the little model was unsure during the recording."""

    confidence: float | None = None

    def is_unsure(self, logits: np.ndarray, gamma: float) -> np.ndarray:
        unsure: np.ndarray = np.array([self.confidence], np.float32) < gamma
        return unsure


def replay_modes(
    trace: Trace,
    modes: LossyModes,
    model: TracedModel,
    versions: Versions,
    cache: LogicalCache,
    advice: Advice,
    choices: MakeChoice = PassChoice,
) -> tuple[list[tuple[TimedPass, ...]], ModeCounts]:
    """Return the passes of a trace under lossy modes, grouped by token, and the decisions.

    The trace must have the scores that the modes need (`missing_scores`). It must route by scores (`check_modes`).
    cache: new logical cache of the simulated capacity.
    advice: advice during the prompt, in which nothing is decided.
    """
    decoder = TracedDecoder(modes, model, versions, cache if modes.reads_cache else None, choices)
    model.unread = None if modes.reads_cache else cache
    predictor, first = model.advisor.predictor, trace.header.first_expert
    steps: list[tuple[TimedPass, ...]] = []
    for number, each in enumerate(trace.passes):
        if number < trace.prompt_passes or each.scores is None:
            own = timed_pass(each, first, advice)
            for (layer, experts), ahead in zip(own.accesses, own.advice, strict=True):
                cache.request(layer, experts, ahead)
            steps.append((own,))
            continue
        if isinstance(predictor, RecordedPredictor):
            predictor.recorded = each.scores.ahead
        decoder.confidence = each.scores.confidence
        model.begin(each, each.scores)
        decoder.decode(model.run, _ONE, _ONE, _ONE)
        steps.append(tuple(model.passes))
    return steps, decoder.counts


def missing_scores(trace: Trace, modes: LossyModes) -> str | None:
    """Return the scores that these modes need and a trace lacks, for an error; None if it has all."""
    decoded = [each.scores for each in trace.passes[trace.prompt_passes :]]
    if any(scores is None for scores in decoded):
        return "the scores of routers"
    if modes.big_little is None:
        return None
    if any(scores is None or scores.confidence is None for scores in decoded):
        return "the confidence of the little model"
    if not _is_recorded(modes.big_little, trace.header):
        recorded = trace.header.little_experts or "half of each layer's"
        return f"a little model of this size: the recorded one has {recorded} experts"
    return None


def _is_recorded(little: BigLittle, header: TraceHeader) -> bool:
    """Return whether the trace's little model has the same number of experts in every layer."""
    recorded = BigLittle(little.gamma, header.little_experts)
    return all(little.little_top_k(top_k) == recorded.little_top_k(top_k) for top_k in header.top_k if top_k)
