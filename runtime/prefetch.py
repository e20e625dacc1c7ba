"""Predictors: which experts the next layer is likely to ask for. They advise; results never depend on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from moec.manifests.model import ModelSpec

from .bundle import Tables
from .modes.choice import PassChoice
from .norms import Norm
from .options import Prefetch, RuntimeOptions
from .routing import Router, stacked_logits

# Pairs seen less often than this say less than the expert before alone.
# Source: EdgeMoE, activation-path dictionary, in the pair form for top-k > 1.
MINIMUM_PAIR_COUNT = 8


@dataclass(slots=True)
class PassState:
    """What a predictor may look at while layer `layer` of a pass runs.

    hidden: [T, D] residual stream at the router's input; chosen: experts int32 [T, K] per layer run so far, as routed.
    tokens: int64 [T], None where a recorded pass is replayed. choice: what lossy modes make of the routers' choice.
    logits: float32 [T, E], of the running layer, None where it routes nothing. foreseen: of the layers ahead that were
    asked, the scores [E], nearest first.
    """

    layer: int
    hidden: np.ndarray
    chosen: list[np.ndarray]
    tokens: np.ndarray | None = None
    choice: PassChoice | None = None
    logits: np.ndarray | None = None
    foreseen: list[np.ndarray] = field(default_factory=list)

    def top_k(self, top_k: int) -> int:
        """Experts per token of this pass in a layer of so many."""
        return top_k if self.choice is None else self.choice.top_k(top_k)


class Predictor(Protocol):
    """Scores the experts of the layers after the running one."""

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        """[E] float64 of the layer so far ahead, likelier is higher; None: nothing to say."""

    def scores_ahead(self, state: PassState, aheads: Sequence[int]) -> list[np.ndarray | None]:
        """`scores` of several layers at once."""
        return [self.scores(state, ahead) for ahead in aheads]


@dataclass(frozen=True, slots=True)
class LayerAdvice:
    """Experts of one layer: read ahead, of these used before eviction; demanded, of these predicted."""

    layer: int
    read: int
    used: int
    demanded: int
    predicted: int

    @property
    def precision(self) -> float | None:
        """Share of the experts read ahead that were used."""
        return self.used / self.read if self.read else None

    @property
    def recall(self) -> float | None:
        """Share of the demanded experts that had been predicted."""
        return self.predicted / self.demanded if self.demanded else None

    def to_plain(self) -> dict[str, float | None]:
        """For `--json`."""
        return {**asdict(self), "precision": self.precision, "recall": self.recall}


@dataclass(slots=True)
class PrefetchQuality:
    """Per predicted layer: experts demanded, and of these the ones among the predicted top candidates."""

    demanded: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    predicted: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def observe(self, layer: int, predicted: set[int], demanded: Collection[int]) -> None:
        """Count one layer of one pass."""
        self.demanded[layer] += len(demanded)
        self.predicted[layer] += sum(expert in predicted for expert in demanded)

    def layers(self, first_expert: Sequence[int], prefetches: np.ndarray) -> list[LayerAdvice]:
        """What advice was worth, per layer. first_expert: [L + 1]; prefetches: int64 [2, experts], read and used."""
        found = []
        for layer, (start, end) in enumerate(pairwise(first_expert)):
            read, used = prefetches[:, start:end].sum(axis=1).tolist()
            found.append(LayerAdvice(layer, read, used, self.demanded[layer], self.predicted[layer]))
        return found

    @property
    def recall(self) -> float | None:
        """Share of demanded experts that had been predicted; None if nothing was predicted."""
        total = sum(self.demanded.values())
        return sum(self.predicted.values()) / total if total else None


class PopularityPredictor(Predictor):
    """The experts that calibration saw most often in the layer."""

    def __init__(self, tables: Tables, model: ModelSpec) -> None:
        self._popularity, self._model = tables.popularity.astype(np.float64), model

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        following: np.ndarray = self._popularity[self._model.layer_after(state.layer, ahead)]
        return following


class PathPredictor(Predictor):
    """EdgeMoE's dictionary: the experts of two layers predict those of the next, with back-off.

    Only layers that route count. score(e) sums over pairs (a two layers back, b one layer back) the counts of e; pairs
    seen fewer than MINIMUM_PAIR_COUNT times fall back to b alone, then to popularity.
    Source: EdgeMoE, activation-path dictionary.
    """

    def __init__(self, tables: Tables, model: ModelSpec) -> None:
        self._tables, self._model = tables, model
        self._popularity = PopularityPredictor(tables, model)
        self._rows = {tuple(key): row for row, key in enumerate(tables.path_keys.tolist())}

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        following, routed = self._model.layer_after(state.layer, ahead), self._model.expert_layers
        start = self._model.first_decoder_layer if following >= self._model.first_decoder_layer else 0
        past = [layer for layer in routed if start <= layer <= state.layer]
        if following <= state.layer or not past:  # the next token's first, or nothing behind it
            return self._popularity.scores(state, ahead)
        if any(state.layer < layer < following for layer in routed):
            return None
        total = np.zeros(self._tables.popularity.shape[1])
        for token in range(len(state.chosen[past[-1]])):
            before = state.chosen[past[-2]][token].tolist() if len(past) > 1 else []
            total += self._token_scores(following, before, past[-1], state.chosen[past[-1]][token].tolist())
        return total if total.any() else self._popularity.scores(state, ahead)

    def _token_scores(self, following: int, before: list[int], layer: int, chosen: list[int]) -> np.ndarray:
        """Of the experts of layer `following`, for one token that chose these in `layer` and those before it."""
        tables = self._tables
        scores = np.zeros(tables.popularity.shape[1])
        for last in chosen:
            for first in before:
                row = self._rows.get((following, first, last))
                if row is None:
                    continue
                part = slice(tables.path_offsets[row], tables.path_offsets[row + 1])
                counts = tables.path_counts[part].astype(np.float64)
                if counts.sum() >= MINIMUM_PAIR_COUNT:
                    scores[tables.path_experts[part]] += counts / counts.sum()
        if not scores.any():
            for last in chosen:
                counts = tables.transitions[layer, last].astype(np.float64)
                scores += counts / max(counts.sum(), 1)
        return scores


class LookaheadPredictor(Predictor):
    """The routers of later layers, applied to this layer's residual stream. Source: HOBBIT, layer-level prediction.

    Each reads it through its own layer's norm; all that are asked are one product. The last layer has no next router to
    ask; there popularity speaks for the first layer of the next token.
    """

    def __init__(self, tables: Tables, model: ModelSpec, norms: list[Norm], routers: list[Router | None]) -> None:
        self._model, self._norms, self._routers = model, norms, routers
        self._fallback = PopularityPredictor(tables, model)

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        return self.scores_ahead(state, [ahead])[0]

    def scores_ahead(self, state: PassState, aheads: Sequence[int]) -> list[np.ndarray | None]:
        routers = {ahead: router for ahead in aheads if (router := self._router(state.layer, ahead)) is not None}
        layers = [self._model.layer_after(state.layer, ahead) for ahead in routers]
        logits = stacked_logits(list(routers.values()), [self._norms[layer](state.hidden) for layer in layers])
        found = {ahead: routers[ahead].rule.demand(own) for ahead, own in zip(routers, logits, strict=True)}
        return [found[ahead] if ahead in found else self._fallback.scores(state, ahead) for ahead in aheads]

    def _router(self, layer: int, ahead: int) -> Router | None:
        """Of the layer so far ahead; None where none can be asked."""
        following, first = self._model.layer_after(layer, ahead), self._model.first_decoder_layer
        if following <= layer or layer < first <= following:  # an encoder's stream says nothing to a decoder
            return None
        return self._routers[following]


def make_predictor(
    kind: Prefetch,
    tables: Tables,
    model: ModelSpec,
    norms: list[Norm],
    routers: list[Router | None],
) -> Predictor | None:
    """The predictor of an option; None for `off`."""
    if kind == "lookahead":
        return LookaheadPredictor(tables, model, norms, routers)
    return table_predictor(kind, tables, model)


def advised_experts(top_k: int, ahead: int, nearest: int = 0) -> int:
    """Experts worth reading ahead per token: 3/8 of what it will choose one layer ahead, 1/4 two layers, 1/6 three.

    nearest: so many one layer ahead instead. More is wrong too often to be worth its bytes (docs/experiments.md,
    Prefetching).
    """
    return (nearest or -(-3 * top_k // 8)) if ahead == 1 else top_k // (2 * ahead)


def candidates(scores: np.ndarray, count: int) -> np.ndarray:
    """The likeliest first, at most `count`. Ties: lowest index."""
    return np.argsort(-scores, kind="stable")[:count]


@dataclass(frozen=True, slots=True)
class _Following:
    """A layer that routes behind a running one: how far ahead, the rank-th of those, and its experts."""

    ahead: int
    rank: int
    layer: int
    count: int
    top_k: int


@dataclass(slots=True)
class Advisor:
    """Turns a predictor's scores into experts to read ahead. first_expert: [L + 1] offsets over all layers.

    layers: how many of those that route it looks ahead. experts: of the next one, per token; 0: three eighths of the
    top-k. stops_at_miss: for a single token it looks no further than the first layer that lacks an expert by `holds`,
    which is asked for stored ones, and at one expert of every layer at least (HOBBIT, layer-level prediction).
    static: of layers whose experts follow from the token, RoutingRule.static; these are known, not predicted.
    """

    spec: ModelSpec
    first_expert: Sequence[int]
    predictor: Predictor | None = None
    layers: int = 2
    experts: int = 0
    stops_at_miss: bool = False
    holds: Callable[[int], bool] = lambda index: False
    static: Mapping[int, np.ndarray] = field(default_factory=dict)
    _followings: list[list[_Following]] = field(init=False)

    def __post_init__(self) -> None:
        self._followings = [self._behind(layer) for layer in range(self.spec.num_layers)]

    def _behind(self, running: int) -> list[_Following]:
        found = []
        for rank, ahead in enumerate(routed_ahead(self.spec, running), 1):
            layer = self.spec.layer_after(running, ahead)
            experts = self.spec.layers[layer].experts
            found.append(_Following(ahead, rank, layer, experts.count, experts.top_k))
        return found

    def set_options(self, options: RuntimeOptions, holds: Callable[[int], bool]) -> None:
        """How far, how much and by which rule it looks ahead. holds: whether a stored expert need not be read."""
        self.layers, self.experts = options.prefetch_layers, options.prefetch_experts
        self.stops_at_miss, self.holds = options.prefetch_rule == "first-miss", holds

    def advise(self, state: PassState) -> tuple[np.ndarray | None, list[int]]:
        """The candidates predicted for the next layer that routes, and experts to read ahead, the furthest layer last.

        More than one layer only for a single token: many tokens ask for most experts of the next layer already.
        """
        nearest, advice = None, list[int]()
        depth = max(self.layers, 1) if len(state.hidden) == 1 else 1
        followings = self._followings[state.layer][:depth]
        scores = self._scores(state, followings)
        state.foreseen = list(scores.values())
        for following in followings:
            experts, stored = self._predict(state, following, scores.get(following.ahead))
            nearest = experts if following.rank == 1 else nearest
            advice += stored
            if self.stops_at_miss and not all(self.holds(index) for index in stored):
                break
        return nearest, advice

    def preload(self, tokens: np.ndarray, layers: range) -> list[int]:
        """Experts that the first of these layers will ask for, known before any of them runs; none without a predictor.

        tokens: int64 [T], of the pass.
        """
        routed = [layer for layer in self.spec.expert_layers if layer in layers][: max(self.layers, 1)]
        known = [layer for layer in routed if layer in self.static] if self.predictor is not None else []
        return [
            expert for layer in known for expert in (self._known(layer, tokens) + self.first_expert[layer]).tolist()
        ]

    def _known(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        """The experts of a layer that tokens have by themselves, each once."""
        return np.unique(self.static[layer][tokens])

    def _scores(self, state: PassState, followings: Sequence[_Following]) -> dict[int, np.ndarray]:
        """By how far ahead, [E] of the layers of which experts would be advised and there is something to say."""
        if self.predictor is None:
            return {}
        asked = [each for each in followings if not self._is_known(state, each) and self._advised(state, each)]
        if not asked:
            return {}
        found = self.predictor.scores_ahead(state, [each.ahead for each in asked])
        # Tables are as wide as the largest layer.
        return {each.ahead: own[: each.count] for each, own in zip(asked, found, strict=True) if own is not None}

    def _is_known(self, state: PassState, following: _Following) -> bool:
        """Whether the tokens themselves name the layer's experts: not of the next token's."""
        is_of_token = following.layer > state.layer >= self.spec.first_decoder_layer
        return state.tokens is not None and is_of_token and following.layer in self.static

    def _advised(self, state: PassState, following: _Following) -> int:
        """Experts of the layer per token that are worth reading ahead."""
        count = advised_experts(state.top_k(following.top_k), following.rank, self.experts)
        return max(count, 1) if self.stops_at_miss else count

    def _predict(
        self, state: PassState, following: _Following, scores: np.ndarray | None
    ) -> tuple[np.ndarray | None, list[int]]:
        """Candidates of the layer, and what is stored of them."""
        layer = following.layer
        if self.predictor is not None and state.tokens is not None and self._is_known(state, following):
            known = self._known(layer, state.tokens)
            return known, (known + self.first_expert[layer]).tolist()
        if scores is None:
            return None, []
        top_k = state.top_k(following.top_k)
        experts = candidates(scores, len(state.hidden) * self._advised(state, following))
        if state.choice is not None and len(state.hidden) == 1:
            return experts, state.choice.advised(layer, scores, experts, top_k)
        return experts, (experts + self.first_expert[layer]).tolist()


def routed_ahead(model: ModelSpec, layer: int) -> list[int]:
    """How far ahead the layers behind this one lie that route; behind the last of them, the next token's first."""
    ahead = [following - layer for following in model.expert_layers if following > layer]
    decoder = [following for following in model.expert_layers if following >= model.first_decoder_layer]
    return ahead or [model.num_layers - layer + following - model.first_decoder_layer for following in decoder[:1]]


def table_predictor(kind: Prefetch, tables: Tables, model: ModelSpec) -> Predictor | None:
    """The predictors that a trace alone can feed; None for `off`. Raises KeyError for `lookahead`."""
    makers: dict[str, Callable[[Tables, ModelSpec], Predictor | None]] = {
        "path": PathPredictor,
        "popularity": PopularityPredictor,
        "off": lambda tables, model: None,
    }
    return makers[kind](tables, model)
