"""The forward pass: a ModelSpec executed on packed weights. Experts are read through the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from moec.manifests.bundle import BundleManifest

from .. import kernels
from ..expert_cache.interface import StreamingCache
from ..expert_cache.native_cache import NativeCache
from ..kernels.elementary import softcapped
from ..layers.attention import CrossAttention, DensePart, layer_weights, linear_rows, mixer_blocks
from ..layers.kv_cache import KVCache
from ..layers.norms import Norm, stream_norms
from ..layers.routing import Router
from ..layers.shared_expert import SharedExpert
from ..prefetch.advisor import Advisor
from ..prefetch.pass_state import ExpertChoice, PassState
from ..prefetch.quality import LayerAdvice, PrefetchQuality
from ..trace.statistics import PhaseTimes
from ..trace.trace import LayerScores, TraceRecorder
from .expert_requests import ExpertOffload, choose_experts
from .one_call import NORM_KINDS, NativeModes, PassExperts


class Model:
    """Weights of one bundle, ready to run. Row t of every result depends only on token t and its sequence.

    dense: dense weights by name.
    experts: all stored experts, by index.
    context: positions of the cache.
    """

    def __init__(
        self, manifest: BundleManifest, dense: dict[str, Any], experts: list[Any], cache: StreamingCache, context: int
    ) -> None:
        self.spec = manifest.model
        self.dense = dense
        self.experts = experts
        self.cache = cache
        self._head_bias: np.ndarray | None = dense.get("lm_head_bias")
        is_scaled = self.spec.logits_scale != 1.0 or self.spec.logit_softcap != 0
        self._is_head_plain = self._head_bias is None and not is_scaled
        self._first_decoder = self.spec.first_decoder_layer
        self._norms = stream_norms(self.spec, dense)
        weights = [layer_weights(dense, at) for at in range(self.spec.num_layers)]
        blocks = mixer_blocks(self.spec, dense, weights, self._norms, context)
        self.dense_part = DensePart(blocks, partial(linear_rows, dense[self.spec.head_name]))
        self._cross: dict[int, CrossAttention] = {}
        self._routers: list[Router | None] = []
        self.shared_experts: dict[int, SharedExpert] = {}
        pruned = manifest.pruned_experts
        for at, (layer, named) in enumerate(zip(self.spec.layers, weights, strict=True)):
            router = None
            if layer.experts.count:
                router = Router(layer.experts, named.get("router"), named.get("router_bias"), pruned[at])
            self._routers.append(router)
            if layer.cross is not None:
                self._cross[at] = CrossAttention(layer.cross, named)
            if layer.shared:
                self.shared_experts[at] = SharedExpert(named, layer.experts.activation)
        self._has_capacities = any(layer.experts.router.capacity for layer in self.spec.layers)
        self._first_expert: list[int] = np.cumsum([0, *(layer.experts.count for layer in self.spec.layers)]).tolist()
        rules = {at: router.rule for at, router in enumerate(self._routers) if router is not None}
        static = {at: rule.static for at, rule in rules.items() if rule.static is not None}
        self.advisor = Advisor(self.spec, self._first_expert, static=static)
        self.prefetch_quality = PrefetchQuality()
        self.times = PhaseTimes()
        self.trace: TraceRecorder | None = None
        self.accelerator: ExpertOffload | None = None
        self.pass_experts: PassExperts | None = None
        self._parts = np.empty(0, np.float32)

    def absent(self, experts: Sequence[int]) -> list[int]:
        """Return the stored experts that no accelerator holds. The host may have to read them."""
        return list(experts) if self.accelerator is None else self.accelerator.absent(experts)

    def absent_first(self, experts: Sequence[int]) -> list[int]:
        """Return the experts with those on an accelerator last. They use host memory only if some is left."""
        absent = set(self.absent(experts))
        return sorted(experts, key=lambda index: index not in absent)

    @property
    def first_expert(self) -> list[int]:
        """Index of each layer's first expert when experts are counted over all layers, [L + 1]."""
        return self._first_expert

    def advice_by_layer(self) -> list[LayerAdvice]:
        """Return how useful prefetching was so far, for each layer."""
        return self.prefetch_quality.layers(self._first_expert, self.cache.prefetches)

    def bind_one_call(self, lossy: NativeModes | None = None) -> None:
        """Let a pass take one call of the extension for the experts of a layer. Call it after the advisor is set.

        The caller has checked that `why_not_one_call` names no reason. A cache in Python keeps the steps.
        lossy: modes that decide; None without one.
        """
        if isinstance(self.cache, NativeCache):
            self.pass_experts = PassExperts(
                self.spec,
                {kind: self.norms_of(kind) for kind in NORM_KINDS},
                self._routers,
                self.experts,
                self.shared_experts,
                self.cache,
                self.advisor,
                lossy,
            )

    def needs_no_read(self, index: int) -> bool:
        """Return whether a stored expert is in memory, on its way, or on an accelerator."""
        return self.cache.is_loading_or_resident(index) or not self.absent([index])

    def norms_of(self, kind: str) -> list[Norm | None]:
        """Return the norm of this kind of each layer, such as `shared_norm`."""
        return [self._norms.get(f"layers.{index}.{kind}") for index in range(self.spec.num_layers)]

    def router_norms(self) -> list[Norm]:
        """Return the norm before the router of each layer."""
        layers = [f"layers.{index}." for index in range(self.spec.num_layers)]
        return [self._norms.get(f"{at}router_norm", self._norms[f"{at}experts_norm"]) for at in layers]

    def routers(self) -> list[Router | None]:
        return self._routers

    def prefetch(self, experts: Sequence[int]) -> None:
        self.cache.prefetch(self.absent(experts))

    def forward(
        self,
        tokens: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        kv: KVCache,
        choice: ExpertChoice | None = None,
    ) -> np.ndarray:
        """Run T tokens of any sequences through the decoder's layers and store their keys and values.

        tokens: int64 [T]. The tokens of a sequence are in order of position.
        slots, positions: int32 [T].
        choice: changes that lossy modes make to the routers' choice.
        Returns the residual stream after the last layer, float32 [T, D]; `logits` takes rows of it.
        """
        layers = range(self._first_decoder, self.spec.num_layers)
        return self._run(layers, tokens, kernels.TokenPlaces(slots, positions), kv, choice)

    def encode(self, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray, kv: KVCache) -> None:
        """Run the whole prompts of some slots through the encoder, and store the keys and values for the decoder.

        Each expert that they need is requested once.
        tokens: int64 [T]. The tokens of a prompt are adjacent and in order.
        slots, positions: int32 [T].
        """
        places = kernels.TokenPlaces(slots, positions, kv.prompt_lengths[slots])
        hidden = self._run(range(self._first_decoder), tokens, places, kv)
        started_ns = time.perf_counter_ns()
        with np.errstate(all="ignore"):
            normed = self._norms["encoder_norm"](hidden)
            for index, attention in self._cross.items():
                attention.store(normed, slots, positions, kv.cross_keys[index], kv.cross_values[index])
        self.times.dense_ns += time.perf_counter_ns() - started_ns

    def _run(
        self,
        layers: range,
        tokens: np.ndarray,
        places: kernels.TokenPlaces,
        kv: KVCache,
        choice: ExpertChoice | None = None,
    ) -> np.ndarray:
        """Run the layers of one stack, one after the other. Returns the residual stream, float32 [T, D].

        NaN and infinity pass through. The code that takes a token from the logits refuses them.
        """
        one_call = self._one_call(tokens, choice)
        if preload := self.advisor.preload(tokens, layers):
            self.prefetch(preload)
        if one_call is not None:
            return self._run_in_calls(layers, tokens, places, kv, one_call)
        with np.errstate(all="ignore"):
            return self._run_steps(layers, tokens, places, kv, choice)

    def _run_in_calls(
        self, layers: range, tokens: np.ndarray, places: kernels.TokenPlaces, kv: KVCache, one_call: PassExperts
    ) -> np.ndarray:
        """Run any tokens; each layer has one call of the extension for attention and one for its experts.

        Cross attention is computed in steps between the two.
        """
        hidden = self._embed(tokens)
        times, blocks, sequences = self.times, self.dense_part.blocks, _sequences(places)
        prompts, slots = self._prompts(places, kv), places.slots if self._has_capacities else None
        try:
            for index in layers:
                started_ns = time.perf_counter_ns()
                blocks[index](hidden, places, *kv.of_layer[index])
                if index in self._cross:
                    self._attend_to_prompt(index, hidden, prompts, kv)
                times.dense_ns += time.perf_counter_ns() - started_ns
                one_call.run(index, hidden, sequences, slots, times, self.prefetch_quality, self.trace)
        finally:
            one_call.end()
        return hidden

    def _run_steps(
        self, layers: range, tokens: np.ndarray, places: kernels.TokenPlaces, kv: KVCache, choice: ExpertChoice | None
    ) -> np.ndarray:
        """Run any tokens; each layer routes, reads and computes in steps."""
        hidden = self._embed(tokens)
        chosen = [np.empty((len(tokens), 0), np.int32)] * layers.start
        sequences = _sequences(places)
        is_scored = self.trace is not None and self.trace.keeps_scores
        state = PassState(0, hidden, chosen, tokens, choice, sequences, is_traced=is_scored)
        prompts = self._prompts(places, kv)
        predicted: list[int] | None = None
        try:
            for index in layers:
                started_ns = time.perf_counter_ns()
                self.dense_part.blocks[index](hidden, places, *kv.of_layer[index])
                if index in self._cross:
                    self._attend_to_prompt(index, hidden, prompts, kv)
                self.times.dense_ns += time.perf_counter_ns() - started_ns
                state.layer = index
                predicted = self._experts_layer(state, predicted, places.slots)
        finally:  # between passes the expert cache uses this memory
            self._parts = np.empty(0, np.float32)
        return hidden

    def _one_call(self, tokens: np.ndarray, choice: ExpertChoice | None) -> PassExperts | None:
        """Return the object that computes this pass's experts in one call per layer; None if they take steps."""
        one_call, count = self.pass_experts, len(tokens)
        if one_call is None or not one_call.fits(self.cache, self.advisor):
            return None
        is_simple = choice is None and count == 1
        takes_steps = self.accelerator is not None or (self.trace is not None and not is_simple)
        takes_steps |= not one_call.can_decide(choice)
        if takes_steps or count != 1:
            one_call.forget_guesses()
        if takes_steps or count == 0:
            return None
        one_call.begin(choice)
        return one_call

    def _embed(self, tokens: np.ndarray) -> np.ndarray:
        hidden = np.empty((len(tokens), self.spec.hidden_size), np.float32)
        kernels.dequantize_rows(self.dense["embedding"], tokens, hidden)
        if self.spec.embedding_scale != 1.0:
            with np.errstate(all="ignore"):
                hidden *= np.float32(self.spec.embedding_scale)
        return hidden

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        started_ns = time.perf_counter_ns()
        # numpy's warnings are switched off only where numpy computes: the switch takes 4 % of a small model's token.
        if self._is_head_plain and kernels.compiled() is not None:
            out = self.dense_part.head(self._norms["final_norm"](hidden))
        else:
            with np.errstate(all="ignore"):
                out = self._numpy_logits(hidden)
        self.times.dense_ns += time.perf_counter_ns() - started_ns
        return out

    def _numpy_logits(self, hidden: np.ndarray) -> np.ndarray:
        """Return the logits of a head with a bias, a scale or a bound, or without the extension."""
        out = self.dense_part.head(self._norms["final_norm"](hidden))
        if self._head_bias is not None:
            out += self._head_bias
        if self.spec.logits_scale != 1.0:
            out *= np.float32(self.spec.logits_scale)
        if self.spec.logit_softcap:
            out = softcapped(out, self.spec.logit_softcap)
        return out

    def _prompts(self, places: kernels.TokenPlaces, kv: KVCache) -> kernels.TokenPlaces:
        """Return the slots of the tokens with the lengths of their prompts as ends, for cross attention."""
        if not self._cross:
            return places
        return kernels.TokenPlaces(places.slots, places.positions, kv.prompt_lengths[places.slots])

    def _attend_to_prompt(self, index: int, hidden: np.ndarray, prompts: kernels.TokenPlaces, kv: KVCache) -> None:
        """Add the attention to the prompts.

        prompts: slots of the tokens, with the lengths of their prompts as ends.
        """
        with np.errstate(all="ignore"):
            normed = self._norms[f"layers.{index}.cross_attention_norm"](hidden)
            self._add(hidden, self._cross[index](normed, prompts, kv.cross_keys[index], kv.cross_values[index]))

    def _add(self, hidden: np.ndarray, out: np.ndarray) -> None:
        """Add a result [T, D] to the residual stream. The result may be changed."""
        if self.spec.residual_scale != 1.0:
            out *= np.float32(self.spec.residual_scale)
        hidden += out

    def _experts_layer(self, state: PassState, predicted: list[int] | None, slots: np.ndarray) -> list[int] | None:
        """Route, advise, compute, add in router-rank order. Returns the candidates predicted for the next layer."""
        index = state.layer
        started_ns = time.perf_counter_ns()
        normed = self._norms[f"layers.{index}.experts_norm"](state.hidden)
        own = self._norms.get(f"layers.{index}.router_norm")
        requested, weights = self._route(state, normed if own is None else own(state.hidden), slots)
        self.times.dense_ns += time.perf_counter_ns() - started_ns

        if predicted is not None:
            routed = set(state.chosen[index].reshape(-1).tolist())
            self.prefetch_quality.observe(index, set(predicted), routed)
        following: list[int] | None = None
        times = None if self.trace is None else self.times.copy()

        def look_ahead() -> list[int]:
            nonlocal following
            following, advice = self.advisor.advise(state)
            if self.trace is not None:
                # Before a capacity drops tokens: it never drops all that chose an expert.
                scores = LayerScores()
                if self.trace.keeps_scores:
                    scores = LayerScores(state.logits, state.foreseen, state.unimportance())
                self.trace.add_layer(index, state.chosen[index], advice, scores, times)
            if state.choice is not None:
                state.choice.requested(index, list(requested), advice)
            return self.absent(advice)

        self._compute(state, normed, requested, weights, look_ahead)
        return following

    def _route(
        self, state: PassState, normed: np.ndarray, slots: np.ndarray
    ) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Return the stored experts that the running layer needs, and the weights, as `choose_experts` does.

        normed: input of the router, float32 [T, D].
        """
        index, router = state.layer, self._routers[state.layer]
        first, experts = self._first_expert[index], self.spec.layers[index].experts
        if router is None:
            state.chosen.append(np.empty((len(normed), 0), np.int32))
            state.logits = state.weights = None
            return {}, np.empty((len(normed), 0), np.float32)
        return choose_experts(state, experts, first, router.rule, router.logits(normed), slots)

    def _compute(
        self,
        state: PassState,
        normed: np.ndarray,
        requested: dict[int, np.ndarray],
        weights: np.ndarray,
        look_ahead: Callable[[], list[int]],
    ) -> None:
        """Compute the experts of the running layer and add their weighted outputs to the residual stream.

        normed: input of the experts, float32 [T, D].
        requested: for each stored expert its outputs, as token * top_k + rank, int [n].
        weights: weight of each output, float32 [T, K].
        look_ahead: returns the experts to read after the requested ones.
        """
        index, is_one = state.layer, len(normed) == 1
        shared, chosen_count = self.shared_experts.get(index), weights.shape[1]
        own = self._norms.get(f"layers.{index}.shared_norm")
        shared_input = normed if own is None else own(state.hidden)
        if shared is not None:  # one more rank, after the routed ones
            weights = np.concatenate([weights, shared.weights(normed)], axis=1)
        parts = self._outputs((len(normed), weights.shape[1], normed.shape[1]))
        if state.choice is not None or self.spec.layers[index].experts.router.capacity:
            # A rank may have no expert. It is added as well, with weight 0, and must be a number.
            parts.fill(0)
        split = None if self.accelerator is None else self.accelerator.begin(requested, normed, chosen_count, index)
        in_host, together = (requested, is_one) if split is None else (split.wanted, is_one and split.comes_together)
        if split is not None and split.has_shared:
            shared = None
        # Closed at once if a kernel raises: leases must not wait for the garbage collector.
        with closing(self.cache.stream(index, list(in_host), look_ahead, all_at_once=together)) as ready:
            for arrived in ready:
                started_ns = time.perf_counter_ns()
                experts = arrived if split is None else split.take(arrived)
                if is_one and experts:
                    ranks = np.concatenate([requested[expert] for expert in experts])
                    kernels.experts_of_token([self.experts[expert] for expert in experts], normed, ranks, parts)
                elif experts:
                    self._compute_expert(experts[0], requested[experts[0]], chosen_count, normed, parts)
                self.times.experts_ns += time.perf_counter_ns() - started_ns
                if shared is not None:  # while misses are read
                    self._compute_shared(shared, shared_input, parts)
                    shared = None
        if shared is not None:
            self._compute_shared(shared, shared_input, parts)
        if split is not None:
            started_ns = time.perf_counter_ns()
            split.finish(parts)
            self.times.experts_ns += time.perf_counter_ns() - started_ns
        self._add(state.hidden, self._sum_of(index, parts, weights))
        if self.spec.layers[index].scale != 1.0:
            state.hidden *= np.float32(self.spec.layers[index].scale)

    def _sum_of(self, index: int, parts: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the sum of the experts' outputs, [T, K, D] with weights [T, K] -> [T, D], after its norms."""
        routed_after, shared_after, after = (
            self._norms.get(f"layers.{index}.{kind}_after_norm") for kind in ("routed", "shared", "experts")
        )
        out = np.empty((len(parts), parts.shape[2]), np.float32)
        if routed_after is None or shared_after is None:
            kernels.combine(parts, weights, out)
        else:  # the shared expert, which is the last rank, has a norm of its own
            alone = weights.copy()
            alone[:, -1] = 0
            kernels.combine(parts, alone, out)
            out = routed_after(out) + shared_after(np.ascontiguousarray(parts[:, -1]))
        return out if after is None else after(out)

    def _outputs(self, shape: tuple[int, int, int]) -> np.ndarray:
        """Return memory for the experts' outputs, float32 [T, ranks, D], uninitialized.

        All layers of a pass use the same memory.
        """
        size = math.prod(shape)
        if self._parts.size < size:
            self._parts = np.empty(size, np.float32)
        return self._parts[:size].reshape(shape)

    def _compute_shared(self, shared: SharedExpert, normed: np.ndarray, parts: np.ndarray) -> None:
        started_ns = time.perf_counter_ns()
        shared(normed, parts)
        elapsed_ns = time.perf_counter_ns() - started_ns
        self.times.dense_ns += elapsed_ns
        self.times.shared_ns += elapsed_ns

    def _compute_expert(
        self, expert: int, places: np.ndarray, top_k: int, normed: np.ndarray, parts: np.ndarray
    ) -> None:
        """Compute one expert for its tokens.

        places: token * top_k + rank, int [n].
        """
        tokens, ranks = (places // top_k).astype(np.int32), (places % top_k).astype(np.int32)
        kernels.expert_ffn(self.experts[expert], normed, tokens, ranks, parts)


def _sequences(places: kernels.TokenPlaces) -> int:
    """Return the number of sequences that the tokens of a pass belong to."""
    return 1 if len(places.slots) == 1 else len(set(places.slots.tolist()))
