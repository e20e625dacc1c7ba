"""Sizes and speeds of a model at several bitwidths on several machines, from shapes alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod

import numpy as np

from moec.manifests.model import ModelSpec, keeps_16_bits
from moec.profiles.device import DeviceProfile
from moec.profiles.memory_floor import FixedMemory, kv_bytes, process_bytes, scratch_bytes, tables_bytes
from moec.profiles.predict import compute_ns, expected_misses, storage_ns
from moec.profiles.weight_counts import all_weights, expert_weights

from .config_file import ConfigFile
from .routing import COMMON_SHARE, HIGH_SHARE, LOW_SHARE, popularity

BITS = (2.3, 3.0, 4.0, 4.5, 8.0)
"""Bits of a weight of an expert, scales included."""
LEAST_DENSE_BITS = 4.5
"""Bits of other matrices, which every token reads: no fewer than these."""
_TOKENIZER_BYTES_PER_TOKEN = 80
"""tokenizer.json of Qwen3 has 75 bytes for each token, that of gpt-oss-20b 139."""
_HALF = 2
_PRODUCTS_PER_WEIGHT = 126_000
"""Of an expert: 2,036 s for 1.61 billion at 100 billion products a second (two cores of Zen 4)."""
_DISK_PER_WEIGHT = 5.0
"""Bytes: 8.7 GiB for 1.88 billion weights."""
_PRODUCT_ROWS = 1024
SHARES = (LOW_SHARE, COMMON_SHARE, HIGH_SHARE)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Numbers of weights.

    routed, dense: in routed experts, and all others.
    routed_per_token, dense_per_token: those that a token is multiplied with.
    experts: number of routed experts in all layers.
    """

    routed: int
    dense: int
    routed_per_token: int
    dense_per_token: int
    experts: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """Prediction for a machine, with a model at a bitwidth.

    needed_bytes: least `--memory`.
    held_share: share of the experts in memory; None: the model does not fit.
    hit_rate: share of a token's experts that are in memory.
    tokens_per_s: single tokens; lower and upper end of the range.
    """

    needed_bytes: int
    held_share: float | None = None
    hit_rate: float | None = None
    tokens_per_s: float | None = None
    slowest: float | None = None
    fastest: float | None = None


@dataclass(frozen=True, slots=True)
class BitsRow:
    """A bitwidth. disk_bytes: size of the bundle. outlooks: one for each machine, in order."""

    bits: float
    disk_bytes: int
    outlooks: tuple[Outlook, ...]

    def to_plain(self) -> dict[str, object]:
        """Return plain values for `--json`."""
        return {**asdict(self), "outlooks": [asdict(each) for each in self.outlooks]}


@dataclass(frozen=True, slots=True)
class CompileOutlook:
    """A quick compile to a loss on this machine. disk_bytes: free space that it needs, without the checkpoint."""

    quick_seconds: float
    disk_bytes: int


def compile_outlook(counts: Parameters, products_per_s: float) -> CompileOutlook:
    """Scale the measured quick compile of the yardstick of four layers by weights and by the rate of products.

    products_per_s: as `measure_products` returns.
    """
    weights = counts.routed + counts.dense
    return CompileOutlook(counts.routed * _PRODUCTS_PER_WEIGHT / products_per_s, round(_DISK_PER_WEIGHT * weights))


def measure_products() -> float:
    """Return the products of float32 numbers in a second, by all threads, in products of matrices."""
    left, right = np.ones((_PRODUCT_ROWS, 2 * _PRODUCT_ROWS), np.float32), np.ones((2 * _PRODUCT_ROWS,) * 2, np.float32)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - started)
    return left.size * right.shape[1] / best


def count_parameters(model: ModelSpec) -> Parameters:
    """Count the weights of a model."""
    routed = sum(expert_weights(model, layer) * model.layers[layer].experts.count for layer in model.expert_layers)
    used = sum(expert_weights(model, layer) * model.reads_per_token(layer) for layer in model.expert_layers)
    return Parameters(routed, all_weights(model) - routed, used, _decoded_weights(model), len(model.expert_keys()))


