"""The weights of a bundle: all dense ones for a run, or one at a time as floats, for export and comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from moec.manifests.bundle import DENSE_NAME, unit_offsets
from moec.manifests.errors import ChecksumMismatch
from moec.manifests.model import UnitKey

from .. import kernels
from ..bundle.files import COPY_AGAIN
from ..bundle.open_bundle import Bundle
from ..kernels.packed_matrix import unpack
from ..storage.arena import map_anonymous


def load_dense(bundle: Bundle, verify: bool) -> dict[str, Any]:
    """Return the dense weights by name: matrices as kernels.PackedMatrix, vectors as float32 [n].

    verify: compare each weight with its checksum.
    Raises ChecksumMismatch if a weight differs from its checksum.
    """
    header, model = bundle.headers[DENSE_NAME], bundle.manifest.model
    entries = {entry.name: entry for entry in bundle.manifest.dense}
    weights: dict[str, Any] = {}
    first = min(tensor.offset_bytes for tensor in header.values())
    last = max(tensor.offset_bytes + tensor.size_bytes for tensor in header.values())
    _, memory = map_anonymous(last - first, "the dense weights", huge_pages=True)
    bundle.read_into(DENSE_NAME, first, memory)
    for name, tensor in header.items():
        start, entry = tensor.offset_bytes - first, entries[name]
        raw = memory[start : start + tensor.size_bytes]
        if verify and xxhash.xxh3_128_hexdigest(raw.data) != entry.xxh3:
            raise ChecksumMismatch(
                f"`{bundle.path / DENSE_NAME}`, `{name}`: bytes differ from their checksum", "copy the bundle again"
            )
        if len(entry.shape) == 1:
            weights[name] = widened(raw, entry.spec.float_type)
            if model.adds_offset(name):
                weights[name] += np.float32(model.norm_offset)
        else:
            weights[name] = kernels.PackedMatrix(raw, entry.shape[0], entry.shape[1], entry.spec)
    return weights


@dataclass(frozen=True)
class BundleWeights:
    """Reads weights of an opened bundle, with the values that the kernels compute with. Checksums are compared."""

    bundle: Bundle

    def dense(self, name: str) -> np.ndarray:
        """Return a dense weight, float32 in its own shape. Raises ChecksumMismatch, StorageReadFailed."""
        entry = next(entry for entry in self.bundle.manifest.dense if entry.name == name)
        data = self.bundle.read_tensor_bytes(DENSE_NAME, self.bundle.headers[DENSE_NAME][name])
        self._check(data, entry.xxh3, f"`{self.bundle.path / DENSE_NAME}`, `{name}`")
        if len(entry.shape) == 2:
            return unpack(data, *entry.shape, entry.spec)
        return widened(data, entry.spec.float_type)

    def unit(self, key: UnitKey) -> np.ndarray:
        """Return one projection of an expert that is not left out, float32 [N, K].

        Raises ChecksumMismatch, StorageReadFailed.
        """
        manifest = self.bundle.manifest
        entry = next(entry for entry in manifest.experts if entry.key == (key.layer, key.expert))
        data = np.empty(entry.size_bytes, np.uint8)
        self.bundle.read_into(entry.file, entry.offset_bytes, data)
        self._check(data, entry.xxh3, f"`{self.bundle.path / entry.file}`, expert {key.expert} of layer {key.layer}")
        projections = manifest.model.layers[key.layer].experts.projections
        specs = {projection: entry.spec(projection) for projection in projections}
        rows, columns = manifest.model.unit_shape(key.layer, key.projection)
        spec, start = specs[key.projection], unit_offsets(manifest.model, key.layer, specs)[0][key.projection]
        return unpack(data[start : start + spec.packed_bytes(rows, columns)], rows, columns, spec)

    def _check(self, data: np.ndarray, digest: str, place: str) -> None:
        if xxhash.xxh3_128_hexdigest(data.data) != digest:
            raise ChecksumMismatch(f"{place}: bytes differ from their checksum", COPY_AGAIN)


def widened(raw: np.ndarray, float_type: str) -> np.ndarray:
    """Return 16-bit floats, stored as uint8 [2 n], as float32 [n]."""
    if float_type == "float16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
