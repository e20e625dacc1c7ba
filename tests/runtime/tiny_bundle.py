"""A whole bundle of a few ten thousand bytes, written from the dataclasses alone: random weights, right sizes."""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import replace
from pathlib import Path

import xxhash

from moec.manifests.bundle import (
    DENSE_NAME,
    MANIFEST_NAME,
    TABLES_NAME,
    BundleManifest,
    DenseEntry,
    DeviceSummary,
    ExpertEntry,
    FileEntry,
    SourceSummary,
    experts_file_name,
    unit_offsets,
)
from moec.manifests.codec import encode_manifest
from moec.manifests.model import PROJECTIONS, AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, RouterSpec
from moec.manifests.quant import LAYOUT, QuantSpec
from moec.manifests.safetensors_header import build_header
from tests.manifests.examples import cost_of

EXPERTS, LAYERS = 2, 2
_EXPERTS = ExpertsSpec(EXPERTS, 1, 32, "silu", RouterSpec("softmax", True))
MODEL = ModelSpec(
    family="mixtral",
    hidden_size=32,
    vocab_size=64,
    max_positions=128,
    norm_eps=1e-5,
    tie_embeddings=True,
    layers=(LayerSpec(AttentionSpec(2, 1, 16, RopeSpec(10000.0, 16)), _EXPERTS),) * LAYERS,
)
UNIT, DENSE = QuantSpec.parse("q4g32"), QuantSpec.parse("bf16")


def entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


def files_and_experts() -> tuple[dict[str, bytes], list[ExpertEntry]]:
    """Every file but the manifest, and where the experts lie."""
    source = random.Random(7)
    shapes = MODEL.dense_shapes()
    sizes = {name: 2 * shape[0] if len(shape) == 1 else DENSE.packed_bytes(*shape) for name, shape in shapes.items()}
    tensors = {name: ("BF16", shape) if len(shape) == 1 else ("U8", (sizes[name],)) for name, shape in shapes.items()}
    files = {
        DENSE_NAME: build_header(tensors) + source.randbytes(sum(sizes.values())),
        TABLES_NAME: build_header({"popularity": ("U32", (LAYERS, EXPERTS))}) + bytes(4 * LAYERS * EXPERTS),
        "config.json": b'{"model_type": "mixtral"}\n' * 30,
        "generation_config.json": b"",
        "quality.json": b"{}\n",
    }
    experts: list[ExpertEntry] = []
    for layer in range(LAYERS):
        name = experts_file_name(layer)
        _, size = unit_offsets(MODEL, layer, dict.fromkeys(PROJECTIONS, UNIT))
        data = build_header({f"experts.{expert:05d}": ("U8", (size,)) for expert in range(EXPERTS)})
        for expert in range(EXPERTS):
            blob = source.randbytes(size)
            digest = xxhash.xxh3_128_hexdigest(blob)
            experts.append(ExpertEntry(layer, expert, name, len(data), size, digest, UNIT, UNIT, UNIT))
            data += blob
        files[name] = data
    return files, experts


def dense_entries(file: bytes) -> tuple[DenseEntry, ...]:
    """The dense weights lie at the end of their file, 16 bits each."""
    shapes, entries = MODEL.dense_shapes(), list[DenseEntry]()
    start = len(file) - sum(2 * math.prod(shape) for shape in shapes.values())
    for name, shape in shapes.items():
        end = start + 2 * math.prod(shape)
        entries.append(DenseEntry(name, shape, DENSE, xxhash.xxh3_128_hexdigest(file[start:end])))
        start = end
    return tuple(entries)


def manifest_of(files: dict[str, bytes], experts: list[ExpertEntry]) -> BundleManifest:
    dense = dense_entries(files[DENSE_NAME])
    return BundleManifest(
        format_version=1,
        producer="test",
        name="tiny",
        certified=True,
        layout=LAYOUT,
        model=MODEL,
        device=DeviceSummary("board", "0" * 64, 1 << 30, 1 << 20),
        cost=cost_of(MODEL, experts, dense),
        calibration=None,
        source=SourceSummary("tiny", ()),
        options={},
        required_cpu_features=(),
        dense=dense,
        experts=tuple(experts),
        files=tuple(entry(name, data) for name, data in sorted(files.items())),
    )


def write_bundle(folder: Path, *, certified: bool = True) -> Path:
    """Write the bundle to the new folder."""
    files, experts = files_and_experts()
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    manifest = replace(manifest_of(files, experts), certified=certified)
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_archive(tmp_path: Path, data: bytes) -> Path:
    """A file to unpack."""
    path = tmp_path / "given.moecpack"
    path.write_bytes(data)
    return path
