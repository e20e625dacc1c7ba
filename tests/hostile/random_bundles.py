"""Random valid bundles, written as real folders with the right digests. One seed number gives one bundle.

`moec verify` accepts each of them. Weights are ordinary numbers, zeros, random bytes, or numbers among which some
scales are infinite, NaN or as large as they can be.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from moec.manifests.bundle import (
    DENSE_NAME,
    FORMAT_VERSION,
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
)
from moec.manifests.codec import encode_manifest
from moec.manifests.model import ModelSpec
from moec.manifests.quant import LAYOUT, MXFP4_EXPONENTS, ROWS_PER_BLOCK, QuantSpec, round_up
from moec.manifests.safetensors_header import build_header
from tests.hostile.random_models import chance, random_model

FORMATS = tuple(
    QuantSpec.parse(text)
    for text in (
        "bf16", "fp16", "mxfp4", "q1", "q1g32", "q1g32b", "q1.6s", "q1.6g64s", "q2", "q2g32", "q2s", "q2g32b", "q3",
        "q3g32s", "q3g64b", "q4", "q4g32", "q4s", "q4g64s", "q4g32b", "q8", "q8g32", "q8s", "q8g64s", "q8g128",
    )
)  # fmt: skip
LEFT_OUT = QuantSpec.parse("q0")
SIXTEEN_BITS = FORMATS[:2]
KINDS_OF_WEIGHTS = ("numbers", "numbers", "numbers", "zeros", "spoiled", "spoiled", "huge", "bytes")
_HALF_SCALES = (0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7BFF, 0x0001)  # inf, -inf, NaN twice, the largest, the smallest
_BF16_SCALES = (0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0x0001)


@dataclass(frozen=True, slots=True)
class Weights:
    """Makes bytes of matrices and vectors. kind: one of KINDS_OF_WEIGHTS."""

    source: random.Random
    kind: str

    def matrix(self, rows: int, columns: int, spec: QuantSpec) -> bytes:
        """A packed matrix of any bytes for codes, and scales of this kind."""
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
            scales = np.frombuffer(self._floats(blocks * groups * count, SIXTEEN_BITS[1]), np.uint8)
            records[:, :, : 2 * count] = scales.reshape(blocks, groups, -1)
        return data.tobytes()

    def vector(self, size: int, spec: QuantSpec) -> bytes:
        """A norm or a bias."""
        if self.kind == "zeros":
            return bytes(2 * size)
        return self.source.randbytes(2 * size) if self.kind == "bytes" else self._floats(size, spec)

    def _exponents(self, count: int, least: int, most: int) -> bytes:
        drawn = [self.source.randint(least, most) for _ in range(count)]
        for at in self._spoiled(count):
            drawn[at] = self.source.choice(MXFP4_EXPONENTS)
        return bytes(drawn)

    def _floats(self, count: int, spec: QuantSpec) -> bytes:
        """16-bit floats, some of them spoiled."""
        size = 3e4 if self.kind == "huge" else 0.3
        values = np.array([self.source.uniform(-size, size) for _ in range(count)], np.float32)
        if spec.float_type == "float16":
            halves, spoilt = values.astype("<f2").view("<u2"), _HALF_SCALES
        else:
            halves, spoilt = (values.view("<u4") >> 16).astype("<u2"), _BF16_SCALES
        for at in self._spoiled(count):
            halves[at] = self.source.choice(spoilt)
        return halves.tobytes()

    def _spoiled(self, count: int) -> list[int]:
        """Places of values that are none of the ordinary ones."""
        if self.kind != "spoiled" or not count or chance(self.source, 0.8):
            return []
        return [self.source.randrange(count) for _ in range(self.source.choice((1, 1, 3)))]


class _Folder:
    """The files of a bundle on their way to a new folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder, self.entries = folder, list[FileEntry]()

    def write(self, name: str, *parts: bytes) -> None:
        """One file, which the manifest will list."""
        data = b"".join(parts)
        (self._folder / name).write_bytes(data)
        self.entries.append(FileEntry(name, len(data), hashlib.sha256(data).hexdigest()))


