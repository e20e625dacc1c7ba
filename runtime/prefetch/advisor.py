"""Turn the scores of a predictor into experts that are read ahead.

Exact results never depend on this advice. Under lossy modes it fills the logical cache, by which they decide.
A pass normally runs the native form, `look_ahead` in `native/experts/prefetch_advice.cpp`. This file is its
specification, and advises in passes in steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.model import ModelSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from .. import kernels
from ..options.runtime import PrefetchRule, RuntimeOptions
from .pass_state import PassState
from .predictors import Predictor
from .read_ahead_margins import LearnedThresholds

CHOICES_FOR_ALL = 8
"""Choices per expert from which a pass is assumed to need all experts: 64 tokens of eight out of 64 experts."""


def advised_experts(top_k: int, ahead: int, nearest: int = 0) -> int:
    """Return the experts worth reading ahead per token: 3/8 of top_k one layer ahead, 1/4 two layers, 1/6 three.

    nearest: if not 0, the number of experts one layer ahead.
    A larger number is wrong too often to be worth its bytes
    (docs/experiments/2026-11.md, 21: Prefetch one, then two layers ahead).
    """
    return (nearest or -(-3 * top_k // 8)) if ahead == 1 else top_k // (2 * ahead)


def candidates(scores: np.ndarray, count: int) -> list[int]:
    """Return the experts with the largest scores, at most `count`, best first. On ties the lowest index is first."""
    return kernels.largest(scores, count)[0]


@dataclass(frozen=True, slots=True)
class LayerAhead:
    """A layer that routes and runs after the running layer.

    ahead: distance from the running layer, in layers.
    rank: its place among the later layers that route, from 1.
    layer: its index.
    count: its experts.
    top_k: its experts per token.
    """

    ahead: int
    rank: int
    layer: int
    count: int
    top_k: int


def _asks_for_all(tokens: int, later: LayerAhead) -> bool:
    """Return whether this many tokens leave hardly any expert of a layer unused."""
    return tokens * later.top_k >= CHOICES_FOR_ALL * later.count


@dataclass(slots=True)
class Advisor:
    """Turns the scores of a predictor into experts to read ahead.

    first_expert: offset of each layer's experts among all experts, [L + 1].
    layers: number of later layers that are looked at. Layers without experts do not count.

    experts: if not 0, the number of experts of the next layer per token. Rule `likely` then equals `spread`.
    rule: how experts are chosen for a single token, see below.

    holds: returns whether a stored expert need not be read.
    static: experts of each token in layers where the token alone decides, RoutingRule.static. They are exact.

    Rule `likely` takes the experts whose margin reaches the learned threshold (LearnedThresholds).
    Rule `spread` takes a fixed share of top_k.
    Rule `first-miss` takes the same share, at least one, up to the first layer that misses an expert according to
    `holds`.
    Source of `first-miss`: HOBBIT, layer-level prediction.
    Rule `until-routed` takes all experts of the next layer. The cache drops those that are not read when the layer
    has chosen others.
    Source of `until-routed`: EdgeMoE, preloading of experts.
    """

    spec: ModelSpec
    first_expert: Sequence[int]
    predictor: Predictor | None = None
    layers: int = 2
    experts: int = 0
    rule: PrefetchRule = "likely"
    holds: Callable[[int], bool] = lambda index: False
    static: Mapping[int, np.ndarray] = field(default_factory=dict)
    thresholds: LearnedThresholds = field(default_factory=LearnedThresholds)
    foretold: Predictor | None = None
    """Predictor of a pass that is computed again, with all experts that a layer has per token."""
    _layers_ahead: list[list[LayerAhead]] = field(init=False)

    def __post_init__(self) -> None:
        self._layers_ahead = [self._layers_after(layer) for layer in range(self.spec.num_layers)]

    def _layers_after(self, running: int) -> list[LayerAhead]:
        layers_ahead = []
        for rank, ahead in enumerate(routed_ahead(self.spec, running), 1):
            layer = self.spec.layer_after(running, ahead)
            experts = self.spec.layers[layer].experts
            layers_ahead.append(LayerAhead(ahead, rank, layer, experts.count, experts.top_k))
        return layers_ahead

    def set_options(self, options: RuntimeOptions, holds: Callable[[int], bool]) -> None:
        """Set how far, how much and by which rule experts are read ahead.

        holds: returns whether a stored expert need not be read.
        """
        self.layers, self.experts = options.prefetch_layers, options.prefetch_experts
        self.rule, self.holds = options.prefetch_rule, holds

    def fixed_count(self, top_k: int, later: LayerAhead) -> int:
        """Return the experts of a later layer that are read ahead for a single token; -1 if thresholds are learned.

        top_k: experts of a token.
        """
        return -1 if self.rule == "likely" and not self.experts else self.count_for_each(top_k, later)

    def count_for_each(self, top_k: int, later: LayerAhead, nearest: int = 0) -> int:
        """Return the experts of a later layer that are read ahead for each of several tokens, at most all of them.

        top_k: experts of a token.
        nearest: if not 0, the number for the next layer.
        """
        if self.rule == "until-routed":
            return later.count
        count = advised_experts(top_k, later.rank, nearest or self.experts)
        return min(max(count, 1) if self.rule == "first-miss" else count, later.count)

    def most_predicted(self, top_k: int, later: LayerAhead) -> int:
        """Return the most advised experts of a layer that count as its prediction.

        Rule `until-routed` advises all experts, so its top_k counts.
        """
        return top_k if self.rule == "until-routed" else later.count

    def foretold_count(self, later: LayerAhead) -> int:
        """Return the experts of a later layer that are read ahead for each token that is computed again."""
        return self.count_for_each(later.top_k, later, nearest=max(layer.experts.top_k for layer in self.spec.layers))

    def layers_ahead(self, layer: int) -> list[LayerAhead]:
        """Return the layers that are looked at while a layer runs, nearest first."""
        return self._layers_ahead[layer][: 1 if self.rule == "until-routed" else max(self.layers, 1)]

    def advise(self, state: PassState) -> tuple[list[int] | None, list[int]]:
        """Return the candidates predicted for the next layer that routes, and the experts to read ahead.

        The experts of the furthest layer come last. Only a pass of one token, or one that needs nearly all experts,
        looks further than one layer.
        """
        nearest, advice = None, list[int]()
        self._learn(state)
        layers_ahead = [
            each
            for each in self.layers_ahead(state.layer)
            if each.rank == 1 or len(state.hidden) == 1 or _asks_for_all(len(state.hidden), each)
        ]
        state.unimportance_ahead.clear()
        scores = self._scores(state, layers_ahead)
        state.foreseen = list(scores.values())
        for later in layers_ahead:
            experts, stored = self._predict(state, later, scores.get(later.ahead))
            nearest = experts if later.rank == 1 else nearest
            advice += stored
            if self.rule == "first-miss" and not all(self.holds(index) for index in stored):
                break
        return nearest, advice

    def _learns(self, state: PassState) -> bool:
        """Return whether the learned thresholds decide what is read ahead."""
        is_learned = self.rule == "likely" and not self.experts and self.foretold is None
        return is_learned and len(state.hidden) == 1

    def _learn(self, state: PassState) -> None:
        """Compare the choices of the running layer with their prediction."""
        if not self._learns(state):
            self.thresholds.forget_guesses()
        elif self.predictor is not None:
            self.thresholds.observe(state.layer, state.chosen[state.layer][0].tolist())

    def preload(self, tokens: np.ndarray, layers: range) -> list[int]:
        """Return experts that the first layers of `layers` will need, known before any of them runs.

        Without a predictor there are none.
        tokens: tokens of the pass, int64 [T].
        """
        routed = [layer for layer in self.spec.expert_layers if layer in layers][: max(self.layers, 1)]
        known_layers = [layer for layer in routed if layer in self.static] if self.predictor is not None else []
        return [expert for layer in known_layers for expert in self._stored(layer, self._known(layer, tokens))]

    def _known(self, layer: int, tokens: np.ndarray) -> list[int]:
        """Return the experts of a layer that the tokens alone decide, each once."""
        return list(np.unique(self.static[layer][tokens]).tolist())

    def _scores(self, state: PassState, layers_ahead: Sequence[LayerAhead]) -> dict[int, np.ndarray]:
        """Return the scores [E] of the layers for which experts would be advised, by distance in layers.

        Layers without a prediction are missing.
        """
        predictor = self.predictor if self.foretold is None else self.foretold
        if predictor is None:
            return {}
        learns = self._learns(state)
        scored = [
            each for each in layers_ahead if not self._is_known(state, each) and (learns or self._advised(state, each))
        ]
        if not scored:
            return {}
        scores = predictor.scores_ahead(state, [each.ahead for each in scored])
        # Tables are as wide as the layer with the most experts.
        return {each.ahead: own[: each.count] for each, own in zip(scored, scores, strict=True) if own is not None}

    def _is_known(self, state: PassState, later: LayerAhead) -> bool:
        """Return whether the tokens alone decide the layer's experts. A layer of the next token does not count."""
        is_of_token = later.layer > state.layer >= self.spec.first_decoder_layer
        return state.tokens is not None and is_of_token and later.layer in self.static

    def _tokens_in(self, state: PassState, layer: int) -> int:
        """Return the number of tokens expected in a layer: those of the running pass, or of the next one.

        After a pass over a prompt of one sequence, the next pass has one token. After a pass of MAX_PASS_TOKENS more of
        the prompt may follow, so the next pass counts as equally long. Passes of several sequences are followed by
        passes of the same size. The first decoder pass after an encoder has one token of each sequence.
        """
        count = len(state.hidden)
        if state.layer < self.spec.first_decoder_layer <= layer:
            return min(count, state.sequences)
        is_after_prompt = layer <= state.layer and state.sequences == 1 and count < MAX_PASS_TOKENS
        return 1 if is_after_prompt else count

    def _advised(self, state: PassState, later: LayerAhead) -> int:
        """Return the number of experts of the layer that are worth reading ahead."""
        tokens = self._tokens_in(state, later.layer)
        if self.foretold is not None:
            return tokens * self.foretold_count(later)
        if tokens == 1 < len(state.hidden) and self.rule == "likely" and not self.experts:
            return 0  # after a prompt only popularity is known of the next token: 6 of 100 experts would be right
        return tokens * self.count_for_each(state.top_k(later.top_k), later)

    def _predict(
        self, state: PassState, later: LayerAhead, scores: np.ndarray | None
    ) -> tuple[list[int] | None, list[int]]:
        """Return the candidates of the layer, and their stored indices."""
        layer = later.layer
        if self.predictor is not None and state.tokens is not None and self._is_known(state, later):
            experts_of_tokens = self._known(layer, state.tokens)
            return experts_of_tokens, self._stored(layer, experts_of_tokens)
        if scores is None:
            return None, []
        top_k = state.top_k(later.top_k)
        if self._learns(state):
            experts = self.thresholds.likely(state.layer, layer, later.rank, scores, top_k)
        else:
            experts = candidates(scores, self._advised(state, later))
        predicted = experts[: self.most_predicted(top_k, later)]
        if state.choice is None:
            return predicted, self._stored(layer, experts)
        if len(state.hidden) == 1:
            return predicted, state.choice.advised(layer, scores, experts, top_k)
        return predicted, state.choice.advised_to_many(layer, state.unimportance_ahead.get(later.ahead), experts)

    def _stored(self, layer: int, experts: Sequence[int]) -> list[int]:
        first = self.first_expert[layer]
        return [first + expert for expert in experts]


def routed_ahead(model: ModelSpec, layer: int) -> list[int]:
    """Return how far ahead the layers lie that route after this one, in layers.

    After the last of them it is the distance to the first layer of the next token.
    """
    ahead = [later - layer for later in model.expert_layers if later > layer]
    decoder = [later for later in model.expert_layers if later >= model.first_decoder_layer]
    return ahead or [model.num_layers - layer + later - model.first_decoder_layer for later in decoder[:1]]
