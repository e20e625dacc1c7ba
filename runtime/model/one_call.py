"""The experts of a layer for a single token, in one call of the extension.

The call routes, reads, computes and adds, with the bits of the steps in `Model`. Passes of several tokens take the
steps. So do models, caches and rules of prefetching that the extension does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.manifests.model import LayerSpec, ModelSpec

from .. import kernels
from ..expert_cache.interface import StreamingCache
from ..expert_cache.native_cache import NativeCache
from ..expert_cache.opening import why_not_native
from ..layers.norms import Norm
from ..layers.routing import Router
from ..layers.shared_expert import SharedExpert
from ..options.runtime import RuntimeOptions
from ..prefetch.advisor import Advisor, LayerAhead
from ..prefetch.predictors import LookaheadPredictor
from ..prefetch.quality import PrefetchQuality
from ..prefetch.thresholds import RULES
from ..trace.statistics import PhaseTimes
from ..trace.trace import TraceRecorder

MAX_ROUTERS = 8
"""Most routers of later layers that the extension evaluates at once."""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """Parts that the layers of a model need to choose and compute experts.

    norms: norm before the experts of each layer.
    routers: router of each layer; None for a layer without routed experts.
    experts: kernels.Expert, counted over all layers.
    shared: shared experts by layer.
    """

    spec: ModelSpec
    norms: Sequence[Norm]
    routers: Sequence[Router | None]
    experts: Sequence[Any]
    shared: Mapping[int, SharedExpert]


class TokenExperts:
    """Layers of one model, bound to its cache.

    native: the extension's ExpertLayers.
    Raises ValueError if shapes do not fit each other.
    """

    def __init__(self, layers: ModelLayers, cache: NativeCache, advisor: Advisor) -> None:
        self._cache, self._predictor, self._advisor = cache, advisor.predictor, advisor
        self._bound = _bound_to(cache, advisor)
        self._layers, self._specs = layers, layers.spec.layers
        fields = [self.fields(at) for at in range(layers.spec.num_layers)]
        self.native = cache.bind_layers(fields, layers.spec.hidden_size, layers.norms[0].eps, RULES)

    def fits(self, cache: StreamingCache, advisor: Advisor) -> bool:
        """Return whether the layers are bound to this cache and advisor, and no layer is running.

        A layer may be running in another thread, or if this is called in a signal handler.
        """
        return self._bound == _bound_to(cache, advisor) and not self.native.is_running

    def begin(self) -> None:
        """Begin the pass of a token. Raises ExecutionError after a fork, or with other kernels than the cache has."""
        self._cache.begin_token()
        self.native.begin_pass()

    def forget_guesses(self) -> None:
        """Drop the predictions. They are not compared, because a pass in steps comes first."""
        self.native.forget_guesses()

    def threshold(self, running: int, layer: int, rank: int) -> float:
        """Return the threshold of a predicted layer, as in LearnedThresholds."""
        return float(self.native.threshold(running, layer, rank))

    def run(
        self, layer: int, hidden: np.ndarray, times: PhaseTimes, quality: PrefetchQuality, trace: TraceRecorder | None
    ) -> None:
        """Add the output of the layer's experts to the residual stream.

        hidden: float32 [1, D], read and written.
        times, quality, trace: this call adds its times, predictions and choice.
        Raises the errors of `StreamingCache.stream`.
        """
        state, expert, dense_ns, experts_ns, shared_ns, predicted = kernels.experts_layer(self.native, layer, hidden)
        self._cache.check_end(state, expert)
        times.dense_ns += dense_ns - shared_ns
        if predicted >= 0:
            quality.add(layer, self._specs[layer].experts.top_k, predicted)
        if trace is not None:
            self._record(trace, layer, times)
        times.dense_ns += shared_ns
        times.shared_ns += shared_ns
        times.experts_ns += experts_ns

    def _record(self, trace: TraceRecorder, layer: int, times: PhaseTimes) -> None:
        """Record the layer that ran last.

        times: times before any of its experts was computed.
        """
        native = self.native
        chosen = np.array(native.chosen, np.int32)[None]
        logits = np.frombuffer(native.logits, np.float32)[None] if chosen.size else None
        trace.add_layer(layer, chosen, native.advice, logits, self._foreseen(layer), times.copy())

    def _foreseen(self, layer: int) -> list[np.ndarray]:
        """Return the scores [E] of the layers ahead, nearest first."""
        layers_ahead = [] if self._predictor is None else self._advisor.layers_ahead(layer)
        known = [self._known(layer, each) for each in layers_ahead]
        evaluated = sum(scores is None for scores in known)
        rows = iter(np.frombuffer(self.native.shares, np.float32).reshape(evaluated, -1) if evaluated else ())
        return [next(rows) if scores is None else scores for scores in known]

    def _known(self, layer: int, later: LayerAhead) -> np.ndarray | None:
        """Return the scores [E] of a layer whose router cannot be evaluated ahead; None if it can."""
        predictor = self._predictor
        if not isinstance(predictor, LookaheadPredictor) or predictor.router_ahead(layer, later.ahead) is not None:
            return None
        return predictor.scores_without_router(layer, later.ahead)[: later.count]

    def fields(self, at: int) -> dict[str, Any]:
        """Return a layer in the form that the extension takes: a dictionary of `_native.ExpertLayers`."""
        layers, spec, first = self._layers, self._specs[at].experts, self._advisor.first_expert[at]
        layers_ahead = [] if self._predictor is None else self._advisor.layers_ahead(at)
        router, shared = layers.routers[at], layers.shared.get(at)
        return {
            "norm": layers.norms[at].weight,
            "norm_eps": layers.norms[at].eps,
            "router": None if router is None else _native(router.matrix),
            "router_bias": None if router is None else router.bias,
            "shared": None if shared is None else _native(shared.expert),
            "layer": at,
            "first_expert": first,
            "top_k": spec.top_k,
            "renormalizes": spec.router.renormalize,
            "weight_scale": spec.router.scale,
            "residual_scale": layers.spec.residual_scale,
            "experts": [
                None if expert is None else _native(expert) for expert in layers.experts[first : first + spec.count]
            ],
            "ahead": [self._ahead(at, each) for each in layers_ahead],
        }

    def _ahead(self, at: int, later: LayerAhead) -> tuple[Any, ...]:
        """Return a layer that is predicted while layer `at` runs, in the form that the extension takes."""
        layer, top_k = later.layer, later.top_k
        place = (later.rank, layer, self._advisor.first_expert[layer], top_k)
        scores = self._known(at, later)
        if scores is not None:
            return *place, None, None, None, *kernels.largest(scores, top_k + 1)
        router, norm = self._layers.routers[layer], self._layers.norms[layer].weight
        if router is None:
            raise ValueError(f"layer {layer} routes nothing")
        return *place, _native(router.matrix), norm, router.bias_among_kept, [], []


def bind_token_experts(layers: ModelLayers, cache: StreamingCache, advisor: Advisor) -> TokenExperts | None:
    """Bind layers to a cache of the extension. Returns None if the cache is in Python.

    Raises ValueError if shapes do not fit each other.
    """
    return TokenExperts(layers, cache, advisor) if isinstance(cache, NativeCache) else None


def why_not_one_call(manifest: BundleManifest, options: RuntimeOptions, reads_ahead: bool) -> str | None:
    """Return why a token cannot take one call of the extension per layer, in a few words; None if it can.

    reads_ahead: whether some experts have to be read while tokens are decoded.
    """
    model = manifest.model
    reason = why_not_native(options, model.encoder is not None)
    if reason is None and not options.modes.is_lossless:
        reason = "a lossy mode"
    if reason is None and model.norm == "layer":
        reason = "layer norms"
    for layer in model.layers:
        reason = reason or _why_not_layer(layer)
    return reason or (_why_not_advice(model, options) if reads_ahead else None)


def _bound_to(cache: StreamingCache, advisor: Advisor) -> tuple[Any, ...]:
    """Return the parts that may be replaced after loading. Layers that are bound to other ones must not run."""
    return id(cache), id(advisor.predictor), advisor.rule, advisor.layers, advisor.experts


def _why_not_layer(layer: LayerSpec) -> str | None:
    """Return why the extension cannot compute a layer; None if it can.

    It knows plain softmax routers without a capacity, and shared experts without a router.
    """
    router = layer.experts.router
    if layer.experts.count and not router.is_plain:
        return "routers that are no plain softmax"
    if router.capacity:
        return "routers with a capacity"
    return "a shared expert with a router" if layer.shared is not None and layer.shared.has_gate else None


def _why_not_advice(model: ModelSpec, options: RuntimeOptions) -> str | None:
    """Return why the extension cannot read ahead by these options; None if it can, or if nothing is read ahead.

    It knows prediction by the routers of later layers.
    """
    if options.prefetch == "off":
        return None
    if options.prefetch != "lookahead":
        return f"prefetch {options.prefetch}"
    if options.prefetch_rule != "likely" or options.prefetch_experts:
        return f"prefetch rule {options.prefetch_rule}" if not options.prefetch_experts else "prefetch experts"
    counts = {layer.experts.count for layer in model.layers if layer.experts.count}
    return None if len(counts) == 1 else "layers with different numbers of experts"


def _native(part: Any) -> Any:
    """Return the extension's object of a matrix or an expert."""
    return part.native
