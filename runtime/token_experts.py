"""The experts of a layer for a token alone, in one call of the extension.

It decides, computes and adds what Model does step by step for everything else, to the bit; where a model, its cache or
its advice is of another kind than the extension knows, there is none, and Model's steps serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moec.manifests.model import ModelSpec

from . import kernels
from .native_cache import NativeCache
from .norms import Norm
from .predictors import LookaheadPredictor, Predictor
from .prefetch import Advisor, Following
from .prefetch_margins import RULES
from .prefetch_quality import PrefetchQuality
from .routing import Router
from .statistics import PhaseTimes
from .streaming_cache import StreamingCache
from .trace import TraceRecorder

MAX_ROUTERS = 8
"""That the extension asks at once."""


class TokenExperts:
    """Layers of one model, bound to its cache. Raises ValueError where their shapes do not fit each other."""

    def __init__(
        self,
        spec: ModelSpec,
        cache: NativeCache,
        experts: Sequence[Any],
        norms: Sequence[Norm],
        routers: Sequence[Router],
        advisor: Advisor,
    ) -> None:
        self._cache, self._predictor, self._spec, self._advisor = cache, advisor.predictor, spec, advisor
        self._norms = norms
        layers = [self._fields(at, experts, routers[at]) for at in range(spec.num_layers)]
        self._native = cache.bind_layers(layers, norms[0].eps, RULES)

    def fits(self, predictor: Predictor | None) -> bool:
        """Whether they look ahead as this predictor does."""
        return predictor is self._predictor

    def begin(self) -> None:
        """A token's pass begins. Raises ExecutionError after a fork, or with other kernels than the cache has."""
        self._cache.begin_token()
        self._native.begin_pass()

    def margin(self, running: int, layer: int, rank: int) -> float:
        """As of LearnedMargins."""
        return float(self._native.margin(running, layer, rank))

    def forget_guesses(self) -> None:
        """What was predicted will not be compared: another pass comes first."""
        self._native.forget_guesses()

    def run(
        self, layer: int, hidden: np.ndarray, times: PhaseTimes, quality: PrefetchQuality, trace: TraceRecorder | None
    ) -> None:
        """Add to the residual stream, float32 [1, D], what the layer's experts make of it. Raises as `stream` does."""
        state, expert, dense_ns, experts_ns, predicted = kernels.experts_layer(self._native, layer, hidden)
        self._cache.check_end(state, expert)
        times.dense_ns += dense_ns
        if predicted >= 0:
            quality.add(layer, self._spec.layers[layer].experts.top_k, predicted)
        if trace is not None:
            native = self._native
            chosen, logits = np.array([native.chosen], np.int32), np.frombuffer(native.logits, np.float32)[None]
            trace.add_layer(layer, chosen, native.advice, logits, self._foreseen(layer), times.copy())
        times.experts_ns += experts_ns

    def _foreseen(self, layer: int) -> list[np.ndarray]:
        """The scores [E] of the layers ahead, nearest first."""
        if not isinstance(self._predictor, LookaheadPredictor):
            return []
        rows = np.frombuffer(self._native.shares, np.float32).reshape(-1, self._spec.layers[layer].experts.count)
        known = [self._known(layer, each) for each in self._advisor.followings(layer)]
        return [*rows, *(scores for scores in known if scores is not None)]

    def _known(self, layer: int, following: Following) -> np.ndarray | None:
        """Scores [E] of a layer whose router cannot be asked; None where it can."""
        predictor = self._predictor
        if not isinstance(predictor, LookaheadPredictor) or predictor.router_ahead(layer, following.ahead) is not None:
            return None
        return predictor.scores_without_router(layer, following.ahead)[: following.count]

    def _fields(self, at: int, experts: Sequence[Any], router: Router) -> dict[str, Any]:
        """A layer as the extension takes it."""
        spec, first = self._spec.layers[at].experts, self._advisor.first_expert[at]
        followings = [] if self._predictor is None else self._advisor.followings(at)
        return {
            "norm": self._norms[at].weight,
            "norm_eps": self._norms[at].eps,
            "router": getattr(router.matrix, "native", None),
            "layer": at,
            "first_expert": first,
            "top_k": spec.top_k,
            "renormalizes": spec.router.renormalize,
            "weight_scale": spec.router.scale,
            "residual_scale": self._spec.residual_scale,
            "experts": [expert.native for expert in experts[first : first + spec.count]],
            "ahead": [self._ahead(at, each) for each in followings],
        }

    def _ahead(self, at: int, following: Following) -> tuple[Any, ...]:
        """A layer that is looked at while layer `at` runs, as the extension takes it."""
        layer, top_k = following.layer, following.top_k
        place = (following.rank, layer, self._advisor.first_expert[layer], top_k)
        scores = self._known(at, following)
        if scores is not None:
            return *place, None, None, *kernels.largest(scores, top_k + 1)
        predictor = self._predictor
        router = predictor.router_ahead(at, following.ahead) if isinstance(predictor, LookaheadPredictor) else None
        return *place, getattr(getattr(router, "matrix", None), "native", None), self._norms[layer].weight, [], []


def bind_token_experts(
    spec: ModelSpec,
    cache: StreamingCache,
    experts: Sequence[Any],
    norms: Sequence[Norm],
    routers: Sequence[Router | None],
    advisor: Advisor,
) -> TokenExperts | None:
    """None where the extension does not know the model, the cache or the way in which experts are read ahead.

    experts: kernels.Expert, counted over all layers. norms: in front of the routers, routers: of every layer.
    """
    plain = [router for at, router in enumerate(routers) if router is not None and _is_known(spec, at, router)]
    is_known = isinstance(cache, NativeCache) and len(plain) == spec.num_layers and spec.encoder is None
    is_known = is_known and all(norm.bias is None and norm.eps == norms[0].eps for norm in norms)
    if not is_known or not _is_advice_known(spec, advisor) or not isinstance(cache, NativeCache):
        return None
    return TokenExperts(spec, cache, experts, norms, plain, advisor)


def _is_known(spec: ModelSpec, at: int, router: Router) -> bool:
    """Whether a layer does nothing but choose by softmax, compute and add."""
    layer = spec.layers[at]
    has_more = bool(layer.shared) or layer.cross is not None or bool(layer.experts.router.capacity)
    is_plain = router.rule.is_softmax and router.matrix is not None and router.bias is None
    return is_plain and not has_more


def _is_advice_known(spec: ModelSpec, advisor: Advisor) -> bool:
    """Whether nothing is read ahead, or what routers of later layers find likely."""
    if advisor.predictor is None:
        return True
    if advisor.rule != "likely" or advisor.experts or not isinstance(advisor.predictor, LookaheadPredictor):
        return False
    is_alike = len({layer.experts.count for layer in spec.layers}) == 1
    return is_alike and advisor.layers <= MAX_ROUTERS
