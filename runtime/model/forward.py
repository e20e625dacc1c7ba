"""The forward pass: a ModelSpec executed on packed weights, experts streamed through the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from moec.manifests.bundle import BundleManifest
from moec.manifests.model import ExpertsSpec, ModelSpec

from .. import kernels
from ..bundle.opening import Bundle
from ..expert_cache.interface import StreamingCache
from ..expert_cache.native_cache import NativeCache
from ..layers.attention import DensePart, layer_weights, linear_rows, make_block
from ..layers.cross_attention import CrossAttention
from ..layers.kv_cache import KVCache
from ..layers.norms import Norm, stream_norms
from ..layers.relative_bias import bias_by_distance
from ..layers.rotary import RotaryTables
from ..layers.routing import Router
from ..layers.shared_expert import SharedExpert
from ..options.runtime import RuntimeOptions
from ..prefetch.advisor import Advisor
from ..prefetch.pass_state import ExpertChoice, PassState
from ..prefetch.quality import LayerAdvice, PrefetchQuality
from ..trace.statistics import PhaseTimes
from ..trace.trace import TraceRecorder
from .expert_offload import ExpertOffload
from .expert_requests import choose_experts
from .one_call import ModelLayers, TokenExperts, why_not_one_call


def _relative_biases(model: ModelSpec, dense: dict[str, Any], context: int) -> dict[bool, np.ndarray]:
    """Biases by distance of the encoder (True) and of the decoder (False), as far as there are any."""
    found = {}
    for sees_ahead in (True, False) if model.encoder is not None else (False,):
        first = 0 if sees_ahead else model.first_decoder_layer
        spec = model.layers[first].attention.relative_bias
        if spec is not None:
            table = dense[f"layers.{first}.relative_bias"]
            found[sees_ahead] = bias_by_distance(table, spec, context, sees_ahead)
    return found


def _router(experts: ExpertsSpec, weights: dict[str, Any], pruned: Sequence[int]) -> Router | None:
    return Router(experts, weights.get("router"), weights.get("router_bias"), pruned) if experts.count else None


class Model:
    """Weights of one bundle, ready to run. Row t of every result depends on token t and its sequence alone."""

    def __init__(
        self, bundle: Bundle, dense: dict[str, Any], experts: list[Any], cache: StreamingCache, context: int
    ) -> None:
        self.spec = bundle.manifest.model
        self.dense, self.experts, self.cache = dense, experts, cache
        self._head_bias: np.ndarray | None = dense.get("lm_head_bias")
        self._norms = stream_norms(self.spec, dense)
        self._is_head_plain = self._head_bias is None and self.spec.logits_scale == 1.0
        ropes = {layer.attention.rope for layer in self.spec.layers if layer.attention.rope is not None}
        rotary = {rope: RotaryTables(rope, context) for rope in ropes}
        biases = _relative_biases(self.spec, dense, context)
        self._first_decoder = self.spec.first_decoder_layer
        weights = [layer_weights(dense, at) for at in range(self.spec.num_layers)]
        blocks = [
            make_block(
                self.spec,
                layer.attention,
                weights[at],
                self._norms[f"layers.{at}.attention_norm"],
                None if layer.attention.rope is None else rotary[layer.attention.rope],
                biases.get(at < self._first_decoder),
            )
            for at, layer in enumerate(self.spec.layers)
        ]
        self.dense_part = DensePart(blocks, partial(linear_rows, dense[self.spec.head_name]))
        self._cross = {
            at: CrossAttention(layer.cross, weights[at])
            for at, layer in enumerate(self.spec.layers)
            if layer.cross is not None
        }
        pruned = bundle.manifest.pruned_experts
        self._routers = [_router(layer.experts, weights[at], pruned[at]) for at, layer in enumerate(self.spec.layers)]
        self.shared_experts = {
            at: SharedExpert(weights[at], layer.experts.activation)
            for at, layer in enumerate(self.spec.layers)
            if layer.shared
        }
        self._first_expert: list[int] = np.cumsum([0, *(layer.experts.count for layer in self.spec.layers)]).tolist()
        rules = {at: router.rule for at, router in enumerate(self._routers) if router is not None}
        static = {at: rule.static for at, rule in rules.items() if rule.static is not None}
        self.advisor = Advisor(self.spec, self._first_expert, static=static)
        self.prefetch_quality = PrefetchQuality()
        self.times = PhaseTimes()
        self.trace: TraceRecorder | None = None
        self.accelerator: ExpertOffload | None = None
        self.token_experts: TokenExperts | None = None
        self._parts = np.empty(0, np.float32)

    def absent(self, experts: Sequence[int]) -> list[int]:
        """Of stored experts, those that no accelerator holds: what may be worth reading."""
        return list(experts) if self.accelerator is None else self.accelerator.absent(experts)

    def absent_first(self, experts: Sequence[int]) -> list[int]:
        """The same, what an accelerator holds behind the rest: worth the host's memory only if some is left."""
        absent = set(self.absent(experts))
        return sorted(experts, key=lambda index: index not in absent)

    @property
    def first_expert(self) -> list[int]:
        """[L + 1]: where each layer's experts begin when they are counted over all layers."""
        return self._first_expert

    def advice_by_layer(self) -> list[LayerAdvice]:
        """What prefetching was worth so far."""
        return self.prefetch_quality.layers(self._first_expert, self.cache.prefetches)

    def bind_one_call(self, manifest: BundleManifest, options: RuntimeOptions, reads_ahead: bool) -> None:
        """Let a single token take one call of the extension per layer, if it can. Call it after the advisor is set.

        reads_ahead: whether some experts have to be read while tokens are decoded.
        """
        if why_not_one_call(manifest, options, reads_ahead) is None and isinstance(self.cache, NativeCache):
            layers = ModelLayers(self.spec, self.router_norms(), self._routers, self.experts, self.shared_experts)
            self.token_experts = TokenExperts(layers, self.cache, self.advisor)

    def needs_no_read(self, index: int) -> bool:
        """Whether a stored expert is in memory, on its way, or on an accelerator."""
        return self.cache.holds(index) or not self.absent([index])

    def router_norms(self) -> list[Norm]:
        """The norms in front of the routers, of every layer."""
        return [self._norms[f"layers.{index}.experts_norm"] for index in range(self.spec.num_layers)]

    def routers(self) -> list[Router | None]:
        """The routers; None where a layer routes nothing."""
        return self._routers

    def prefetch(self, experts: Sequence[int]) -> None:
        """Read stored experts ahead, likeliest first."""
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

        tokens int64 [T]; slots, positions int32 [T]; a sequence's tokens come in order of position. choice: what lossy
        modes make of the routers' choice.
        Returns the residual stream after the last layer, float32 [T, D]; `logits` takes rows of it.
        """
        layers = range(self._first_decoder, self.spec.num_layers)
        return self._run(layers, tokens, kernels.TokenPlaces(slots, positions), kv, choice)

    def encode(self, tokens: np.ndarray, slots: np.ndarray, positions: np.ndarray, kv: KVCache) -> None:
        """Run the whole prompts of some slots through the encoder, and keep what the decoder will see of them.

        tokens int64 [T]; slots, positions int32 [T]; the tokens of a prompt lie together and in order. Every expert
        that they need is asked for once.
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
        """The layers of one stack, one after the other. Returns the residual stream, float32 [T, D].

        What is no number goes through: whoever takes a token from the logits refuses it.
        """
        one_call = self._token_experts(tokens, choice)
        if preload := self.advisor.preload(tokens, layers):
            self.prefetch(preload)
        if one_call is not None:
            return self._run_token(layers, tokens, places, kv, one_call)
        with np.errstate(all="ignore"):
            return self._run_steps(layers, tokens, places, kv, choice)

    def _run_token(
        self, layers: range, tokens: np.ndarray, places: kernels.TokenPlaces, kv: KVCache, one_call: TokenExperts
    ) -> np.ndarray:
        """Run one token with one call of the extension for the experts of each layer."""
        hidden = self._embed(tokens)
        times, blocks = self.times, self.dense_part.blocks
        for index in layers:
            started_ns = time.perf_counter_ns()
            blocks[index](hidden, places, kv.keys[index], kv.values[index])
            times.dense_ns += time.perf_counter_ns() - started_ns
            one_call.run(index, hidden, times, self.prefetch_quality, self.trace)
        return hidden

    def _run_steps(
        self, layers: range, tokens: np.ndarray, places: kernels.TokenPlaces, kv: KVCache, choice: ExpertChoice | None
    ) -> np.ndarray:
        """Run any tokens; each layer routes, reads and computes in steps."""
        hidden = self._embed(tokens)
        chosen = [np.empty((len(tokens), 0), np.int32)] * layers.start
        sequences = 1 if len(tokens) == 1 else len(set(places.slots.tolist()))
        state = PassState(0, hidden, chosen, tokens, choice, sequences)
        predicted: list[int] | None = None
        try:
            for index in layers:
                started_ns = time.perf_counter_ns()
                self.dense_part.blocks[index](hidden, places, kv.keys[index], kv.values[index])
                if index in self._cross:
                    self._attend_to_prompt(index, hidden, places.slots, kv)
                self.times.dense_ns += time.perf_counter_ns() - started_ns
                state.layer = index
                predicted = self._experts_layer(state, predicted, places.slots)
        finally:  # between passes this memory is the experts'
            self._parts = np.empty(0, np.float32)
        return hidden

    def _token_experts(self, tokens: np.ndarray, choice: ExpertChoice | None) -> TokenExperts | None:
        """What computes the experts of this pass in one call a layer; None where they go step by step."""
        found = self.token_experts
        if found is None or not found.fits(self.cache, self.advisor):
            return None
        if len(tokens) != 1 or choice is not None or self.accelerator is not None:
            found.forget_guesses()
            return None
        found.begin()
        return found

    def _embed(self, tokens: np.ndarray) -> np.ndarray:
        hidden = np.empty((len(tokens), self.spec.hidden_size), np.float32)
        kernels.dequantize_rows(self.dense["embedding"], tokens, hidden)
        if self.spec.embedding_scale != 1.0:
            with np.errstate(all="ignore"):
                hidden *= np.float32(self.spec.embedding_scale)
        return hidden

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Rows of the residual stream [n, D] to logits float32 [n, V]."""
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
        """Logits of a head with a bias or a scale, or without the extension."""
        out = self.dense_part.head(self._norms["final_norm"](hidden))
        if self._head_bias is not None:
            out += self._head_bias
        if self.spec.logits_scale != 1.0:
            out *= np.float32(self.spec.logits_scale)
        return out

    def _attend_to_prompt(self, index: int, hidden: np.ndarray, slots: np.ndarray, kv: KVCache) -> None:
        normed = self._norms[f"layers.{index}.cross_attention_norm"](hidden)
        ends = kv.prompt_lengths[slots]
        self._add(hidden, self._cross[index](normed, slots, ends, kv.cross_keys[index], kv.cross_values[index]))

    def _add(self, hidden: np.ndarray, out: np.ndarray) -> None:
        """Into the residual stream."""
        if self.spec.residual_scale != 1.0:
            out *= np.float32(self.spec.residual_scale)
        hidden += out

    def _experts_layer(self, state: PassState, predicted: list[int] | None, slots: np.ndarray) -> list[int] | None:
        """Route, advise, compute, add in router-rank order. Returns the candidates predicted for the next layer."""
        index, hidden = state.layer, state.hidden
        started_ns = time.perf_counter_ns()
        normed = self._norms[f"layers.{index}.experts_norm"](hidden)
        asked, weights = self._route(state, normed, slots)
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
                self.trace.add_layer(index, state.chosen[index], advice, state.logits, state.foreseen, times)
            if state.choice is not None:
                state.choice.requested(index, list(asked), advice)
            return self.absent(advice)

        has_nobody = state.choice is not None or bool(self.spec.layers[index].experts.router.capacity)
        self._compute(index, asked, normed, weights, hidden, look_ahead, has_nobody)
        return following

    def _route(
        self, state: PassState, normed: np.ndarray, slots: np.ndarray
    ) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """The stored experts that the layer asks for, each with its places (token x top-k + rank), and the weights."""
        index, router = state.layer, self._routers[state.layer]
        first, experts = self._first_expert[index], self.spec.layers[index].experts
        if router is None:
            state.chosen.append(np.empty((len(normed), 0), np.int32))
            state.logits = None
            return {}, np.empty((len(normed), 0), np.float32)
        return choose_experts(state, experts, first, router.rule, router.logits(normed), slots)

    def _compute(
        self,
        index: int,
        asked: dict[int, np.ndarray],
        normed: np.ndarray,
        weights: np.ndarray,
        hidden: np.ndarray,
        look_ahead: Callable[[], list[int]],
        has_nobody: bool,
    ) -> None:
        """asked: stored experts and their places. look_ahead: what to read behind them.

        has_nobody: whether some places may be computed by none of them.
        """
        shared, chosen_count = self.shared_experts.get(index), weights.shape[1]
        if shared is not None:  # one more rank, behind the routed ones
            weights = np.concatenate([weights, shared.weights(normed)], axis=1)
        # What nobody computes is added as well, with weight 0.
        parts = self._outputs((len(hidden), weights.shape[1], hidden.shape[1]))
        if has_nobody:
            parts.fill(0)
        is_one = len(hidden) == 1
        split = None if self.accelerator is None else self.accelerator.begin(asked, normed, chosen_count, index)
        wanted, together = (asked, is_one) if split is None else (split.wanted, is_one and split.comes_together)
        if split is not None and split.has_shared:
            shared = None
        # Closed at once if a kernel raises: leases must not wait for the garbage collector.
        with closing(self.cache.stream(index, list(wanted), look_ahead, together=together)) as ready:
            for found in ready:
                started_ns = time.perf_counter_ns()
                experts = found if split is None else split.take(found)
                if is_one and experts:
                    ranks = np.concatenate([asked[expert] for expert in experts])
                    kernels.experts_of_token([self.experts[expert] for expert in experts], normed, ranks, parts)
                elif experts:
                    self._compute_expert(experts[0], asked[experts[0]], chosen_count, normed, parts)
                self.times.experts_ns += time.perf_counter_ns() - started_ns
                if shared is not None:  # while misses are read
                    self._compute_shared(shared, normed, parts)
                    shared = None
        if shared is not None:
            self._compute_shared(shared, normed, parts)
        if split is not None:
            started_ns = time.perf_counter_ns()
            split.finish(parts)
            self.times.experts_ns += time.perf_counter_ns() - started_ns
        out = np.empty_like(hidden)
        kernels.combine(parts, weights, out)
        self._add(hidden, out)

    def _outputs(self, shape: tuple[int, int, int]) -> np.ndarray:
        """Experts' outputs, float32 [T, ranks, D], unspecified: one place for all layers of a pass, cleared once."""
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
        """One expert over its tokens. places: token x top-k + rank."""
        tokens, ranks = (places // top_k).astype(np.int32), (places % top_k).astype(np.int32)
        kernels.expert_ffn(self.experts[expert], normed, tokens, ranks, parts)
