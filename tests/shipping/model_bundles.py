"""Bundles of any size from random bytes, written with the dataclasses alone, and stores that have them for devices."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import xxhash

from moec.manifests.bundle import (
    DENSE_NAME,
    DEVICE_NAME,
    MANIFEST_NAME,
    TABLES_NAME,
    BundleManifest,
    CostSummary,
    DenseEntry,
    DeviceSummary,
    ExpertEntry,
    FileEntry,
    SourceSummary,
    experts_file_name,
    unit_offsets,
)
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.model import PROJECTIONS, AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, RouterSpec
from moec.manifests.quant import LAYOUT, QuantSpec
from moec.manifests.safetensors_header import build_header
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import encode_device
from moec.shipping.channel import (
    CHANNEL_VERSION,
    Channel,
    ChannelBundle,
    channel_path,
    encode_moment,
    sign_channel,
    signature_path,
)
from moec.shipping.signatures.keys import PrivateKey
from moec.shipping.signatures.model_signature import sign_bundle

UNIT, DENSE = QuantSpec.parse("q4g32"), QuantSpec.parse("bf16")
NOW = datetime(2026, 11, 26, 12, tzinfo=timezone.utc)


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. The plain one has experts of 8 KiB."""

    layers: int = 2
    experts: int = 4
    hidden: int = 64
    width: int = 64
    vocabulary: int = 64

    @property
    def model(self) -> ModelSpec:
        experts = ExpertsSpec(self.experts, 1, self.width, "silu", RouterSpec("softmax", True))
        layer = LayerSpec(AttentionSpec(2, 1, 16, RopeSpec(10000.0, 16)), experts)
        return ModelSpec(
            family="mixtral",
            hidden_size=self.hidden,
            vocab_size=self.vocabulary,
            max_positions=128,
            norm_eps=1e-5,
            tie_embeddings=True,
            layers=(layer,) * self.layers,
        )


LARGE = Shape(layers=4, experts=8, hidden=512, width=2048, vocabulary=4096)
"""32 experts of 2 MB and dense weights of 5 MB: 68 MB."""


def write_bundle(
    folder: Path,
    shape: Shape | None = None,
    version: Callable[[int, int], int] = lambda layer, expert: 0,
    dense_version: int = 0,
    profile: DeviceProfile | None = None,
    name: str = "fleet-model",
    note: str = "",
    changed_dense: Collection[str] = (),
    has_dense_reversed: bool = False,
) -> Path:
    """Write a bundle to a new folder.

    version: number of the content of an expert. Equal numbers give equal bytes.
    dense_version: number of the content of the dense weights.
    profile: the device that it is for; None: the host that compiled it.
    note: content of a small file.
    changed_dense: dense weights with another content.
    has_dense_reversed: the file of the dense weights has them in another order than the manifest.
    """
    shape = shape or Shape()
    folder.mkdir(parents=True)
    files = {"quality.json": b"{}\n", "config.json": b'{"note": "%b"}\n' % note.encode(), "empty.json": b""}
    files[TABLES_NAME] = build_header({"popularity": ("U32", (shape.layers, shape.experts))}) + bytes(
        4 * shape.layers * shape.experts
    )
    files[DENSE_NAME], dense = _dense(shape.model, dense_version, changed_dense, has_dense_reversed)
    if profile is not None:
        files[DEVICE_NAME] = encode_device(profile)
    entries, experts = _write_experts(folder, shape, version)
    entries += [_write(folder, name, data) for name, data in files.items()]
    manifest = BundleManifest(
        format_version=1,
        producer="test",
        name=name,
        certified=True,
        layout=LAYOUT,
        model=shape.model,
        device=_device(profile),
        cost=_cost(shape, experts),
        calibration=None,
        source=SourceSummary("source", ()),
        options={},
        required_cpu_features=(),
        dense=dense,
        experts=tuple(experts),
        files=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return folder


def _write_experts(
    folder: Path, shape: Shape, version: Callable[[int, int], int]
) -> tuple[list[FileEntry], list[ExpertEntry]]:
    """Write a file for each layer. Returns the manifest's entries of the files and of the experts."""
    files, experts = list[FileEntry](), list[ExpertEntry]()
    for layer in range(shape.layers):
        file = experts_file_name(layer)
        _, size = unit_offsets(shape.model, layer, dict.fromkeys(PROJECTIONS, UNIT))
        data = bytearray(build_header({f"experts.{at:05d}": ("U8", (size,)) for at in range(shape.experts)}))
        for expert in range(shape.experts):
            blob = _bytes(f"{layer} {expert} {version(layer, expert)}", size)
            digest = xxhash.xxh3_128_hexdigest(blob)
            experts.append(ExpertEntry(layer, expert, file, len(data), size, digest, UNIT, UNIT, UNIT))
            data += blob
        files.append(_write(folder, file, data))
    return files, experts


def _bytes(seed: str, size: int) -> bytes:
    """Bytes that depend on the seed alone and cannot be compressed."""
    return hashlib.shake_128(seed.encode()).digest(size)


def _write(folder: Path, name: str, data: bytes | bytearray) -> FileEntry:
    (folder / name).write_bytes(data)
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())


