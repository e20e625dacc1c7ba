"""Write whole bundles from the dataclasses: weights of a chosen kind, correct sizes and digests. And a tiny one."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moec.manifests.bundle import (
    DENSE_NAME,
    MANIFEST_NAME,
    QUALITY_NAME,
    TABLES_NAME,
    BundleManifest,
    CalibrationSummary,
    CostSummary,
    DenseEntry,
    DeviceSummary,
    ExpertEntry,
    FileEntry,
    SourceSummary,
    expert_tensor_name,
    experts_file_name,
    low_experts_file_name,
    unit_offsets,
    version_of,
)
from moec.manifests.codec import encode_manifest
from moec.manifests.model import AttentionSpec, ExpertKey, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, RouterSpec
from moec.manifests.quant import LAYOUT, MXFP4_EXPONENTS, ROWS_PER_BLOCK, QuantSpec, round_up
from moec.manifests.safetensors_header import build_header

BF16, FP16 = QuantSpec.parse("bf16"), QuantSpec.parse("fp16")
KINDS_OF_WEIGHTS = ("numbers", "zeros", "spoiled", "huge", "bytes")
NO_DEVICE = DeviceSummary("none", "0" * 64, 1 << 30, 1 << 20)
Specs = dict[str, QuantSpec]
"""The format of each projection of an expert."""
_SPOILT_HALVES = (0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7BFF, 0x0001)  # inf, -inf, NaN twice, the largest, the smallest
_SPOILT_BF16 = (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0x0001)
_NUMBERS, _HUGE = 0.3, 3e4


@dataclass(frozen=True, slots=True)
class Weights:
    """Makes the bytes of matrices and vectors.

    kind: one of KINDS_OF_WEIGHTS. Codes are always random, except with `zeros`. Scales and floats are ordinary numbers,
        `huge` ones, or `spoiled`: some are infinite, NaN, or as large or small as possible. `bytes` are random.
    """

    source: random.Random
    kind: str = "numbers"

    def matrix(self, rows: int, columns: int, spec: QuantSpec, name: str) -> bytes:
        """Return a packed matrix. name: of the weight, for writers whose bytes follow from it."""
        size = spec.packed_bytes(rows, columns)
        if self.kind == "zeros":
            return bytes(size)
        if self.kind == "bytes":
            return self.source.randbytes(size)
        if spec.bitwidth == 16:
            return self._floats(size // 2, spec)
        blocks, groups = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK, spec.groups(columns)
        data = np.frombuffer(bytearray(self.source.randbytes(size)), np.uint8).reshape(blocks, -1)
        head = spec.block_header_bytes * ROWS_PER_BLOCK
        heads, records = data[:, :head], data[:, head:].reshape(blocks, groups, -1)
        heads[:] = np.frombuffer(self._exponents(heads.size, 103, 118), np.uint8).reshape(heads.shape)
        if spec.is_mxfp4:
            scales = np.frombuffer(self._exponents(blocks * groups * ROWS_PER_BLOCK, 118, 125), np.uint8)
            records[:, :, :ROWS_PER_BLOCK] = scales.reshape(blocks, groups, -1)
        elif not spec.byte_scales:
            count = ROWS_PER_BLOCK * (1 if spec.symmetric else 2)
            scales = np.frombuffer(self._floats(blocks * groups * count, FP16), np.uint8)
            records[:, :, : 2 * count] = scales.reshape(blocks, groups, -1)
        return data.tobytes()

    def vector(self, size: int, spec: QuantSpec, name: str) -> bytes:
        """Return a norm or a bias."""
        if self.kind == "zeros":
            return bytes(2 * size)
        return self.source.randbytes(2 * size) if self.kind == "bytes" else self._floats(size, spec)

    def _exponents(self, count: int, least: int, most: int) -> bytes:
        drawn = [self.source.randint(least, most) for _ in range(count)]
        for at in self._spoiled(count):
            drawn[at] = self.source.choice(MXFP4_EXPONENTS)
        return bytes(drawn)

    def _floats(self, count: int, spec: QuantSpec) -> bytes:
        """Return 16-bit floats."""
        largest = _HUGE if self.kind == "huge" else _NUMBERS
        values = np.array([self.source.uniform(-largest, largest) for _ in range(count)], np.float32)
        if spec.float_type == "float16":
            halves, spoilt = values.astype("<f2").view("<u2"), _SPOILT_HALVES
        else:
            halves, spoilt = (values.view("<u4") >> 16).astype("<u2"), _SPOILT_BF16
        for at in self._spoiled(count):
            halves[at] = self.source.choice(spoilt)
        return halves.tobytes()

    def _spoiled(self, count: int) -> list[int]:
        """Return the indices of values that are not ordinary numbers."""
        if self.kind != "spoiled" or not count or self.source.random() < 0.8:
            return []
        return [self.source.randrange(count) for _ in range(self.source.choice((1, 1, 3)))]


@dataclass(frozen=True, slots=True)
class BundlePlan:
    """Content of a bundle.

    dense: format of every dense weight.
    experts: formats of every routed expert, `q0` if it is left out.
    low: formats of low versions.
    tables: calibration tables by name.
    files: other files by name.
    read_share: expected bytes per token, as a share of the largest possible value.
    calibration_seed: seed of the calibration entry; None: no entry.
    is_dense_reversed: the file of the dense weights has them in another order than the manifest.
    """

    model: ModelSpec
    dense: Specs
    experts: dict[ExpertKey, Specs]
    low: dict[ExpertKey, Specs] = field(default_factory=dict)
    tables: dict[str, np.ndarray] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    name: str = "tiny"
    read_share: float = 1.0
    calibration_seed: int | None = None
    device: DeviceSummary = NO_DEVICE
    is_dense_reversed: bool = False


class _Folder:
    """The files of a new bundle."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self.entries = folder, list[FileEntry]()

    def write(self, name: str, *parts: bytes) -> None:
        """Write one file and record it for the manifest."""
        data = b"".join(parts)
        (self._folder / name).write_bytes(data)
        self.entries.append(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()))


