"""From a predictor's scores to experts that are read ahead. They advise; results never depend on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moec.manifests.model import ModelSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from .. import kernels
from ..options.runtime import PrefetchRule, RuntimeOptions
from .margins import LearnedMargins
from .pass_state import PassState
from .predictors import Predictor

CHOICES_FOR_ALL = 8
"""Choices per expert from which on a pass is taken to ask for all of a layer: 64 tokens of eight out of 64 experts."""


def advised_experts(top_k: int, ahead: int, nearest: int = 0) -> int:
    """Experts worth reading ahead per token: 3/8 of what it will choose one layer ahead, 1/4 two layers, 1/6 three.

    nearest: so many one layer ahead instead. More is wrong too often to be worth its bytes (docs/experiments.md,
    Prefetching).
    """
    return (nearest or -(-3 * top_k // 8)) if ahead == 1 else top_k // (2 * ahead)


def candidates(scores: np.ndarray, count: int) -> list[int]:
    """The likeliest first, at most `count`. Ties: lowest index."""
    return kernels.largest(scores, count)[0]


@dataclass(frozen=True, slots=True)
class Following:
    """A layer that routes behind a running one: how far ahead, the rank-th of those, and its experts."""

    ahead: int
    rank: int
    layer: int
    count: int
    top_k: int


def _asks_for_all(tokens: int, following: Following) -> bool:
    """Whether so many tokens will hardly leave an expert of a layer out."""
    return tokens * following.top_k >= CHOICES_FOR_ALL * following.count


@dataclass(slots=True)
class Advisor:
    """Turns a predictor's scores into experts to read ahead. first_expert: [L + 1] offsets over all layers.

    layers: how many of those that route it looks ahead. rule: for a single token `likely` takes what LearnedMargins
    finds sure enough, `spread` a fixed share of the top-k, `first-miss` the same share, one at least, as far as the
    first layer that lacks an expert by `holds`, which is asked for stored ones (HOBBIT, layer-level prediction).
    experts: where not 0, so many of the next layer per token, and `likely` is `spread`.
    static: of layers whose experts follow from the token, RoutingRule.static; these are known, not predicted.
    """

    spec: ModelSpec
    first_expert: Sequence[int]
    predictor: Predictor | None = None
    layers: int = 2
    experts: int = 0
    rule: PrefetchRule = "likely"
    holds: Callable[[int], bool] = lambda index: False
    static: Mapping[int, np.ndarray] = field(default_factory=dict)
    margins: LearnedMargins = field(default_factory=LearnedMargins)
    _followings: list[list[Following]] = field(init=False)

    def __post_init__(self) -> None:
        self._followings = [self._behind(layer) for layer in range(self.spec.num_layers)]

    def _behind(self, running: int) -> list[Following]:
        found = []
        for rank, ahead in enumerate(routed_ahead(self.spec, running), 1):
            layer = self.spec.layer_after(running, ahead)
            experts = self.spec.layers[layer].experts
            found.append(Following(ahead, rank, layer, experts.count, experts.top_k))
        return found

    def set_options(self, options: RuntimeOptions, holds: Callable[[int], bool]) -> None:
        """How far, how much and by which rule it looks ahead. holds: whether a stored expert need not be read."""
        self.layers, self.experts = options.prefetch_layers, options.prefetch_experts
        self.rule, self.holds = options.prefetch_rule, holds

    def followings(self, layer: int) -> list[Following]:
        """What is looked at while a layer runs, nearest first."""
        return self._followings[layer][: max(self.layers, 1)]

    def advise(self, state: PassState) -> tuple[list[int] | None, list[int]]:
        """The candidates predicted for the next layer that routes, and experts to read ahead, the furthest layer last.

        More than one layer for a single token, or for so many that each layer will be asked for all it has.
        """
        nearest, advice = None, list[int]()
        self._learn(state)
        followings = [
            each
            for each in self.followings(state.layer)
            if each.rank == 1 or len(state.hidden) == 1 or _asks_for_all(len(state.hidden), each)
        ]
        scores = self._scores(state, followings)
        state.foreseen = list(scores.values())
        for following in followings:
            experts, stored = self._predict(state, following, scores.get(following.ahead))
            nearest = experts if following.rank == 1 else nearest
            advice += stored
            if self.rule == "first-miss" and not all(self.holds(index) for index in stored):
                break
        return nearest, advice

    def _learns(self, state: PassState) -> bool:
        """Whether what is read ahead goes by how sure predictions were before."""
        return self.rule == "likely" and not self.experts and len(state.hidden) == 1

    def _learn(self, state: PassState) -> None:
        """What the running layer chose, against what was predicted of it."""
        if not self._learns(state):
            self.margins.forget_guesses()
        elif self.predictor is not None:
            self.margins.observe(state.layer, state.chosen[state.layer][0].tolist())

    def preload(self, tokens: np.ndarray, layers: range) -> list[int]:
        """Experts that the first of these layers will ask for, known before any of them runs; none without a predictor.

        tokens: int64 [T], of the pass.
        """
        routed = [layer for layer in self.spec.expert_layers if layer in layers][: max(self.layers, 1)]
        known = [layer for layer in routed if layer in self.static] if self.predictor is not None else []
        return [expert for layer in known for expert in self._stored(layer, self._known(layer, tokens))]

    def _known(self, layer: int, tokens: np.ndarray) -> list[int]:
        """The experts of a layer that tokens have by themselves, each once."""
        return list(np.unique(self.static[layer][tokens]).tolist())

    def _scores(self, state: PassState, followings: Sequence[Following]) -> dict[int, np.ndarray]:
        """By how far ahead, [E] of the layers of which experts would be advised and there is something to say."""
        if self.predictor is None:
            return {}
        asks = self._learns(state)
        asked = [
            each for each in followings if not self._is_known(state, each) and (asks or self._advised(state, each))
        ]
        if not asked:
            return {}
        found = self.predictor.scores_ahead(state, [each.ahead for each in asked])
        # Tables are as wide as the largest layer.
        return {each.ahead: own[: each.count] for each, own in zip(asked, found, strict=True) if own is not None}

    def _is_known(self, state: PassState, following: Following) -> bool:
        """Whether the tokens themselves name the layer's experts: not of the next token's."""
        is_of_token = following.layer > state.layer >= self.spec.first_decoder_layer
        return state.tokens is not None and is_of_token and following.layer in self.static

    def _tokens_in(self, state: PassState, layer: int) -> int:
        """How many tokens are taken to come to a layer: those of the running pass, or of the next if it is one of its.

        Behind a prompt that is one, unless the pass was as long as any: then more of it. Passes of several sequences,
        evaluations and tokens side by side, are followed by their like; a decoder behind an encoder begins with a token
        of each.
        """
        count = len(state.hidden)
        if state.layer < self.spec.first_decoder_layer <= layer:
            return min(count, state.sequences)
        is_behind_prompt = layer <= state.layer and state.sequences == 1 and count < MAX_PASS_TOKENS
        return 1 if is_behind_prompt else count

    def _advised(self, state: PassState, following: Following) -> int:
        """Experts of the layer that are worth reading ahead."""
        tokens = self._tokens_in(state, following.layer)
        if tokens == 1 < len(state.hidden) and self.rule == "likely" and not self.experts:
            return 0  # behind a prompt nothing is known of the token but which experts are popular: right in 6 of 100
        count = advised_experts(state.top_k(following.top_k), following.rank, self.experts)
        return tokens * (max(count, 1) if self.rule == "first-miss" else count)

    def _predict(
        self, state: PassState, following: Following, scores: np.ndarray | None
    ) -> tuple[list[int] | None, list[int]]:
        """Candidates of the layer, and what is stored of them."""
        layer = following.layer
        if self.predictor is not None and state.tokens is not None and self._is_known(state, following):
            known = self._known(layer, state.tokens)
            return known, self._stored(layer, known)
        if scores is None:
            return None, []
        top_k = state.top_k(following.top_k)
        if self._learns(state):
            experts = self.margins.likely(state.layer, layer, following.rank, scores, top_k)
        else:
            experts = candidates(scores, self._advised(state, following))
        if state.choice is not None and len(state.hidden) == 1:
            return experts, state.choice.advised(layer, scores, experts, top_k)
        return experts, self._stored(layer, experts)

    def _stored(self, layer: int, experts: Sequence[int]) -> list[int]:
        first = self.first_expert[layer]
        return [first + expert for expert in experts]


def routed_ahead(model: ModelSpec, layer: int) -> list[int]:
    """How far ahead the layers behind this one lie that route; behind the last of them, the next token's first."""
    ahead = [following - layer for following in model.expert_layers if following > layer]
    decoder = [following for following in model.expert_layers if following >= model.first_decoder_layer]
    return ahead or [model.num_layers - layer + following - model.first_decoder_layer for following in decoder[:1]]
