"""Predictors of the experts that the layers after the running one will request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from moec.manifests.model import ModelSpec

from ..bundle.tables import Tables
from ..layers.norms import Norm
from ..layers.routing import Router, RouterStack, RoutingRule, least_unimportance, stack_routers
from ..options.runtime import Prefetch
from .pass_state import PassState

# Pairs seen less often than this predict worse than the last layer's expert alone.
# Source: EdgeMoE, activation-path dictionary, in the pair form for top-k > 1.
MINIMUM_PAIR_COUNT = 8


class Predictor(Protocol):
    """Scores the experts of the layers after the running one."""

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        """Return a score for each expert of the layer `ahead` layers ahead, or None without a prediction.

        Scores are floats [E], not negative; a likelier expert has a higher score.
        """

    def scores_ahead(self, state: PassState, aheads: Sequence[int]) -> list[np.ndarray | None]:
        """Return `scores` of several layers."""
        return [self.scores(state, ahead) for ahead in aheads]

    def fixed_scores(self, layer: int, ahead: int) -> np.ndarray | None:
        """Return the scores [E] of the layer `ahead` layers after `layer` if no token changes them, else None."""
        return None


def foresee_unimportance(state: PassState, model: ModelSpec, ahead: int, rule: RoutingRule, logits: np.ndarray) -> None:
    """Store the least unimportance of the experts of a later layer, if someone reads it.

    logits: predicted router logits of the layer `ahead` layers ahead, float32 [T, E].
    """
    if state.asks_for_unimportance and rule.static is None:
        top_k = model.layers[model.layer_after(state.layer, ahead)].experts.top_k
        chosen, weights = rule.route(logits, top_k=state.top_k(top_k))
        state.unimportance_ahead[ahead] = least_unimportance(chosen, weights, logits.shape[1])


class PopularityPredictor(Predictor):
    """Predicts the experts that were chosen most often in the layer during calibration."""

    def __init__(self, tables: Tables, model: ModelSpec) -> None:
        self._popularity, self._model = tables.popularity.astype(np.float64), model

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        return self.of_layer(self._model.layer_after(state.layer, ahead))

    def fixed_scores(self, layer: int, ahead: int) -> np.ndarray | None:
        return self.of_layer(self._model.layer_after(layer, ahead))

    def of_layer(self, layer: int) -> np.ndarray:
        """Return the popularity counts of a layer, float64 [E]."""
        counts: np.ndarray = self._popularity[layer]
        return counts


class PathPredictor(Predictor):
    """Predicts the experts of a layer from those of the two layers before it: the dictionary of EdgeMoE.

    Only layers that route count. score(e) sums the share of e in the counts of each pair (a two layers back, b one
    layer back). In the exact-set form it is the share of e in the counts of both sets. Keys seen fewer than
    MINIMUM_PAIR_COUNT times are left out. Without a key b alone predicts, without b popularity.
    Source: EdgeMoE, activation-path dictionary.
    """

    def __init__(self, tables: Tables, model: ModelSpec) -> None:
        if tables.paths is None:
            raise ValueError("the path dictionary was not read")
        self.paths, self._model = tables.paths, model
        self._popularity, self._experts = PopularityPredictor(tables, model), tables.popularity.shape[1]

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        past, following = self.source_layers(state.layer, ahead), self._model.layer_after(state.layer, ahead)
        if not past:
            return self._popularity.scores(state, ahead)
        if not self.is_next(state.layer, ahead):
            return None
        total = np.zeros(self._experts)
        for token in range(len(state.chosen[past[-1]])):
            before = state.chosen[past[-2]][token].tolist() if len(past) > 1 else []
            total += self._token_scores(following, before, past[-1], state.chosen[past[-1]][token].tolist())
        return total if total.any() else self._popularity.scores(state, ahead)

    def fixed_scores(self, layer: int, ahead: int) -> np.ndarray | None:
        return None if self.source_layers(layer, ahead) else self.popularity(layer, ahead)

    def popularity(self, layer: int, ahead: int) -> np.ndarray:
        """Return the scores [E] of a layer while no path of the token is known."""
        return self._popularity.of_layer(self._model.layer_after(layer, ahead))

    def source_layers(self, layer: int, ahead: int) -> list[int]:
        """Return the layers whose experts predict a later layer: at most two, the nearest last.

        layer, ahead: running layer, and distance of the later one.
        There are none for the first layer of the next token, and if no earlier layer routes.
        """
        following, first = self._model.layer_after(layer, ahead), self._model.first_decoder_layer
        if following <= layer:
            return []
        start = first if following >= first else 0
        return [earlier for earlier in self._model.expert_layers if start <= earlier <= layer][-2:]

    def is_next(self, layer: int, ahead: int) -> bool:
        """Return whether no layer routes between `layer` and the layer `ahead` layers after it."""
        following = self._model.layer_after(layer, ahead)
        return not any(layer < between < following for between in self._model.expert_layers)

    def _token_scores(self, following: int, before: list[int], layer: int, chosen: list[int]) -> np.ndarray:
        """Return scores of the experts of layer `following` for one token.

        before: experts that the token chose in the layer before `layer`.
        chosen: experts that it chose in `layer`.
        """
        paths = self.paths
        scores = np.zeros(self._experts)
        for row in paths.rows(following, before, chosen):
            successors = slice(paths.offsets[row], paths.offsets[row + 1])
            counts = paths.counts[successors].astype(np.float64)
            if counts.sum() >= MINIMUM_PAIR_COUNT:
                scores[paths.experts[successors]] += counts / counts.sum()
        if not scores.any():
            for last in chosen:
                counts = paths.transitions[layer, last].astype(np.float64)
                scores += counts / max(counts.sum(), 1)
        return scores


class LookaheadPredictor(Predictor):
    """Predicts with the routers of later layers, applied to this layer's residual stream.

    Each router reads the stream through the norm of its own layer. A router that the compile learned takes its place:
    it reads the stream through the norm of the running layer. After the last layer there is no next router.
    There popularity predicts the first layer of the next token.
    Source: HOBBIT, layer-level prediction.

    learned: routers by running layer and distance.
    """

    def __init__(
        self,
        tables: Tables,
        model: ModelSpec,
        norms: list[Norm],
        routers: list[Router | None],
        learned: Mapping[tuple[int, int], Router] | None = None,
    ) -> None:
        self._model, self._norms, self._routers, self._learned = model, norms, routers, learned or {}
        self._fallback = PopularityPredictor(tables, model)
        self._asked: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._stacks: dict[tuple[int, tuple[int, ...]], RouterStack | None] = {}

    def scores(self, state: PassState, ahead: int = 1) -> np.ndarray | None:
        return self.scores_ahead(state, [ahead])[0]

    def scores_ahead(self, state: PassState, aheads: Sequence[int]) -> list[np.ndarray | None]:
        key = (state.layer, tuple(aheads))
        usable = self._asked.get(key)  # equal for every token
        if usable is None:
            usable = tuple(ahead for ahead in aheads if self.router_ahead(state.layer, ahead) is not None)
            self._asked[key] = usable
        scores = dict(zip(usable, self._demands(state, usable), strict=True))
        return [scores[ahead] if ahead in scores else self._fallback.scores(state, ahead) for ahead in aheads]

    def _demands(self, state: PassState, aheads: tuple[int, ...]) -> Iterable[np.ndarray]:
        """Return the scores of the routers of several layers.

        For one token a stack computes them in one call. Otherwise the routers run one after the other.
        """
        key = (state.layer, aheads)
        if key not in self._stacks:
            sources = [source for ahead in aheads if (source := self.source(state.layer, ahead)) is not None]
            self._stacks[key] = stack_routers([router for router, _ in sources], [norm for _, norm in sources])
        stack = self._stacks[key]
        if stack is not None and len(state.hidden) == 1:
            return stack.shares(state.hidden)
        scores = []
        for ahead in aheads:
            source = self.source(state.layer, ahead)
            if source is None:
                raise ValueError(f"no router predicts the layer {ahead} layers after layer {state.layer}")
            router, norm = source
            logits = router.logits(norm(state.hidden))
            foresee_unimportance(state, self._model, ahead, router.rule, logits)
            scores.append(router.rule.demand(logits))
        return scores

    def source(self, layer: int, ahead: int) -> tuple[Router, Norm] | None:
        """Return the router that predicts the layer `ahead` layers ahead, and the norm before it; None without one."""
        router, following = self.router_ahead(layer, ahead), self._model.layer_after(layer, ahead)
        if router is None:
            return None
        learned = self._learned.get((layer, ahead))
        return (router, self._norms[following]) if learned is None else (learned, self._norms[layer])

    def fixed_scores(self, layer: int, ahead: int) -> np.ndarray | None:
        return None if self.router_ahead(layer, ahead) is not None else self._fallback.fixed_scores(layer, ahead)

    def router_ahead(self, layer: int, ahead: int) -> Router | None:
        """Return the router of the layer `ahead` layers ahead, or None if it is not usable."""
        following, first = self._model.layer_after(layer, ahead), self._model.first_decoder_layer
        if following <= layer or layer < first <= following:  # the stream of an encoder predicts nothing in a decoder
            return None
        return self._routers[following]


def make_predictor(
    kind: Prefetch,
    tables: Tables,
    model: ModelSpec,
    norms: list[Norm],
    routers: list[Router | None],
    learned: Mapping[tuple[int, int], Router] | None = None,
) -> Predictor | None:
    """Return the predictor of an option, or None for `off`. learned: routers that a compile learned."""
    if kind == "lookahead":
        return LookaheadPredictor(tables, model, norms, routers, learned)
    return table_predictor(kind, tables, model)


def table_predictor(kind: Prefetch, tables: Tables, model: ModelSpec) -> Predictor | None:
    """Return a predictor that a trace alone can feed, or None for `off`. Raises KeyError for `lookahead`."""
    makers: dict[str, Callable[[Tables, ModelSpec], Predictor | None]] = {
        "path": PathPredictor,
        "popularity": PopularityPredictor,
        "off": lambda tables, model: None,
    }
    return makers[kind](tables, model)
