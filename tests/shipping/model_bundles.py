"""Bundles of any size from random bytes, and stores that have them for devices."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from moec.manifests.bundle import DEVICE_NAME, MANIFEST_NAME, DeviceSummary
from moec.manifests.codec import decode_manifest
from moec.manifests.model import PROJECTIONS, AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, RouterSpec
from moec.manifests.quant import QuantSpec
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
from tests.hostile.bundle_writer import BF16, BundlePlan, Weights, unit_name
from tests.hostile.bundle_writer import write_bundle as write_planned

UNIT = QuantSpec.parse("q4g32")
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
    files = {"quality.json": b"{}\n", "config.json": b'{"note": "%b"}\n' % note.encode(), "empty.json": b""}
    device = DeviceSummary("host", "0" * 64, 1 << 30, 1 << 20)
    if profile is not None:
        files[DEVICE_NAME] = encode_device(profile)
        device = replace(device, profile=profile.name, profile_sha256=profile.sha256)
        device = replace(device, memory_budget_bytes=profile.memory_budget_bytes)
    keys = shape.model.expert_keys()
    dense = shape.model.dense_shapes()
    contents = {name: f"dense {name} {dense_version} {name in changed_dense}" for name in dense}
    for key in keys:
        number = version(key.layer, key.expert)
        names = (unit_name(key.layer, key.expert, projection) for projection in PROJECTIONS)
        contents.update({name: f"{name} {number}" for name in names})
    plan = BundlePlan(
        shape.model,
        dict.fromkeys(dense, BF16),
        dict.fromkeys(keys, dict.fromkeys(PROJECTIONS, UNIT)),
        files=files,
        name=name,
        device=device,
        is_dense_reversed=has_dense_reversed,
    )
    write_planned(folder, plan, _Named(random.Random(), contents=contents))
    return folder


@dataclass(frozen=True, slots=True)
class _Named(Weights):
    """Bytes that follow from a text alone and cannot be compressed.

    contents: name of a weight -> text.
    """

    contents: dict[str, str] = field(default_factory=dict)

    def matrix(self, rows: int, columns: int, spec: QuantSpec, name: str) -> bytes:
        return hashlib.shake_128(self.contents[name].encode()).digest(spec.packed_bytes(rows, columns))

    def vector(self, size: int, spec: QuantSpec, name: str) -> bytes:
        return hashlib.shake_128(self.contents[name].encode()).digest(2 * size)


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