def write_bundle(folder: Path, plan: BundlePlan, weights: Weights) -> BundleManifest:
    """Write the bundle to the new folder, and return its manifest. Raises ValueError if the plan contradicts itself."""
    files = _Folder(folder)
    dense = _write_dense(files, plan, weights)
    experts = _write_experts(files, plan.model, plan.experts, experts_file_name, weights)
    low = _write_experts(files, plan.model, plan.low, low_experts_file_name, weights)
    files.write(TABLES_NAME, tables_file({**empty_tables(plan.model), **plan.tables}))
    for name, data in plan.files.items():
        files.write(name, data)
    seed = plan.calibration_seed
    manifest = BundleManifest(
        format_version=version_of(plan.model, dense, (*experts, *low)),
        producer="tests",
        name=plan.name,
        certified=True,
        layout=LAYOUT,
        model=plan.model,
        device=plan.device,
        cost=_cost(plan, experts, dense),
        calibration=None if seed is None else CalibrationSummary("none", "0" * 64, 1, 2, seed, ("0.1",)),
        source=SourceSummary("none", ()),
        options={},
        required_cpu_features=(),
        dense=dense,
        experts=experts,
        files=tuple(sorted(files.entries, key=lambda entry: entry.name)),
        low_experts=low,
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return manifest


def smaller_than(model: ModelSpec, layer: int, specs: Specs, than: Specs) -> bool:
    """Return whether an expert of the layer takes fewer bytes in these formats."""
    return unit_offsets(model, layer, specs)[1] < unit_offsets(model, layer, than)[1]


def empty_tables(model: ModelSpec) -> dict[str, np.ndarray]:
    """Return the tables of a bundle without calibration."""
    layers, experts = model.num_layers, max(layer.experts.count for layer in model.layers)
    return {
        "popularity": np.zeros((layers, experts), np.uint32),
        "transitions": np.zeros((layers - 1, experts, experts), np.uint32),
        "path.keys": np.zeros((0, 3), np.int32),
        "path.offsets": np.zeros(1, np.int64),
        "path.experts": np.zeros(0, np.uint16),
        "path.counts": np.zeros(0, np.uint32),
    }


def tokenizer_json(vocabulary: int) -> bytes:
    """Return a tokenizer of the words t0, t1, ... Every other word is t0."""
    words = {f"t{token}": token for token in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    plain = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    return json.dumps(plain).encode()


def _write_dense(files: _Folder, plan: BundlePlan, weights: Weights) -> tuple[DenseEntry, ...]:
    tensors, entries = dict[str, tuple[str, tuple[int, ...], bytes]](), list[DenseEntry]()
    for name, shape in plan.model.dense_shapes().items():
        spec = plan.dense[name]
        blob = weights.vector(*shape, spec, name) if len(shape) == 1 else weights.matrix(*shape, spec, name)
        floats = "BF16" if spec.float_type == "bfloat16" else "F16"
        tensors[name] = (floats, shape, blob) if len(shape) == 1 else ("U8", (len(blob),), blob)
        entries.append(DenseEntry(name, shape, spec, xxhash.xxh3_128_hexdigest(blob)))
    order = [*reversed(tensors)] if plan.is_dense_reversed else [*tensors]
    header = build_header({name: tensors[name][:2] for name in order})
    files.write(DENSE_NAME, header, *(tensors[name][2] for name in order))
    return tuple(entries)


def unit_name(layer: int, expert: int, projection: str) -> str:
    return f"{layer}.{expert}.{projection}"


def _expert_blob(model: ModelSpec, key: ExpertKey, specs: Specs, weights: Weights) -> bytes:
    layer = key.layer
    if specs["up"].is_pruned:
        return b""
    offsets, size = unit_offsets(model, layer, specs)
    blob = bytearray(size)
    for projection, spec in specs.items():
        data = weights.matrix(*model.unit_shape(layer, projection), spec, unit_name(layer, key.expert, projection))
        blob[offsets[projection] : offsets[projection] + len(data)] = data
    return bytes(blob)


def _write_experts(
    files: _Folder, model: ModelSpec, experts: dict[ExpertKey, Specs], file_name: Callable[[int], str], weights: Weights
) -> tuple[ExpertEntry, ...]:
    """Write a file per layer.

    file_name: returns the name of the file of a layer.
    """
    entries = list[ExpertEntry]()
    for layer in sorted({key.layer for key in experts}):
        own = {key.expert: specs for key, specs in sorted(experts.items()) if key.layer == layer}
        blobs = {expert: _expert_blob(model, ExpertKey(layer, expert), specs, weights) for expert, specs in own.items()}
        header = build_header({expert_tensor_name(expert): ("U8", (len(blob),)) for expert, blob in blobs.items()})
        name, end = file_name(layer), len(header)
        for expert, blob in blobs.items():
            formats = (own[expert].get("gate"), own[expert]["up"], own[expert]["down"])
            digest = xxhash.xxh3_128_hexdigest(blob)
            entries.append(ExpertEntry(layer, expert, name, end, len(blob), digest, *formats))
            end += len(blob)
        files.write(name, header, *blobs.values())
    return tuple(entries)


def tables_file(tables: Mapping[str, np.ndarray], alignment_bytes: int = 4096) -> bytes:
    """Return the bytes of a file of tables."""
    kinds = {"<u2": "U16", "<u4": "U32", "<i4": "I32", "<i8": "I64", "<f4": "F32", "|u1": "U8"}
    header = build_header(
        {name: (kinds[values.dtype.str], values.shape) for name, values in tables.items()}, alignment_bytes
    )
    return header + b"".join(values.tobytes() for values in tables.values())


def _cost(plan: BundlePlan, experts: tuple[ExpertEntry, ...], dense: tuple[DenseEntry, ...]) -> CostSummary:
    """Return the cost entry. Source: docs/format.md, Cost."""
    model, packed, weights = plan.model, 0.0, 0
    padded: list[list[int]] = [[] for _ in model.layers]
    for entry in experts:
        padded[entry.layer].append(entry.size_bytes)
        for projection in model.layers[entry.layer].experts.projections:
            rows, columns = model.unit_shape(entry.layer, projection)
            packed += rows * entry.spec(projection).row_bytes(columns)
            weights += rows * columns
    top = [sum(sorted(sizes)[-model.layers[layer].experts.top_k :]) for layer, sizes in enumerate(padded) if sizes]
    most = sum(model.reads_per_token(layer) * max(sizes, default=0) for layer, sizes in enumerate(padded))
    return CostSummary(
        expert_packed_bytes=round(packed),
        expert_padded_bytes=sum(map(sum, padded)),
        dense_packed_bytes=sum(math.prod(e.shape[:-1]) * round(e.spec.row_bytes(e.shape[-1])) for e in dense),
        expert_bits_per_weight=8 * packed / weights,
        expected_read_bytes_per_token=round(plan.read_share * most),
        minimum_expert_bytes=max(top),
        kv_bytes_per_position=model.kv_bytes_per_position,
    )


SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
VOCABULARY = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
ATTENTION = AttentionSpec(2, 1, 16, RopeSpec(10000.0, 16))
EXPERTS = ExpertsSpec(4, 2, 32, "silu", RouterSpec("softmax", True))
MODEL = ModelSpec(
    family="mixtral",
    hidden_size=32,
    vocab_size=VOCABULARY,
    max_positions=512,
    norm_eps=1e-5,
    tie_embeddings=False,
    layers=(LayerSpec(ATTENTION, EXPERTS),) * 2,
    eos_token_ids=(2,),
)
"""The model of the bundle that seeds change: a few ten thousand bytes."""


def write_tiny_bundle(folder: Path, model: ModelSpec = MODEL, left_out: Sequence[ExpertKey] = ()) -> BundleManifest:
    """Write the bundle to the new folder.

    left_out: experts that are left out.
    """
    packed = QuantSpec.parse("q8g32")
    dense = {
        name: packed if len(shape) == 2 and not name.endswith("router") and packed.fits(shape[1]) else BF16
        for name, shape in model.dense_shapes().items()
    }
    experts = {
        key: dict.fromkeys(
            model.layers[key.layer].experts.projections, QuantSpec.parse("q0" if key in left_out else "q4g32")
        )
        for key in model.expert_keys()
    }
    files = {
        "tokenizer.json": byte_tokenizer(),
        "tokenizer_config.json": b"{}\n",
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
        "generation_config.json": b"{}\n",
        "README.md": b"# A tiny model\n",
        QUALITY_NAME: b"{}\n",
    }
    return write_bundle(folder, BundlePlan(model, dense, experts, files=files), Weights(random.Random(28)))


def byte_tokenizer() -> bytes:
    """Return a tokenizer with a token for every byte, after the special tokens. Every text can be encoded."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer.to_str().encode()
