"""The dense weights of a bundle, read at once and compared with their checksums."""

from __future__ import annotations

from typing import Any

import xxhash

from moec.manifests.bundle import DENSE_NAME
from moec.manifests.errors import ChecksumMismatch

from .. import kernels
from ..bundle.open_bundle import Bundle
from ..bundle.weights import widened
from ..storage.address_space import map_anonymous


def load_dense(bundle: Bundle, verify: bool) -> dict[str, Any]:
    """Return the dense weights by name: matrices as kernels.PackedMatrix, vectors as float32 [n].

    verify: compare each weight with its checksum.
    Raises ChecksumMismatch if a weight differs from its checksum.
    """
    header = bundle.headers[DENSE_NAME]
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
        else:
            weights[name] = kernels.PackedMatrix(raw, entry.shape[0], entry.shape[1], entry.spec)
    return weights
