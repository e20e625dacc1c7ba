"""The bytes that two bundles of one model share: whole files, experts, projections, dense weights.

`python -m bench.shipping.shared_bytes OLD NEW [--json]` prints which of NEW's bytes OLD has. A pull takes equal files
and equal experts from an installed bundle. The last two lines say what it would save by taking equal dense weights,
whose checksums are in the manifest, and equal projections, which would need an index.
Results: docs/experiments/2026-11.md, 26: Bytes that plans share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from moec.manifests.bundle import DENSE_NAME, BundleManifest, DenseEntry, ExpertEntry, unit_offsets
from moec.manifests.model import ExpertKey, UnitKey
from moec.runtime.bundle.open_bundle import open_bundle
from moec.shipping.pull.delta import plan_delta, source_of

INDEX_BYTES_PER_UNIT = 16 + 4
"""Bytes of a projection in a sidecar index: 128 bits of checksum, and its offset."""


K = TypeVar("K", bound=Hashable)
Part = tuple[str, int]
"""Digest and size in bytes of a part of a bundle."""


@dataclass(frozen=True, slots=True)
class Shared:
    """Parts of a new bundle that an old one has. Sizes are in bytes.

    count, equal: number of all parts, and of the equal ones.
    size, equal_size: their bytes.
    """

    count: int
    equal: int
    size: int
    equal_size: int

    @property
    def share(self) -> float:
        """Share of the bytes that are equal."""
        return self.equal_size / max(self.size, 1)

    @classmethod
    def of(cls, new: Mapping[K, Part], old: Mapping[K, Part]) -> Shared:
        """Compare the parts of two bundles."""
        equal = equal_keys(new, old)
        sizes = {key: size for key, (_, size) in new.items()}
        return cls(len(new), len(equal), sum(sizes.values()), sum(sizes[key] for key in equal))


def equal_keys(new: Mapping[K, Part], old: Mapping[K, Part]) -> set[K]:
    """Return the keys of the parts that are equal in both bundles."""
    return {key for key, value in new.items() if old.get(key) == value}


def experts_of(manifest: BundleManifest) -> dict[ExpertKey, Part]:
    """Return the experts that are not left out, by their key."""
    return {entry.key: (entry.xxh3, entry.size_bytes) for entry in manifest.experts if not entry.is_pruned}


def dense_of(manifest: BundleManifest) -> dict[str, Part]:
    """Return the dense weights by their name."""

    def size(entry: DenseEntry) -> int:
        return entry.spec.packed_bytes(*entry.shape) if len(entry.shape) == 2 else 2 * entry.shape[0]

    return {entry.name: (entry.xxh3, size(entry)) for entry in manifest.dense}


def other_files_of(manifest: BundleManifest) -> dict[str, Part]:
    """Return the files without weights by their name."""
    names = {entry.file for entry in manifest.experts} | {DENSE_NAME}
    return {entry.name: (entry.sha256, entry.size_bytes) for entry in manifest.files if entry.name not in names}


def units_of(folder: Path, manifest: BundleManifest) -> dict[UnitKey, Part]:
    """Return every projection that is not left out, by its key."""
    units = dict[UnitKey, Part]()
    for entry in manifest.experts:
        if entry.is_pruned:
            continue
        data = _bytes_of(folder, entry)
        specs = {"gate": entry.gate, "up": entry.up, "down": entry.down}
        given = {name: spec for name, spec in specs.items() if spec is not None}
        offsets, _ = unit_offsets(manifest.model, entry.layer, given)
        for projection, spec in given.items():
            size = spec.packed_bytes(*manifest.model.unit_shape(entry.layer, projection))
            packed = data[offsets[projection] : offsets[projection] + size]
            units[UnitKey(entry.layer, entry.expert, projection)] = (hashlib.sha256(packed).hexdigest(), size)
    return units


def _bytes_of(folder: Path, entry: ExpertEntry) -> bytes:
    with (folder / entry.file).open("rb") as file:
        file.seek(entry.offset_bytes)
        return file.read(entry.size_bytes)


def compare(old: Path, new: Path) -> dict[str, Shared | int]:
    """Return what the new bundle shares with the old one, and what a pull would fetch."""
    old_manifest, manifest = (open_bundle(folder).manifest for folder in (old, new))
    new_units, old_units = units_of(new, manifest), units_of(old, old_manifest)
    source = source_of(old, old_manifest, [entry.name for entry in old_manifest.files])
    delta = plan_delta(manifest, [source])
    fetched = sum(end - start for ranges in delta.fetched.values() for start, end in ranges)
    dense = Shared.of(dense_of(manifest), dense_of(old_manifest))
    is_linked = any(manifest.files[number].name == DENSE_NAME for number in delta.links)
    whole = equal_keys(experts_of(manifest), experts_of(old_manifest))
    # Projections of experts that are not copied as a whole.
    copied = [key for key in equal_keys(new_units, old_units) if ExpertKey(key.layer, key.expert) not in whole]
    from_units = sum(new_units[key][1] for key in copied)
    return {
        "experts": Shared.of(experts_of(manifest), experts_of(old_manifest)),
        "projections": Shared.of(new_units, old_units),
        "dense": dense,
        "other_files": Shared.of(other_files_of(manifest), other_files_of(old_manifest)),
        "bundle_bytes": sum(entry.size_bytes for entry in manifest.files),
        "fetched_bytes": fetched,
        "saved_by_dense_bytes": 0 if is_linked else dense.equal_size,
        "saved_by_projections_bytes": from_units - INDEX_BYTES_PER_UNIT * len(new_units),
    }


def main() -> None:
    """Print the comparison of two bundles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    compared = compare(given.old, given.new)
    if given.json:
        plain = {
            name: asdict(counted) if isinstance(counted, Shared) else counted for name, counted in compared.items()
        }
        print(json.dumps({"old": given.old.name, "new": given.new.name, **plain}, indent=1))
        return
    for name, counted in compared.items():
        if isinstance(counted, Shared):
            sizes = f"{counted.equal_size:,} of {counted.size:,} bytes ({counted.share:.1%})"
            print(f"{name:<30}{counted.equal} of {counted.count} equal, {sizes}")
        else:
            print(f"{name:<30}{counted:,}")


if __name__ == "__main__":
    main()
