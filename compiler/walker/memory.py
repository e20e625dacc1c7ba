"""The memory of a compile, known before it starts: what a loaded layer takes, which layers stay, how many texts pass.

Estimates in bytes, from shapes alone. Tests compare them with the count of a control group.
One layer at a time is loaded, computed and quantized. The 16-bit weights of the first layers may stay in memory, so
that later passes read them from there. Which layers stay changes no bit of a result. The size of the texts does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from moec.manifests.model import ModelSpec, RopeSpec
from moec.manifests.quant import QuantSpec
from moec.manifests.runtime_limits import ANSWER_SLOTS, MAX_PASS_TOKENS
from moec.profiles.memory_floor import LOGITS_ROWS_PER_SLOT, kv_bytes
from moec.profiles.weight_counts import active_weights, expert_weights, layer_weights, outside_weights

from ..effort import Effort
from .texts import LOGITS_AT_ONCE, LOGITS_PER_CHUNK, SKETCHES, TOKENS_PER_BACKWARD, TOKENS_PER_FORWARD

COMPILE_PROCESS_BYTES = 700 << 20
"""Python with torch, transformers and datasets loaded: 0.45 GiB measured, and the reserve of allocators."""
_FLOAT = 4
_HALF = 2


LayerKind = tuple[bool, bool, type | None, int, RopeSpec | None, int]
"""Whether a layer routes, whether it decodes, its recurrent mixer, its window, its rotary embedding, and its heads.

Layers of a kind differ only in their weights, so one torch module computes all of them.
"""


def layer_kind(model: ModelSpec, layer: int) -> LayerKind:
    """Return the kind of a layer."""
    spec = model.layers[layer]
    is_routed, decodes, attention = bool(spec.experts.count), layer >= model.first_decoder_layer, spec.attention
    if attention is None:
        return is_routed, decodes, type(spec.recurrent), 0, None, 0
    return is_routed, decodes, None, attention.sliding_window, attention.rope, attention.num_heads


def variant_count(model: ModelSpec) -> int:
    """Return the maximum number of variants of a sweep: attention, experts, and a shared expert of each layer."""
    return sum(3 if layer.shared is not None else 2 for layer in model.layers)


def sweep_bytes(model: ModelSpec, tokens: int, probe_tokens: int, specs: Sequence[QuantSpec], threads: int) -> int:
    """Return the peak of a sweep.

    tokens: of calibration and of scored texts.
    probe_tokens: of the texts of each variant.
    """
    hidden, layers = model.hidden_size, model.num_layers
    moments = _FLOAT * max(layer.experts.count * (hidden**2 + layer.experts.width**2) for layer in model.layers)
    states = _FLOAT * hidden * (tokens + probe_tokens * (variant_count(model) + 2))
    vocabulary = (_HALF + _FLOAT) * model.vocab_size * hidden
    # A batch: attention and experts of its tokens.
    widest = max(model.layers[layer].experts.width * model.layers[layer].experts.top_k for layer in range(layers))
    batch = _FLOAT * TOKENS_PER_FORWARD * (12 * hidden + 3 * widest)
    at_work = moments + 2 * threads * max(batch, quantizing_bytes(model, specs))
    if model.encoder is not None:  # the decoder's tokens have yet to be embedded, by the rounded embedding too
        at_work += _FLOAT * model.vocab_size * hidden
    return COMPILE_PROCESS_BYTES + _loaded_bytes(model) + states + max(vocabulary, at_work)


def gradients_bytes(model: ModelSpec, tokens: int, scored_tokens: int, specs: Sequence[QuantSpec], threads: int) -> int:
    """Return the peak while gradients go back through one layer.

    tokens: of the texts of the gradients.
    scored_tokens: of scored texts, whose residual streams are kept for later measurements.
    """
    hidden, layers = model.hidden_size, range(model.num_layers)
    streams = _FLOAT * hidden * (tokens * (3 + 2 * SKETCHES) + scored_tokens)
    vocabulary = (_HALF + _FLOAT) * model.vocab_size * hidden
    widest = max(model.layers[at].experts.top_k * (2 * hidden + 4 * model.layers[at].experts.width) for at in layers)
    # Logits, their probabilities, and the random vectors of a sketch, for a part of the tokens.
    logits = 7 * max(model.vocab_size, min(TOKENS_PER_BACKWARD * model.vocab_size, LOGITS_PER_CHUNK))
    graph = _FLOAT * (TOKENS_PER_BACKWARD * (12 * hidden + widest) + logits)
    return (
        COMPILE_PROCESS_BYTES
        + _loaded_bytes(model)
        + vocabulary
        + streams
        + threads * (graph + quantizing_bytes(model, specs))
    )


def _loaded_bytes(model: ModelSpec) -> int:
    """Return the memory of loaded layers in float32: one of every kind, see loaded_layer.py."""
    kinds: dict[LayerKind, int] = {}
    for at in range(model.num_layers):
        kind = layer_kind(model, at)
        kinds[kind] = max(kinds.get(kind, 0), layer_weights(model, at))
    return _FLOAT * sum(kinds.values())


def quantizing_bytes(model: ModelSpec, specs: Sequence[QuantSpec]) -> int:
    """Return the memory of quantizing one expert: float copies, codes of every format, factors of its moments."""
    expert = max(expert_weights(model, layer) for layer in range(model.num_layers)) * (6 * _FLOAT + 2 * len(specs))
    return expert + 5 * _FLOAT * max(model.hidden_size, *(layer.experts.width for layer in model.layers)) ** 2


def certifying_bytes(model: ModelSpec, scored_tokens: int) -> int:
    """Return the least memory of the runtime that certifies, with the compile around it.

    It has dense weights and the experts of one token at 16 bits, keys and values of the default context, and its
    passes.
    scored_tokens: of scored texts.
    """
    dense = sum(prod(shape) for shape in model.dense_shapes().values())
    experts = max(expert_weights(model, at) * layer.experts.top_k for at, layer in enumerate(model.layers))
    cache = kv_bytes(model, model.default_context)
    widest = max(layer.experts.top_k * model.hidden_size + 2 * layer.experts.width for layer in model.layers)
    scratch = _FLOAT * MAX_PASS_TOKENS * (9 * model.hidden_size + widest)
    scratch += 2 * _FLOAT * LOGITS_ROWS_PER_SLOT * ANSWER_SLOTS * model.vocab_size  # logits, and a copy
    states = _FLOAT * model.hidden_size * scored_tokens
    return COMPILE_PROCESS_BYTES + states + _HALF * (dense + experts) + cache + scratch


def certificate_bytes(model: ModelSpec) -> int:
    """Return what a certificate holds in addition to the runtime: the output matrix, and logits of the checkpoint."""
    logits = max(LOGITS_AT_ONCE, model.vocab_size) + 2 * LOGITS_PER_CHUNK
    return _FLOAT * logits + _HALF * model.vocab_size * model.hidden_size + (64 << 20)


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of the texts that pass through the layers, in tokens. They bound the residual streams in memory.

    calibration: tokens of all calibration texts.
    probe: tokens of the texts on which the error of each layer is measured.
    gradients: tokens of the texts of the gradients.
    answers: tokens of the validation texts of all tasks, prompts included.
    held_out: tokens of the held-out texts of one task, prompts included.
    """

    calibration: int
    probe: int
    gradients: int
    answers: int
    held_out: int

    def scored(self, tasks: int) -> int:
        """Return the tokens of all scored texts."""
        return self.answers + tasks * self.held_out


