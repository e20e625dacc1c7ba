"""The experts of a layer for the tokens of a pass, in one call of the extension.

The call routes, reads, computes and adds, with the bits of the steps in `Model`. Lossy modes decide within it. Models,
caches and rules of prefetching that the extension does not know take the steps. So do passes of several tokens, and of
lossy modes, while a trace is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.manifests.model import LayerSpec, ModelSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from .. import kernels
from ..expert_cache.interface import StreamingCache
from ..expert_cache.native_cache import NativeCache
from ..expert_cache.open_cache import why_not_native
from ..layers.norms import Norm
from ..layers.routing import LEAST_SUM, Router
from ..layers.shared_expert import SharedExpert
from ..options.lossy import BigLittle, LossyModes
from ..options.runtime import RuntimeOptions
from ..prefetch.advisor import CHOICES_FOR_ALL, Advisor, LayerAhead
from ..prefetch.pass_state import ExpertChoice
from ..prefetch.predictors import MINIMUM_PAIR_COUNT, LookaheadPredictor, PathPredictor, Predictor
from ..prefetch.quality import PrefetchQuality
from ..prefetch.read_ahead_margins import RULES
from ..trace.statistics import PhaseTimes
from ..trace.trace import LayerScores, TraceRecorder

PASS_RULES = RULES | {"most_tokens": MAX_PASS_TOKENS, "choices_for_all": CHOICES_FOR_ALL, "first_decoder": 0}
"""Constants of what is read ahead, for the extension. `first_decoder` is the first layer after those of an encoder."""


Scoring = tuple[str, np.ndarray | None, int, int, bool, float, bool, float]
"""A router that is no plain softmax: scoring, correction, groups, groups kept, whether two experts rate one, margin,
whether logits are corrected, and what is added to the sum of the weights."""


NORM_KINDS = (
    "experts_norm",
    "experts_after_norm",
    "router_norm",
    "shared_norm",
    "shared_after_norm",
    "routed_after_norm",
)
"""Norms of a layer's experts. All but the first may be absent."""


class AheadCounts(NamedTuple):
    """Numbers of experts of a later layer in a kind of passes, as the extension takes them.

    top_k: experts of a token.
    advised: experts to read ahead for one token, -1 if thresholds are learned.
    predicted: the most that count as predicted.
    advised_each: experts to read ahead for each of several tokens.
    """

    top_k: int
    advised: int
    predicted: int
    advised_each: int


class PredictedLayer(NamedTuple):
    """A layer that is predicted while another one runs, as the extension takes it.

    rank: its place among the later layers that route, from 1.
    layer, first_expert, experts: its index, the index of its first expert over all layers, and their number.
    counts: of the model's own passes; with big-little also of the little model, and of passes computed again.
    stops_at_miss: whether a missing expert ends the advice.
    router, norm, bias, norm_bias, scoring: the router that predicts it, if one does, as in `PassExperts.fields`.
    path: the last layers whose experts predict it, and the one before, if a path does; else -1.
    known_experts, known_scores: experts that no token changes, largest score first.
    """

    rank: int
    layer: int
    first_expert: int
    experts: int
    counts: list[AheadCounts]
    stops_at_miss: bool
    router: Any = None
    norm: np.ndarray | None = None
    bias: np.ndarray | None = None
    norm_bias: np.ndarray | None = None
    scoring: Scoring | None = None
    path: tuple[int, int] = (-1, -1)
    known_experts: Sequence[int] = ()
    known_scores: Sequence[float] = ()


class NativeModes(NamedTuple):
    """Lossy modes of a run, for the extension.

    parts: `shared_parts` of the choices that it can make.
    low: stored index of the low version of each expert, or -1.
    cache: the extension's LogicalCache; None if no mode reads it.
    """

    modes: LossyModes
    parts: tuple[Any, ...]
    low: list[int]
    cache: Any

    def to_plain(self) -> dict[str, Any]:
        """Return the dictionary that `_native.ExpertLayers` takes."""
        precision, routing, little = self.modes.dynamic_precision, self.modes.cache_routing, self.modes.big_little
        return {
            "has_precision": precision is not None,
            "has_routing": routing is not None,
            "has_little": little is not None,
            "low_above": 0.0 if precision is None else precision.low_above,
            "skip_above": 0.0 if precision is None else precision.skip_above,
            "margin": 0.0 if routing is None else routing.margin,
            "drop": 0.0 if routing is None else routing.drop,
            "little_experts": 0 if little is None else little.experts,
            "low": self.low,
            "cache": self.cache,
        }


