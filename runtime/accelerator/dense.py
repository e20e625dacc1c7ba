"""Dense weights on the device: the device memory they need, and whether moving them is faster.

They are attention with its keys and values, the shared experts and the head.
Norms of the residual stream and routers stay on the CPU, because the CPU needs the routers' choices.
Source: Twiddler, section 3.3: dense weights come before experts. This file is independent of the kind of device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from moec.manifests.attention import attention_shapes
from moec.manifests.bundle import BundleManifest
from moec.manifests.model import ModelSpec
from moec.manifests.quant import UNIT_ALIGNMENT_BYTES, round_up

from .. import kernels
from ..layers.attention import DensePart, MixerBlock
from ..layers.kv_cache import KVCache
from .latency import fit_line, median_ns
from .placement import UNPACKING_BYTES

CHUNK_FLOATS = 1 << 24
"""Most float32 values of scores, and of gathered keys and values, at once: 64 MiB.

The queries of a long prompt are computed in chunks.
"""
HEAD_ROWS = 64
"""Rows whose logits are on the device at once."""
UNPACKED_AT_ONCE = 1 << 22
"""Weights that are unpacked at once during the upload."""
_FLOAT_BYTES = 4
_SAMPLE_TOKENS = (1, 32, 128)
PROMPT_TOKENS, NEW_TOKENS = 512, 128
"""Tokens of the workload that `accelerator-dense=auto` compares: a prompt in one pass, then token by token."""


def dense_bytes(manifest: BundleManifest, tokens: int, slots: int, context: int) -> int:
    """Return an upper bound of the device bytes for dense weights and for passes of this many tokens.

    Weights are kept as float32. Every pass uses them, and unpacking them in each pass would take longer than computing
    on the CPU. Keys and values are counted for all slots and positions.
    """
    model = manifest.model
    shapes = [attention_shapes(attention, model.hidden_size) for attention in model.attentions]
    matrices = [prod(shape) for named in shapes for name, shape in named.items() if name != "attention_norm"]
    attention, head = sum(matrices), model.vocab_size * model.hidden_size
    # The largest matrix is unpacked part by part.
    unpacked = min(max([head, *matrices]), UNPACKED_AT_ONCE + 16 * model.hidden_size)
    kinds = {attention.rope for attention in model.attentions}
    angles = sum(context * rope.rotary_size for rope in kinds if rope is not None)
    cached = model.kv_bytes_per_position * context * slots
    resident_bytes = _FLOAT_BYTES * (attention + head + angles) + cached + shared_bytes(manifest)
    return resident_bytes + max(unpacked * UNPACKING_BYTES, _pass_bytes(model, tokens, context))


def shared_bytes(manifest: BundleManifest) -> int:
    """Return the bytes of the shared experts. They stay packed, and each part is aligned."""
    parts = (".shared_gate", ".shared_up", ".shared_down")
    sizes = [entry.spec.packed_bytes(*entry.shape) for entry in manifest.dense if entry.name.endswith(parts)]
    return sum(round_up(size, UNIT_ALIGNMENT_BYTES) for size in sizes)


def _pass_bytes(model: ModelSpec, tokens: int, context: int) -> int:
    """Return the bytes needed while a pass computes attention or the head."""
    widest = 0
    for attention in model.attentions:
        features = attention.num_heads * max(attention.head_size, attention.cache_size)
        features += 2 * attention.num_kv_heads * max(attention.head_size, attention.cache_size)
        # A query needs three copies of its scores, and copies of keys and values.
        row = context * (3 * attention.num_heads + 4 * attention.cache_heads * attention.cache_size)
        scores = max(row, min(CHUNK_FLOATS, tokens * row))
        widest = max(widest, tokens * (6 * model.hidden_size + 4 * features) + scores)
    head = min(tokens, HEAD_ROWS) * (4 * model.hidden_size + model.vocab_size)
    return _FLOAT_BYTES * max(widest, head)


@dataclass(frozen=True, slots=True)
class DenseOnDevice:
    """Attention and head that the device computes.

    kv: their keys and values, also on the device.
    size_bytes: part of the device budget reserved for all of it.
    """

    part: DensePart
    kv: KVCache
    size_bytes: int


@dataclass(frozen=True, slots=True)
class DenseLatency:
    """Times of one layer's attention in ns: a fixed part, and a part for each token.

    The device times include moving the rows to the device and back.
    """

    cpu_fixed_ns: float
    cpu_token_ns: float
    device_fixed_ns: float
    device_token_ns: float

    @property
    def device_is_faster(self) -> bool:
        """True if the device is faster for a prompt of PROMPT_TOKENS and NEW_TOKENS after it."""
        passes, tokens = 1 + NEW_TOKENS, PROMPT_TOKENS + NEW_TOKENS
        fixed_ns, token_ns = self.device_fixed_ns - self.cpu_fixed_ns, self.device_token_ns - self.cpu_token_ns
        return passes * fixed_ns + tokens * token_ns < 0

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """Return the times as text for the `mode:` line."""
        return (
            f"attention of a layer CPU {self.cpu_fixed_ns / 1e3:.0f} + {self.cpu_token_ns / 1e3:.1f} us a token, "
            f"device {self.device_fixed_ns / 1e3:.0f} + {self.device_token_ns / 1e3:.1f}"
        )


@dataclass(frozen=True, slots=True)
class AttentionSide:
    """Attention of one layer on one side, with the keys and values that it writes."""

    block: MixerBlock
    keys: Any
    values: Any

    def run(self, rows: np.ndarray) -> None:
        """Compute rows [T, D] at the first positions of the first slot. Overwrites the rows and the cache there."""
        positions = np.arange(len(rows), dtype=np.int32)
        self.block(rows, kernels.TokenPlaces(np.zeros_like(positions), positions), self.keys, self.values)


def measure_dense(
    host: AttentionSide, device: AttentionSide, hidden_size: int, context: int, clock_ns: Callable[[], int]
) -> DenseLatency:
    """Time one layer's attention on both sides. Lines are fitted through the medians.

    context: at least 2 positions.
    """
    source = np.random.default_rng(0)
    counts = sorted({min(count, context) for count in _SAMPLE_TOKENS})
    samples = [source.standard_normal((count, hidden_size), np.float32) for count in counts]
    host_ns, device_ns = ([median_ns(partial(side.run, rows), clock_ns) for rows in samples] for side in (host, device))
    return DenseLatency(*fit_line(counts, host_ns), *fit_line(counts, device_ns))