def write_random_bundle(folder: Path, seed: int) -> BundleManifest:
    """Write the bundle of this seed to the new folder, and return its manifest."""
    source = random.Random(seed)
    model, files = random_model(source), _Folder(folder)
    weights = Weights(source, source.choice(KINDS_OF_WEIGHTS))
    dense = _write_dense(files, model, weights)
    experts = _write_experts(files, model, weights)
    low = _write_low(files, model, weights, experts) if chance(source, 0.4) else ()
    _write_tables(files, model, source)
    files.write("tokenizer.json", tokenizer_json(model.vocab_size))
    if chance(source, 0.5):
        files.write(QUALITY_NAME, b"{}\n")
    manifest = BundleManifest(
        format_version=FORMAT_VERSION,
        producer="tests",
        name=f"seed {seed}",
        certified=True,
        layout=LAYOUT,
        model=model,
        device=DeviceSummary("none", "0" * 64, 1 << 30, 1 << 20),
        cost=_cost(model, experts, dense, source),
        calibration=CalibrationSummary("none", "0" * 64, 1, 2, seed, ("0.1",)) if chance(source, 0.3) else None,
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


def tokenizer_json(vocabulary: int) -> bytes:
    """A tokenizer of the words t0, t1, ...; every other word is t0."""
    words = {f"t{token}": token for token in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "t0"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    plain = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    return json.dumps(plain).encode()


def _write_dense(files: _Folder, model: ModelSpec, weights: Weights) -> tuple[DenseEntry, ...]:
    source = weights.source
    floats, usual = source.choice(SIXTEEN_BITS), source.choice(FORMATS)
    tensors, blobs, entries = dict[str, tuple[str, tuple[int, ...]]](), list[bytes](), list[DenseEntry]()
    for name, shape in model.dense_shapes().items():
        spec = floats
        if len(shape) == 2 and not name.endswith("router"):
            spec = usual if chance(source, 0.5) else source.choice(FORMATS)
            spec = spec if spec.fits(shape[1]) else floats
        blob = weights.vector(shape[0], spec) if len(shape) == 1 else weights.matrix(shape[0], shape[1], spec)
        is_bfloat = spec.float_type == "bfloat16"
        tensors[name] = (("BF16" if is_bfloat else "F16"), shape) if len(shape) == 1 else ("U8", (len(blob),))
        blobs.append(blob)
        entries.append(DenseEntry(name, shape, spec, xxhash.xxh3_128_hexdigest(blob)))
    files.write(DENSE_NAME, build_header(tensors), *blobs)
    return tuple(entries)


def _draw_specs(model: ModelSpec, layer: int, source: random.Random, formats: Iterable[QuantSpec]) -> dict[str, QuantSpec]:
    """A format for each projection of an expert."""
    found = {}
    for projection in model.layers[layer].experts.projections:
        columns = model.unit_shape(layer, projection)[1]
        fitting = [spec for spec in formats if spec.fits(columns)]
        found[projection] = source.choice(fitting or SIXTEEN_BITS)
    return found


def _expert_blob(model: ModelSpec, layer: int, specs: dict[str, QuantSpec], weights: Weights) -> bytes:
    offsets, size = unit_offsets(model, layer, specs)
    blob = bytearray(size)
    for projection, spec in specs.items():
        data = weights.matrix(*model.unit_shape(layer, projection), spec)
        blob[offsets[projection] : offsets[projection] + len(data)] = data
    return bytes(blob)


def _write_layer(files: _Folder, name: str, layer: int, blobs: dict[int, tuple[dict[str, QuantSpec], bytes]]) -> list[ExpertEntry]:
    """The expert file of one layer, of the experts that it holds by their number."""
    header = build_header({expert_tensor_name(expert): ("U8", (len(blob),)) for expert, (_, blob) in blobs.items()})
    entries, end = list[ExpertEntry](), len(header)
    for expert, (specs, blob) in blobs.items():
        digest = xxhash.xxh3_128_hexdigest(blob)
        formats = (specs.get("gate"), specs["up"], specs["down"])
        entries.append(ExpertEntry(layer, expert, name, end, len(blob), digest, *formats))
        end += len(blob)
    files.write(name, header, *(blob for _, blob in blobs.values()))
    return entries


def _write_experts(files: _Folder, model: ModelSpec, weights: Weights) -> tuple[ExpertEntry, ...]:
    source, entries = weights.source, list[ExpertEntry]()
    has_left_out, are_mixed, usual = chance(source, 0.5), chance(source, 0.4), source.choice(FORMATS)
    for layer in model.expert_layers:
        experts = model.layers[layer].experts
        count = source.randint(0, experts.count - experts.top_k) if has_left_out and experts.can_lose_experts else 0
        left_out, blobs = source.sample(range(experts.count), count), dict[int, tuple[dict[str, QuantSpec], bytes]]()
        for expert in range(experts.count):
            if expert in left_out:
                blobs[expert] = (dict.fromkeys(experts.projections, LEFT_OUT), b"")
                continue
            specs = _draw_specs(model, layer, source, FORMATS if are_mixed else (usual,))
            blobs[expert] = (specs, _expert_blob(model, layer, specs, weights))
        entries += _write_layer(files, experts_file_name(layer), layer, blobs)
    return tuple(entries)


def _write_low(
    files: _Folder, model: ModelSpec, weights: Weights, experts: tuple[ExpertEntry, ...]
) -> tuple[ExpertEntry, ...]:
    """Low versions of those experts for which a smaller one is drawn."""
    found, share = list[ExpertEntry](), weights.source.choice((0.4, 1.0))
    low = [spec for spec in FORMATS if spec.bitwidth < 4]
    for layer in model.expert_layers:
        blobs = dict[int, tuple[dict[str, QuantSpec], bytes]]()
        for entry in experts:
            specs = _draw_specs(model, layer, weights.source, low)
            if entry.layer == layer and chance(weights.source, share):
                if unit_offsets(model, layer, specs)[1] < entry.size_bytes:
                    blobs[entry.expert] = (specs, _expert_blob(model, layer, specs, weights))
        if blobs:
            found += _write_layer(files, low_experts_file_name(layer), layer, blobs)
    return tuple(found)


def _write_tables(files: _Folder, model: ModelSpec, source: random.Random) -> None:
    """Counts that say anything: they are advice."""
    layers, experts = model.num_layers, max(layer.experts.count for layer in model.layers)
    is_empty = chance(source, 0.3)

    def counts(*shape: int) -> np.ndarray:
        drawn = [0 if is_empty else source.choice((0, 1, 7, 2**32 - 1)) for _ in range(math.prod(shape))]
        return np.array(drawn, np.uint32).reshape(shape)

    wanted = 0 if is_empty else source.choice((0, 3, 30))
    keys = sorted({tuple(source.randrange(end) for end in (layers, experts, experts)) for _ in range(wanted)})
    lengths = [source.randint(0, 4) for _ in keys]
    tensors = {
        "popularity": ("U32", counts(layers, experts)),
        "transitions": ("U32", counts(layers - 1, experts, experts)),
        "path.keys": ("I32", np.array(keys, np.int32).reshape(-1, 3)),
        "path.offsets": ("I64", np.cumsum([0, *lengths], dtype=np.int64)),
        "path.experts": ("U16", np.array([source.randrange(experts) for _ in range(sum(lengths))], np.uint16)),
        "path.counts": ("U32", counts(sum(lengths))),
    }
    header = build_header({name: (kind, values.shape) for name, (kind, values) in tensors.items()})
    files.write(TABLES_NAME, header, *(values.tobytes() for _, values in tensors.values()))


def _cost(
    model: ModelSpec, experts: tuple[ExpertEntry, ...], dense: tuple[DenseEntry, ...], source: random.Random
) -> CostSummary:
    """docs/format.md, Cost."""
    padded: list[list[int]] = [[] for _ in model.layers]
    packed = weights = 0.0
    for entry in experts:
        padded[entry.layer].append(entry.size_bytes)
        for projection in model.layers[entry.layer].experts.projections:
            rows, columns = model.unit_shape(entry.layer, projection)
            packed += rows * entry.spec(projection).row_bytes(columns)
            weights += rows * columns
    top = [sum(sorted(sizes)[-layer.experts.top_k :]) for sizes, layer in zip(padded, model.layers, strict=True) if sizes]
    most = sum(model.reads_per_token(layer) * max(sizes, default=0) for layer, sizes in enumerate(padded))
    rows = [(entry.shape[0] if len(entry.shape) == 2 else 1) for entry in dense]
    return CostSummary(
        expert_packed_bytes=round(packed),
        expert_padded_bytes=sum(map(sum, padded)),
        dense_packed_bytes=sum(
            count * round(entry.spec.row_bytes(entry.shape[-1])) for count, entry in zip(rows, dense, strict=True)
        ),
        expert_bits_per_weight=8 * packed / weights,
        expected_read_bytes_per_token=source.randint(0, most),
        minimum_expert_bytes=max(top),
        kv_bytes_per_position=model.kv_bytes_per_position,
    )
