"""The memory that a run needs in addition to cached experts: one formula for `run`, `inspect` and the compiler.

The functions depend on the model and on the manifest. Only the runtime considers the current memory of its process.
"""

from __future__ import annotations

from dataclasses import dataclass

from moec.manifests.model import AttentionSpec, ModelSpec
from moec.manifests.recurrent import state_bytes
from moec.manifests.runtime_limits import FEW_ANSWER_SLOTS, MAX_PASS_TOKENS

LOGITS_ROWS_PER_SLOT = 4
"""Rows whose logits are computed at once for each slot. Other rows of a pass wait, which limits the memory for a large
vocabulary.
"""

PROCESS_SLACK_BYTES = 16 << 20
"""Growth of interpreter, allocator and thread stacks in addition to the parts that are counted.

Measured on the example (a prompt of 395 tokens, 64 decoded tokens, 2 threads): 6 MiB. The value is more than double.
"""

PROCESS_BYTES = 72 << 20
"""Interpreter, numpy, tokenizers, kernels, and slack. It exceeds the need of `moec run`: 44 MiB and slack on x86-64.

A floor is the same number wherever it is computed, as long as the process needs no more than this.
"""

TORCH_PROCESS_BYTES = 320 << 20
"""PROCESS_BYTES with torch loaded for an accelerator.

Measured with its CPU build: 240 MiB. Not measured with CUDA's.
"""

EXPERT_ENTRY_BYTES = 5 << 10
"""Manifest, header and cache entries of one stored expert. Measured with engines of 256 and 8,192 experts: 4.2 KiB."""

STATIC_CHOICE_BYTES = 160
"""One number of static routing while the manifest is read, which is the peak.

Measured for 4,000,000 numbers: 140 bytes.
"""

TOKENIZER_FACTOR = 13
"""Memory of a tokenizer for each byte of `tokenizer.json`.

Measured with tokenizers 0.22 and the indentation of checkpoints: BPE of 60,000 words 12.6, WordPiece 13.9, added tokens
4.7.
"""

UNIGRAM_FACTOR = 23
"""TOKENIZER_FACTOR of a Unigram tokenizer, as in models with an encoder: a tree of tables. Measured: 22.2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMemory:
    """Bytes of a run that no option of the expert cache changes.

    process_bytes: interpreter, libraries, tokenizer, manifest.
    dense_bytes: dense weights.
    kv_bytes: keys and values of a whole context in all slots.
    scratch_bytes: the longest pass.
    tables_bytes: the tables that the prefetcher keeps, with the peak while they are read, and learned routers.
    minimum_expert_bytes: the largest top_k experts of one layer.
    accelerator_bytes: host memory that an accelerator needs.
    """

    process_bytes: int
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    tables_bytes: int
    minimum_expert_bytes: int
    accelerator_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of everything but the experts."""
        parts = self.process_bytes + self.dense_bytes + self.kv_bytes + self.scratch_bytes
        return parts + self.tables_bytes + self.accelerator_bytes

    @property
    def floor_bytes(self) -> int:
        """The least `--memory` that works."""
        return self.fixed_bytes + self.minimum_expert_bytes


def process_bytes(
    model: ModelSpec, stored_experts: int, tokenizer_file_bytes: int, *, has_accelerator: bool = False
) -> int:
    """Return the most bytes of a process of `moec run` without weights, caches and working memory.

    stored_experts: entries of the manifest, low versions included.
    tokenizer_file_bytes: size of `tokenizer.json`.
    """
    factor = TOKENIZER_FACTOR if model.encoder is None else UNIGRAM_FACTOR
    routers = (layer.experts.router for layer in model.layers)
    static = sum(len(router.static.experts) for router in routers if router.static is not None)
    process = TORCH_PROCESS_BYTES if has_accelerator else PROCESS_BYTES
    entries = EXPERT_ENTRY_BYTES * stored_experts + STATIC_CHOICE_BYTES * static
    return process + entries + factor * tokenizer_file_bytes


def tables_bytes(model: ModelSpec, path_file_bytes: int = 0) -> int:
    """Return the bytes of the calibration tables.

    path_file_bytes: size of `tables.safetensors` if the prefetcher reads the path dictionary, else 0. Keys are packed
        into new memory: pairs from 12 bytes into 8, sets into half. The rest of the file is used unchanged.
    """
    experts = max(layer.experts.count for layer in model.layers)
    # Popularity as uint32, and as float64 in a predictor.
    return 12 * model.num_layers * experts + 2 * path_file_bytes