class PassExperts:
    """Layers of one model, bound to its cache.

    native: the extension's ExpertLayers.
    Raises ValueError if shapes do not fit each other.
    """

    def __init__(
        self,
        spec: ModelSpec,
        norms: Mapping[str, Sequence[Norm | None]],
        routers: Sequence[Router | None],
        experts: Sequence[Any],
        shared: Mapping[int, SharedExpert],
        cache: NativeCache,
        advisor: Advisor,
        lossy: NativeModes | None = None,
    ) -> None:
        """Bind the layers.

        norms: of each layer, by kind (NORM_KINDS); None for none.
        routers: router of each layer; None for a layer without routed experts.
        experts: kernels.Expert of all stored experts.
        shared: shared experts by layer.
        lossy: modes that decide; None without one.
        """
        self._cache, self._predictor, self._advisor = cache, advisor.predictor, advisor
        self._bound = _bound_to(cache, advisor)
        self._spec, self._norms, self._routers = spec, norms, routers
        self._experts, self._shared, self.lossy = experts, shared, lossy
        self._choice: ExpertChoice | None = None
        self._recording: ExpertChoice | None = None
        fields = [self.fields(at) for at in range(spec.num_layers)]
        paths = _paths_of(advisor.predictor)
        modes = None if lossy is None else lossy.to_plain()
        rules = PASS_RULES | {"first_decoder": spec.first_decoder_layer}
        self.native = cache.bind_layers(fields, spec.hidden_size, spec.norm_eps, rules, paths, modes)

    def fits(self, cache: StreamingCache, advisor: Advisor) -> bool:
        """Return whether the layers are bound to this cache and advisor, and no layer is running.

        A layer may be running in another thread, or if this is called in a signal handler.
        """
        return self._bound == _bound_to(cache, advisor) and not self.native.is_running

    def can_decide(self, choice: ExpertChoice | None) -> bool:
        """Return whether the extension changes the routers' choice in the same way."""
        if choice is None:
            return True
        if self.lossy is None or choice.native_kind is None:
            return False
        return all(one is other for one, other in zip(choice.shared_parts, self.lossy.parts, strict=True))

    def begin(self, choice: ExpertChoice | None = None) -> None:
        """Begin a pass. Raises ExecutionError after a fork, or with other kernels than the cache has.

        choice: changes that lossy modes make. The extension makes them itself.
        """
        self._cache.begin_pass()
        self._choice = self._recording = None
        if choice is None:
            self.native.begin_pass()
            return
        kind = choice.native_kind
        self.native.begin_pass(kind, dict(choice.foretold or {}))
        self._choice, self._recording = choice, choice if kind == "little" else None

    def end(self) -> None:
        """End a pass. Memory for several tokens is freed, because the expert cache uses it between passes."""
        self.native.end_pass()
        if self._choice is not None:
            self._choice.add_counts(self.native.take_counts())
            self._choice = self._recording = None

    def forget_guesses(self) -> None:
        """Drop the predictions of the next token. They are not compared, because another pass comes first."""
        self.native.forget_guesses()

    def threshold(self, running: int, layer: int) -> float:
        """Return the threshold of a predicted layer, as in LearnedThresholds."""
        return float(self.native.threshold(running, layer))

    def run(
        self,
        layer: int,
        hidden: np.ndarray,
        sequences: int,
        slots: np.ndarray | None,
        times: PhaseTimes,
        quality: PrefetchQuality,
        trace: TraceRecorder | None,
    ) -> None:
        """Add the output of the layer's experts to the residual stream.

        hidden: float32 [T, D], read and written.
        sequences: number of sequences that the tokens belong to.
        slots: slot of each token, int32 [T]; needed if experts have a capacity.

        times, quality: this call adds its times and predictions.
        trace: records the choice of one token.
        Raises the errors of `StreamingCache.stream`.
        """
        found = kernels.experts_layer(self.native, layer, hidden, sequences, slots)
        state, expert, *spent_ns, demanded, predicted = found
        self._cache.check_end(state, expert)
        if self._recording is not None and self._routers[layer] is not None:
            self._recording.take(layer, np.frombuffer(self.native.logits, np.float32).reshape(len(hidden), -1))
        dense_ns, experts_ns, shared_ns = spent_ns
        times.dense_ns += dense_ns - shared_ns
        if predicted >= 0:
            quality.add(layer, demanded, predicted)
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
        chosen, scores = np.array(native.chosen, np.int32)[None], LayerScores()
        if trace.keeps_scores:
            logits = np.frombuffer(native.logits, np.float32)[None] if chosen.size else None
            scores = LayerScores(logits, self._foreseen(layer))
        trace.add_layer(layer, chosen, native.advice, scores, times.copy())

    def _foreseen(self, layer: int) -> list[np.ndarray]:
        """Return the scores [E] of the layers ahead, nearest first."""
        layers_ahead, native, predictor = self._layers_ahead(layer), self.native, self._predictor
        known = [self._known(layer, later) for later in layers_ahead]
        if isinstance(predictor, PathPredictor):
            shares = np.frombuffer(native.path_shares, np.float64)
            by_path = [shares if shares.size else predictor.popularity(layer, later.ahead) for later in layers_ahead]
            evaluated = [scores[: later.count] for scores, later in zip(by_path, layers_ahead, strict=True)]
        else:
            count = sum(scores is None for scores in known)
            evaluated = list(np.frombuffer(native.shares, np.float32).reshape(count, -1)) if count else []
        rows = iter(evaluated)
        return [next(rows) if scores is None else scores for scores in known]

    def _layers_ahead(self, layer: int) -> list[LayerAhead]:
        """Return the layers that are predicted while a layer runs, nearest first."""
        if self._predictor is None:
            return []
        return [later for later in self._advisor.layers_ahead(layer) if self._is_predicted(layer, later)]

    def _is_predicted(self, layer: int, later: LayerAhead) -> bool:
        """Return whether the model's own passes predict a later layer."""
        predictor = self._predictor
        is_next = not isinstance(predictor, PathPredictor) or predictor.is_next(layer, later.ahead)
        return is_next and self._advisor.fixed_count(later.top_k, later) != 0

    def _known(self, layer: int, later: LayerAhead) -> np.ndarray | None:
        """Return the scores [E] of a layer that no token changes; None if they depend on it."""
        scores = None if self._predictor is None else self._predictor.fixed_scores(layer, later.ahead)
        return None if scores is None else scores[: later.count]

    def fields(self, at: int) -> dict[str, Any]:
        """Return a layer in the form that the extension takes: a dictionary of `_native.ExpertLayers`."""
        spec, first = self._spec.layers[at].experts, self._advisor.first_expert[at]
        router, shared, norm = self._routers[at], self._shared.get(at), self._norms["experts_norm"][at]
        experts = self._experts[first : first + spec.count]
        norms = {kind: each[at] for kind, each in self._norms.items()}
        scales = None if router is None else router.rule.expert_scales
        return {
            **{kind: None if found is None else found.weight for kind, found in norms.items()},
            "norm_bias": None if norm is None else norm.bias,
            "norm_eps": self._spec.norm_eps,
            "stream_scale": self._spec.layers[at].scale,
            "expert_scales": scales,
            "router": None if router is None or router.matrix is None else router.matrix.native,
            "router_bias": None if router is None else router.bias,
            "rule": None if router is None else _scoring_of(router),
            "shared": None if shared is None else shared.expert.native,
            "shared_router": None if shared is None or shared.router is None else shared.router.native,
            "layer": at,
            "first_expert": first,
            "top_k": spec.top_k,
            "renormalizes": spec.router.renormalize,
            "weight_scale": spec.router.scale,
            "residual_scale": self._spec.residual_scale,
            "capacity": spec.router.capacity,
            "experts": [None if expert is None else expert.native for expert in experts],
            "low_experts": [] if self.lossy is None else self._low_experts(self.lossy, first, spec.count),
            "ahead": [self._ahead(at, later) for later in self._bound_ahead(at)],
        }

    def _low_experts(self, lossy: NativeModes, first: int, count: int) -> list[Any]:
        """Return the low version of each expert of a layer; None without one."""
        low = [None if index < 0 else self._experts[index] for index in lossy.low[first : first + count]]
        return [None if expert is None else expert.native for expert in low]

    @property
    def _big_little(self) -> BigLittle | None:
        return None if self.lossy is None else self.lossy.modes.big_little

    def _bound_ahead(self, layer: int) -> list[LayerAhead]:
        """Return the layers that some kind of pass predicts while a layer runs, nearest first."""
        if self._big_little is None or self._predictor is None:
            return self._layers_ahead(layer)
        return self._advisor.layers_ahead(layer)

    def _counts(self, at: int, later: LayerAhead) -> list[AheadCounts]:
        """Return how many experts of a later layer are read ahead, in each kind of passes."""
        advisor, little = self._advisor, self._big_little
        is_next = not isinstance(self._predictor, PathPredictor) or self._predictor.is_next(at, later.ahead)

        def counts(top_k: int, advised: int, advised_each: int) -> AheadCounts:
            return AheadCounts(top_k, advised, advisor.most_predicted(top_k, later), advised_each)

        top_ks = [later.top_k] if little is None else [later.top_k, little.little_top_k(later.top_k)]
        found = [
            counts(top_k, advisor.fixed_count(top_k, later), advisor.count_for_each(top_k, later))
            if is_next
            else counts(top_k, 0, 0)
            for top_k in top_ks
        ]
        again = [] if little is None else [counts(later.top_k, 0, advisor.foretold_count(later))]
        return found + again

    def _ahead(self, at: int, later: LayerAhead) -> PredictedLayer:
        """Return a layer that is predicted while layer `at` runs."""
        layer, predictor, advisor = later.layer, self._predictor, self._advisor
        counts, stops_at_miss = self._counts(at, later), advisor.rule == "first-miss"
        first = advisor.first_expert[layer]
        predicted = PredictedLayer(later.rank, layer, first, later.count, counts, stops_at_miss)
        scores, path = self._known(at, later), (-1, -1)
        if scores is None and isinstance(predictor, PathPredictor):
            before, last = [-1, *predictor.source_layers(at, later.ahead)][-2:]
            scores, path = predictor.popularity(at, later.ahead)[: later.count], (last, before)
        if scores is not None:
            experts, largest = kernels.largest(scores, later.count)
            return predicted._replace(path=path, known_experts=experts, known_scores=largest)
        source = predictor.source(at, later.ahead) if isinstance(predictor, LookaheadPredictor) else None
        matrix = None if source is None else source[0].matrix
        if source is None or matrix is None:
            raise ValueError(f"no router predicts layer {layer} while layer {at} runs")
        router, norm = source
        return predicted._replace(
            router=matrix.native,
            norm=norm.weight,
            bias=router.bias_among_kept,
            norm_bias=norm.bias,
            scoring=_scoring_of(router),
        )