def _device(profile: DeviceProfile | None) -> DeviceSummary:
    if profile is None:
        return DeviceSummary("host", "0" * 64, 1 << 30, 1 << 20)
    return DeviceSummary(profile.name, profile.sha256, profile.memory_budget_bytes, 1 << 20)


def _dense(
    model: ModelSpec, version: int, changed: Collection[str], is_reversed: bool
) -> tuple[bytes, tuple[DenseEntry, ...]]:
    shapes = model.dense_shapes()
    sizes = {name: 2 * shape[0] if len(shape) == 1 else DENSE.packed_bytes(*shape) for name, shape in shapes.items()}
    tensors = {name: ("BF16", shape) if len(shape) == 1 else ("U8", (sizes[name],)) for name, shape in shapes.items()}
    parts = {name: _bytes(f"dense {name} {version} {name in changed}", size) for name, size in sizes.items()}
    order = list(reversed(parts)) if is_reversed else list(parts)
    data = build_header({name: tensors[name] for name in order}) + b"".join(parts[name] for name in order)
    return data, tuple(
        DenseEntry(name, shape, DENSE, xxhash.xxh3_128_hexdigest(parts[name])) for name, shape in shapes.items()
    )


def _cost(shape: Shape, experts: Sequence[ExpertEntry]) -> CostSummary:
    model, padded = shape.model, experts[0].size_bytes
    rows = {projection: model.unit_shape(0, projection) for projection in PROJECTIONS}
    packed = sum(count * round(UNIT.row_bytes(columns)) for count, columns in rows.values())
    weights = sum(count * columns for count, columns in rows.values())
    return CostSummary(
        expert_packed_bytes=len(experts) * packed,
        expert_padded_bytes=len(experts) * padded,
        dense_packed_bytes=sum(2 * math.prod(each) for each in model.dense_shapes().values()),
        expert_bits_per_weight=8 * packed / weights,
        expected_read_bytes_per_token=shape.layers * padded,
        minimum_expert_bytes=padded,
        kv_bytes_per_position=model.kv_bytes_per_position,
    )


def content(folder: Path) -> dict[str, bytes]:
    """Files of a folder by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files of a folder by name."""
    return {name: hashlib.sha256(data).hexdigest() for name, data in content(folder).items()}


def sha256_of(bundle: Path) -> str:
    """SHA-256 of a bundle's `moec.json`."""
    return hashlib.sha256((bundle / MANIFEST_NAME).read_bytes()).hexdigest()


def described(bundle: Path, memory_floor_bytes: int = 1 << 20) -> ChannelBundle:
    """What a channel says about a bundle."""
    data = (bundle / MANIFEST_NAME).read_bytes()
    device = json.loads(data)["device"]["profile"]
    profile = bundle / DEVICE_NAME
    return ChannelBundle(
        device=device,
        device_json=profile.read_text() if profile.exists() else "",
        manifest_sha256=hashlib.sha256(data).hexdigest(),
        manifest_bytes=len(data),
        total_bytes=sum(path.stat().st_size for path in bundle.iterdir()),
        memory_floor_bytes=memory_floor_bytes,
        required_cpu_features=(),
    )


def channel_of(
    bundles: Sequence[ChannelBundle],
    sequence: int = 1,
    *,
    model: str = "fleet-model",
    channel: str = "stable",
    created: datetime = NOW - timedelta(days=1),
    days: int = 90,
    minimum_moec: str = "0.1.0",
) -> Channel:
    """A channel with these bundles."""
    expires = encode_moment(created + timedelta(days=days))
    return Channel(
        CHANNEL_VERSION, model, channel, sequence, encode_moment(created), expires, minimum_moec, tuple(bundles)
    )


def put_bundle(store: Path, bundle: Path, key: PrivateKey) -> Path:
    """Give a store in a folder a bundle and its signature. Return the bundle's folder there."""
    digest = sha256_of(bundle)
    target = store / digest
    target.mkdir(parents=True, exist_ok=True)
    for path in bundle.iterdir():
        if not (target / path.name).exists():
            os.link(path, target / path.name)
    data = (bundle / MANIFEST_NAME).read_bytes()
    (store / signature_path(digest)).write_bytes(sign_bundle(data, decode_manifest(data, "moec.json"), key))
    return target


def put_channel(store: Path, channel: Channel, *keys: PrivateKey) -> None:
    """Replace a channel of a store in a folder."""
    path = store / channel_path(channel.channel)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(sign_channel(channel, *keys))


def push(store: Path, bundle: Path, key: PrivateKey, sequence: int = 1) -> None:
    """Put a bundle and a channel with it alone."""
    put_bundle(store, bundle, key)
    put_channel(store, channel_of([described(bundle)], sequence), key)
