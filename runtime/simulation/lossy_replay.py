"""Decide a recorded run again under lossy modes, with the code that decides in a run.

`LossyDecoder`, `PassChoice`, `LogicalCache` and `Advisor` are those of the runtime. The trace replaces the arithmetic.
Router logits are those of the recorded, exact run. The confidence of the little model was recorded with them.
Decisions differ from those of a lossy run as far as its hidden states differ from the exact ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.model import ModelSpec

from ..layers.routing import NO_EXPERT, Router, unimportance_by_expert
from ..model.expert_requests import choose_experts
from ..modes.decoder import LossyDecoder
from ..modes.expert_choice import PassChoice, Versions
from ..modes.logical_cache import LogicalCache
from ..modes.mode_counts import ModeCounts
from ..options.lossy import BigLittle, LossyModes
from ..prefetch.advisor import Advisor, routed_ahead
from ..prefetch.pass_state import PassState
from ..prefetch.predictors import Predictor
from ..trace.trace import PassScores, PromptScores, Trace, TracedPass
from ..trace.trace_scores import as_floats, layer_logits
from .timeline import Advice, TimedPass, timed_pass

_ONE = (0,)
_AHEAD = tuple[tuple[bytes, ...], ...]()


class RecordedPredictor(Predictor):
    """Predicts with the scores of lookahead that were recorded."""

    def __init__(self, model: ModelSpec) -> None:
        self._model = model
        self._scores, self._unimportance = _AHEAD, _AHEAD

    def begin(self, recorded: TracedPass) -> None:
        """Take the scores of this pass from now on. A pass without scores has no prediction."""
        self._scores, self._unimportance = _AHEAD, _AHEAD
        if recorded.scores is not None:
            self._scores = recorded.scores.ahead
        elif recorded.prompt_scores is not None:
            self._scores = recorded.prompt_scores.ahead
            self._unimportance = recorded.prompt_scores.ahead_unimportance

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        rank = routed_ahead(self._model, state.layer).index(ahead)
        foreseen = self._unimportance[state.layer] if self._unimportance else ()
        if rank < len(foreseen):
            state.unimportance_ahead[ahead] = as_floats(foreseen[rank])
        by_rank = self._scores[state.layer] if self._scores else ()
        return as_floats(by_rank[rank]) if rank < len(by_rank) else None


@dataclass(slots=True)
class _TimedLayers:
    """The layers of a pass in progress, as in TimedPass."""

    accesses: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    advice: list[tuple[int, ...]] = field(default_factory=list)
    experts_ns: list[float] = field(default_factory=list)
    loads: list[tuple[int, ...]] = field(default_factory=list)

    def add(
        self, layer: int, requested: Sequence[int], ahead: Sequence[int], experts_ns: float, loads: tuple[int, ...] = ()
    ) -> None:
        """Add the next layer. loads: tokens of each requested expert, if the pass has several tokens."""
        self.accesses.append((layer, tuple(requested)))
        self.advice.append(tuple(ahead))
        self.experts_ns.append(experts_ns)
        self.loads.append(loads)

    def timed_pass(self, recorded: TracedPass, preload: tuple[int, ...] = ()) -> TimedPass:
        """Return the pass. Times outside experts are the recorded ones."""
        return TimedPass(
            tokens=recorded.tokens,
            accesses=tuple(self.accesses),
            advice=tuple(self.advice),
            dense_ns=recorded.dense_ns,
            experts_ns=tuple(self.experts_ns),
            shared_ns=recorded.shared_ns,
            head_ns=recorded.head_ns,
            other_ns=recorded.other_ns,
            preload=preload,
            loads=() if recorded.tokens == 1 else tuple(self.loads),
        )


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
        logits = layer_logits(self._scores.little_logits if is_little else self._scores.logits, self._counts)
        state, timed = PassState(0, np.empty((1, 0), np.float32), [], choice=choice), _TimedLayers()
        for layer, router in enumerate(self._routers):
            state.layer, requested = layer, list[int]()
            if router is None:
                state.chosen.append(np.empty((1, 0), np.int32))
            else:
                first = self.first_expert[layer]
                by_expert, _ = choose_experts(state, layers[layer].experts, first, router.rule, logits[layer][None])
                requested = list(by_expert)
            timed.add(layer, requested, self._request(state, choice, requested), self._experts_ns(layer, requested))
        self.passes.append(timed.timed_pass(self._recorded, self._preload))
        self._preload = ()
        return np.zeros((1, 1), np.float32)

    def run_prompt(self, recorded: TracedPass, scores: PromptScores, choice: PassChoice) -> TimedPass:
        """Run one pass over several tokens of a prompt: request the version of each expert under dynamic precision.

        choice: the choice for prompts. Raises ValueError if dynamic precision is off.
        """
        tokens, timed = recorded.tokens, _TimedLayers()
        state = PassState(0, np.empty((tokens, 0), np.float32), [], choice=choice)
        for layer, least in enumerate(layer_logits(scores.unimportance, self._counts)):
            chosen = recorded.chosen[layer]
            state.layer = layer
            state.chosen.append(np.array(chosen, np.int32).reshape(tokens, -1))
            versions = choice.prompt_versions(layer, unimportance_by_expert(least))
            taken = sorted(version for version in versions.values() if version != NO_EXPERT)
            requested = [choice.index(layer, version) for version in taken]
            outputs = Counter(chosen)
            loads = tuple(outputs[version % len(least)] for version in taken)
            experts_ns = recorded.experts_ns[layer] * sum(loads) / max(len(chosen), 1)
            timed.add(layer, requested, self._request(state, choice, requested), experts_ns, loads)
        return timed.timed_pass(recorded)

    def _request(self, state: PassState, choice: PassChoice, requested: Sequence[int]) -> list[int]:
        """Request stored experts for the running layer. Returns the experts that are read ahead after them."""
        _, ahead = self.advisor.advise(state)
        choice.requested(state.layer, requested, ahead)
        if self.unread is not None:
            self.unread.request(state.layer, requested, ahead)
        return ahead

    @property
    def _counts(self) -> list[int]:
        return [layer.experts.count for layer in self.spec.layers]

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
) -> tuple[list[tuple[TimedPass, ...]], ModeCounts]:
    """Return the passes of a trace under lossy modes, grouped by token, and the decisions.

    The trace must have the scores that the modes need (`missing_scores`). It must route by scores (`check_modes`).
    cache: new logical cache of the simulated capacity.
    advice: advice during a prompt in which nothing is decided: without dynamic precision, and without its scores.
    """
    decoder = TracedDecoder(modes, model, versions, cache if modes.reads_cache else None)
    model.unread = None if modes.reads_cache else cache
    predictor, first = model.advisor.predictor, trace.header.first_expert
    steps: list[tuple[TimedPass, ...]] = []
    for number, recorded in enumerate(trace.passes):
        is_prompt = number < trace.prompt_passes
        decides = not is_prompt or modes.dynamic_precision is not None
        if isinstance(predictor, RecordedPredictor):
            predictor.begin(recorded)
        if decides and recorded.scores is not None:
            decoder.confidence = recorded.scores.confidence
            model.begin(recorded, recorded.scores)
            if is_prompt:
                model.run(_ONE, _ONE, _ONE, decoder.prefill)
            else:
                decoder.decode(model.run, _ONE, _ONE, _ONE)
            steps.append(tuple(model.passes))
        elif decides and recorded.prompt_scores is not None:
            steps.append((model.run_prompt(recorded, recorded.prompt_scores, decoder.prefill),))
        else:
            as_recorded = timed_pass(recorded, first, advice)
            for (layer, experts), ahead in zip(as_recorded.accesses, as_recorded.advice, strict=True):
                cache.request(layer, experts, ahead)
            steps.append((as_recorded,))
    return steps, decoder.counts


def missing_scores(trace: Trace, modes: LossyModes) -> str | None:
    """Return the scores that these modes need and a trace lacks, for an error; None if it has all."""
    decoded = [recorded_pass.scores for recorded_pass in trace.passes[trace.prompt_passes :]]
    if any(scores is None for scores in decoded):
        return "the scores of routers"
    if modes.big_little is None:
        return None
    if any(scores is None or scores.confidence is None for scores in decoded):
        return "the confidence of the little model"
    little, top_ks = BigLittle(modes.big_little.gamma, trace.header.little_experts), set(trace.header.top_k) - {0}
    if any(modes.big_little.little_top_k(top_k) != little.little_top_k(top_k) for top_k in top_ks):
        recorded = trace.header.little_experts or "half of each layer's"
        return f"a little model of this size: the recorded one has {recorded} experts"
    return None