def why_not_one_call(manifest: BundleManifest, options: RuntimeOptions, reads_ahead: bool) -> str | None:
    """Return why a pass cannot take one call of the extension per layer, in a few words; None if it can.

    reads_ahead: whether some experts have to be read during passes.
    """
    model = manifest.model
    reason = why_not_native(options)
    for layer in model.layers:
        reason = reason or _why_not_layer(layer)
    return reason or (_why_not_advice(model, options) if reads_ahead else None)


def _bound_to(cache: StreamingCache, advisor: Advisor) -> tuple[Any, ...]:
    """Return the parts that may be replaced after loading. Layers that are bound to other ones must not run."""
    return id(cache), id(advisor.predictor), advisor.rule, advisor.layers, advisor.experts


def _scoring_of(router: Router) -> Scoring | None:
    """Return how a router turns logits into experts; None for a plain softmax."""
    spec, rule = router.rule.spec, router.rule
    if rule.is_softmax:
        return None
    is_by_two = spec.group_score == "top2"
    choice = (spec.scoring, rule.correction, spec.groups, spec.kept_groups, is_by_two)
    return *choice, spec.margin, spec.corrects_logits, spec.least_sum or LEAST_SUM


def _why_not_layer(layer: LayerSpec) -> str | None:
    """Return why the extension cannot compute a layer; None if it can: it knows routers that read the stream."""
    return None if layer.experts.router.static is None else "static routing"


def _why_not_advice(model: ModelSpec, options: RuntimeOptions) -> str | None:
    """Return why the extension cannot read ahead by these options; None if it can, or if nothing is read ahead.

    It evaluates routers of later layers together, so these must have as many experts.
    """
    if options.prefetch == "off":
        return None
    counts = {layer.experts.count for layer in model.layers if layer.experts.count}
    is_one_size = options.prefetch != "lookahead" or len(counts) == 1
    return None if is_one_size else "layers with different numbers of experts"


def _paths_of(predictor: Predictor | None) -> dict[str, Any] | None:
    """Return the path dictionary in the form that the extension takes; None if the predictor has none."""
    if not isinstance(predictor, PathPredictor):
        return None
    tables = predictor.paths
    return {name: getattr(tables, name) for name in ("transitions", "offsets", "experts", "counts")} | {
        "keys": None if tables.has_sets else tables.keys,
        "sets": tables.keys if tables.has_sets else None,
        "least_count": float(MINIMUM_PAIR_COUNT),
    }