def answers_kv_bytes(room_bytes: int, experts_bytes: int, slot_bytes: int) -> int:
    """Return the part of a room for experts, keys and values that keys and values of many answers take.

    They leave room for all experts. Where FEW_ANSWER_SLOTS do not fit next to these, they take half.
    slot_bytes: keys and values of one answer.
    """
    spare = room_bytes - experts_bytes
    return spare if spare >= FEW_ANSWER_SLOTS * slot_bytes else room_bytes // 2


WINDOW_STEP = 256
"""Positions outside a sliding window whose memory goes back at once."""


def held_positions(model: ModelSpec, attention: AttentionSpec, context: int) -> int:
    """Return the most positions of a context that a slot holds between passes in a layer.

    A layer with a sliding window holds two windows of the largest size: the last one, and one before a kept position.
    """
    window = max(other.sliding_window for other in model.attentions)
    return min(context, 2 * window + WINDOW_STEP) if attention.sliding_window else context


def kv_bytes(model: ModelSpec, context: int, slots: int = 1, element_bytes: int = 4) -> int:
    """Return the bytes of what `slots` sequences keep of their tokens: keys and values, and recurrent states twice.

    A pass adds its tokens to the positions that layers with windows hold.
    element_bytes: of each number of keys and values. States are float32; the second one is of an earlier position.
    """
    numbers = 0
    for attention in model.cached_attentions:
        held = held_positions(model, attention, context)
        positions = slots * held + min(context - held, MAX_PASS_TOKENS)
        numbers += attention.cache_arrays * attention.cache_heads * attention.cache_size * positions
    return numbers * element_bytes + 2 * model.state_bytes * slots


def longest_pass(model: ModelSpec, slots: int, context: int) -> int:
    """Return the most tokens that a layer computes at once. An encoder computes a prompt of any length in one pass."""
    tokens = min(MAX_PASS_TOKENS, slots * context)
    return tokens if model.encoder is None else max(tokens, context)


def scratch_bytes(model: ModelSpec, slots: int, context: int) -> int:
    """Return the largest working memory of one pass: residual, norms, attention, expert parts and logits, float32."""
    tokens, vocabulary = longest_pass(model, slots, context), model.vocab_size
    # Cosines and sines of every position, once for each kind of rotary embedding.
    kinds = {attention.rope for attention in model.attentions}
    positions = sum(4 * context * spec.rotary_size for spec in kinds if spec is not None)
    # Biases by distance, once for the encoder and once for the decoder.
    for layer in {0, model.first_decoder_layer}:
        attention = model.layers[layer].attention
        if attention is not None and attention.relative_bias is not None:
            positions += 8 * context * attention.num_heads
    # Norms and biases are kept in float32, in addition to their 16-bit form.
    vectors = sum(4 * shape[0] for shape in model.dense_shapes().values() if len(shape) == 1)
    routers = [layer.experts.router for layer in model.layers]
    vectors += sum(4 * len(router.static.experts) for router in routers if router.static is not None)
    # Keys, or a state, of one slot that a beam puts aside.
    parts = [4 * a.cache_heads * a.cache_size * context for a in model.cached_attentions]
    parts += [state_bytes(layer.recurrent, model.hidden_size) for layer in model.layers if layer.recurrent is not None]
    aside = max(parts) if slots > 1 else 0
    # Logits exist twice while a maximum or a softmax is computed.
    logits = 8 * vocabulary * LOGITS_ROWS_PER_SLOT * slots
    return pass_bytes(model, tokens) + logits + positions + vectors + aside


def pass_bytes(model: ModelSpec, tokens: int) -> int:
    """Return the part of `scratch_bytes` that grows with the tokens of a pass."""
    widest = 0
    for layer in model.layers:
        attention, recurrent, experts = layer.attention, layer.recurrent, layer.experts
        if attention is None:
            heads = 0 if recurrent is None else recurrent.scratch_numbers(model.hidden_size)
        elif attention.latent is None:
            heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_size
        else:
            heads = attention.num_heads * (2 * attention.cache_size + 2 * attention.head_size)
        ranks = experts.top_k + (layer.shared is not None)
        width = max(experts.width, layer.shared.width if layer.shared else 0)
        widest = max(widest, heads, ranks * model.hidden_size + 2 * width)
    return 4 * tokens * (5 * model.hidden_size + widest)