def estimate(
    model: ModelSpec, files: ConfigFile, context: int, machines: Sequence[DeviceProfile], bits: Sequence[float] = BITS
) -> list[BitsRow]:
    """Return a row for each bitwidth.

    machines: profiles whose budget is the memory of a run.
    """
    return [_row(model, files, context, machines, each) for each in bits]


def _row(model: ModelSpec, files: ConfigFile, context: int, machines: Sequence[DeviceProfile], bits: float) -> BitsRow:
    dense_bits = max(bits, LEAST_DENSE_BITS)
    shapes = model.dense_shapes()
    dense = round(sum(_dense_bytes(name, shape, dense_bits) for name, shape in shapes.items()))
    decoded = sum(_dense_bytes(name, shape, dense_bits) for name, shape in shapes.items() if _is_read(model, name))
    sizes = {layer: expert_weights(model, layer) * bits / 8 for layer in model.expert_layers}
    experts = sum(size * model.layers[layer].experts.count for layer, size in sizes.items())
    tokenizer = files.tokenizer_bytes or _TOKENIZER_BYTES_PER_TOKEN * model.vocab_size
    fixed = FixedMemory(
        process_bytes=process_bytes(model, len(model.expert_keys()), tokenizer),
        dense_bytes=dense,
        kv_bytes=kv_bytes(model, context),
        scratch_bytes=scratch_bytes(model, 1, context),
        tables_bytes=tables_bytes(model),
        minimum_expert_bytes=round(max(size * model.layers[layer].experts.top_k for layer, size in sizes.items())),
    )
    used = {layer: size * model.reads_per_token(layer) for layer, size in sizes.items()}
    outlooks = []
    for machine in machines:
        room = machine.memory_budget_bytes - fixed.fixed_bytes
        if machine.memory_budget_bytes < fixed.floor_bytes:
            outlooks.append(Outlook(fixed.floor_bytes))
            continue
        held, wanted = min(1.0, room / experts), sum(used.values())
        missed = {share: expected_misses(_reads(model, sizes, share), room) for share in SHARES}
        computing = compute_ns(machine, round(decoded + wanted))
        reading = {share: storage_ns(machine, *of_share) for share, of_share in missed.items()}
        slowest, fastest = computing + reading[LOW_SHARE], max(computing, reading[HIGH_SHARE])
        usual = (computing + reading[COMMON_SHARE] + max(computing, reading[COMMON_SHARE])) / 2
        hits = 1 - missed[COMMON_SHARE][0] / wanted if wanted else 1.0
        outlooks.append(Outlook(fixed.floor_bytes, held, hits, 1e9 / usual, 1e9 / slowest, 1e9 / fastest))
    return BitsRow(bits, round(dense + experts), tuple(outlooks))


def _reads(model: ModelSpec, sizes: dict[int, float], common_share: float) -> list[tuple[int, float]]:
    """Return bytes and reads per token of each routed expert."""
    found = []
    for layer, size in sizes.items():
        experts, reads = model.layers[layer].experts, model.reads_per_token(layer)
        shares = popularity(experts.count, experts.top_k, common_share)
        found += [(round(size), reads * share) for share in shares]
    return found


def _dense_bytes(name: str, shape: tuple[int, ...], bits: float) -> float:
    return prod(shape) * (_HALF if keeps_16_bits(name, shape) else bits / 8)


def _is_read(model: ModelSpec, name: str) -> bool:
    """Return whether a token reads all of a dense weight. Of an embedding that makes no logits it reads a row."""
    return model.is_decoded_with(name) and (name != "embedding" or model.tie_embeddings)


def _decoded_weights(model: ModelSpec) -> int:
    return sum(prod(shape) for name, shape in model.dense_shapes().items() if _is_read(model, name))


def with_memory(machine: DeviceProfile, memory_bytes: int) -> DeviceProfile:
    """Return a machine with the same rates and another memory."""
    return replace(machine, memory_budget_bytes=memory_bytes)