QUICK_TEXTS = TextLimits(calibration=16_384, probe=512, gradients=8_192, answers=8_192, held_out=16_384)
"""Texts of a quick compile."""
SMALL_TEXTS = TextLimits(calibration=65_536, probe=512, gradients=16_384, answers=16_384, held_out=16_384)
"""Texts of a compile whose memory does not hold the model, or whose model is large (LARGE_WORK)."""
LARGE_TEXTS = TextLimits(calibration=131_072, probe=2_048, gradients=16_384, answers=65_536, held_out=65_536)
"""Texts of other compiles."""
LARGE_WORK = 15 * 10**12
"""Most multiplications of one KL on the answers of LARGE_TEXTS: up to two minutes on two cores.

A model that needs more is large. Its KLs take fewer answers, and swaps and comparisons are made on request only: they
would take most of the compile.
"""


def is_large(model: ModelSpec) -> bool:
    """Return whether the KL of a plan on the answers of LARGE_TEXTS takes more than LARGE_WORK."""
    return active_weights(model) * LARGE_TEXTS.answers > LARGE_WORK


def usual_texts(model: ModelSpec, effort: Effort) -> TextLimits:
    """Return the texts of a compile whose memory holds the model."""
    if effort == "quick":
        return QUICK_TEXTS
    return SMALL_TEXTS if effort == "default" and is_large(model) else LARGE_TEXTS


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """The layers of a model that stay in memory between the passes of a compile.

    count: number of layers, from the first, whose 16-bit weights stay.
    holds_model: all of them do, with room for `texts`.
    texts: sizes of the texts.
    """

    count: int
    holds_model: bool
    texts: TextLimits = SMALL_TEXTS

    @property
    def has_cheap_plans(self) -> bool:
        """True if the KL of a plan takes so little time that swaps and comparisons are made unasked."""
        return self.texts == LARGE_TEXTS


NOTHING_KEPT = KeptLayers(0, holds_model=False)


def resident_bytes(model: ModelSpec, layers: int) -> int:
    """Return the memory of the 16-bit weights of the first layers. The embedding and the norms stay with the first."""
    outside = outside_weights(model) if layers else 0
    return 2 * (outside + sum(layer_weights(model, layer) for layer in range(layers)))


def fitting_layers(model: ModelSpec, free_bytes: int) -> int:
    """Return how many layers, from the first, fit into some memory."""
    count = 0
    while count < model.num_layers and resident_bytes(model, count + 1) <= free_bytes:
        count += 1
    return count
