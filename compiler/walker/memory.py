"""What a compile takes of memory, said before it starts: all at once, or one layer at a time.

Estimates from shapes alone, in bytes; tests hold them against a control group's count.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from ..reference.network import TOKENS_PER_FORWARD
from ..sensitivity.fisher import SKETCHES, TOKENS_PER_BACKWARD, gradient_bytes
from .gradients import GRADIENT_TOKENS
from .sweep import PROBE_TOKENS

PROCESS_BYTES = 700 << 20
"""Python with torch, transformers, datasets and matplotlib loaded: 0.45 GiB measured, and what allocators keep."""
_FLOAT = 4
_HALF = 2


def layer_weights(model: ModelSpec, layer: int) -> int:
    """Weights of one decoder layer."""
    dense = sum(prod(shape) for name, shape in model.dense_shapes().items() if name.startswith(f"layers.{layer}."))
    return dense + _expert_weights(model, layer) * model.layers[layer].experts.count


def _expert_weights(model: ModelSpec, layer: int) -> int:
    return sum(prod(model.unit_shape(layer, projection)) for projection in model.layers[layer].experts.projections)


def moment_values(model: ModelSpec, layer: int) -> int:
    """Values of the second moments of a layer."""
    experts = model.layers[layer].experts
    return experts.count * (model.hidden_size**2 + experts.width**2)


def variant_count(model: ModelSpec) -> int:
    """Variants that a sweep carries at most: of each layer its attention, its experts, a shared one where it has it."""
    return sum(3 if layer.shared is not None else 2 for layer in model.layers)


def whole_bytes(model: ModelSpec, specs: Sequence[QuantSpec], threads: int) -> int:
    """Peak of a compile that holds the model in float32, its moments, a code per weight and format, and graphs."""
    weights = sum(layer_weights(model, layer) for layer in range(model.num_layers))
    outside = sum(prod(shape) for name, shape in model.dense_shapes().items() if not name.startswith("layers."))
    experts = sum(
        _expert_weights(model, layer) * model.layers[layer].experts.count for layer in range(model.num_layers)
    )
    moments = sum(moment_values(model, layer) for layer in range(model.num_layers))
    formats = sum(spec.bitwidth < 16 for spec in specs)
    fixed = PROCESS_BYTES + _FLOAT * (weights + outside + moments + experts) + formats * experts
    return fixed + gradient_bytes(model, threads)


def streamed_bytes(model: ModelSpec, tokens: int, specs: Sequence[QuantSpec], threads: int) -> int:
    """Peak of a compile that holds one layer. tokens: of calibration and of scored texts."""
    hidden, layers = model.hidden_size, model.num_layers
    moments = _FLOAT * max(moment_values(model, layer) for layer in range(layers))
    variants = variant_count(model)
    states = _FLOAT * hidden * (tokens + PROBE_TOKENS * (variants + 2))
    vocabulary = (_HALF + _FLOAT) * model.vocab_size * hidden
    # A batch: attention and experts of its tokens.
    widest = max(model.layers[layer].experts.width * model.layers[layer].experts.top_k for layer in range(layers))
    batch = _FLOAT * TOKENS_PER_FORWARD * (12 * hidden + 3 * widest)
    at_work = moments + 2 * threads * max(batch, quantizing_bytes(model, specs))
    return PROCESS_BYTES + _slot_bytes(model) + states + max(vocabulary, at_work)


def gradients_bytes(model: ModelSpec, tokens: int, specs: Sequence[QuantSpec], threads: int) -> int:
    """Peak while gradients go back through one layer, the texts' residual streams and gradients held beside it.

    tokens: of scored texts, whose streams wait to be measured.
    """
    hidden, layers = model.hidden_size, range(model.num_layers)
    streams = _FLOAT * hidden * (GRADIENT_TOKENS * (3 + 2 * SKETCHES) + tokens)
    vocabulary = (_HALF + _FLOAT) * model.vocab_size * hidden
    widest = max(model.layers[at].experts.top_k * (2 * hidden + 4 * model.layers[at].experts.width) for at in layers)
    graph = _FLOAT * TOKENS_PER_BACKWARD * (12 * hidden + widest + 4 * model.vocab_size)
    return (
        PROCESS_BYTES + _slot_bytes(model) + vocabulary + streams + threads * (graph + quantizing_bytes(model, specs))
    )


def _slot_bytes(model: ModelSpec) -> int:
    """A layer of every kind stays loaded, see slot.py."""
    kinds: dict[tuple[bool, int], int] = {}
    for at, layer in enumerate(model.layers):
        kind = bool(layer.experts.count), layer.attention.sliding_window
        kinds[kind] = max(kinds.get(kind, 0), layer_weights(model, at))
    return _FLOAT * sum(kinds.values())


def quantizing_bytes(model: ModelSpec, specs: Sequence[QuantSpec]) -> int:
    """What one expert takes while it is quantized: float copies, codes of every format, factors of its moments."""
    expert = max(_expert_weights(model, layer) for layer in range(model.num_layers)) * (6 * _FLOAT + 2 * len(specs))
    return expert + 5 * _FLOAT * max(model.hidden_size, *(layer.experts.width for layer in model.layers)) ** 2


def certifying_bytes(model: ModelSpec, tokens: int) -> int:
    """The least that the runtime needs to certify, and the compile around it. tokens: of scored texts.

    Dense weights and the experts of one token at 16 bits, keys and values of the runtime's default context, its passes.
    """
    dense = sum(prod(shape) for shape in model.dense_shapes().values())
    experts = max(_expert_weights(model, at) * layer.experts.top_k for at, layer in enumerate(model.layers))
    cache = model.kv_bytes_per_position * model.default_context
    widest = max(layer.experts.top_k * model.hidden_size + 2 * layer.experts.width for layer in model.layers)
    scratch = _FLOAT * (MAX_PASS_TOKENS * (9 * model.hidden_size + widest) + 64 * model.vocab_size)
    return PROCESS_BYTES + _FLOAT * model.hidden_size * tokens + _HALF * (dense + experts) + cache + scratch
