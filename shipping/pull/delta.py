"""From manifests to a plan: which bytes of a new bundle are on the device already, and which have to be fetched.

A file of equal digest is linked. An expert or a dense weight of equal size and XXH3 is copied. XXH3 is a hint that no
attacker is kept from forging: the SHA-256 of the whole file decides in the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from moec.manifests.bundle import DENSE_NAME, BundleManifest, DenseEntry, FileEntry

from ..channel import Channel, ChannelBundle
from .journal import Intervals

MOST_GAP_BYTES = 256 << 10
"""Longest gap between two ranges that are fetched as one."""
GAP_SHARE = 32
"""Gaps take at most 1 / GAP_SHARE of the fetched bytes."""


@dataclass(frozen=True, slots=True)
class Source:
    """An installed bundle that bytes are taken from.

    files: its files that its receipt knows as unchanged, by digest and size.
    weights: file and offset of its experts and dense weights, by size and XXH3.
    """

    folder: Path
    files: dict[tuple[str, int], str]
    weights: dict[tuple[int, str], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class _Weight:
    """An expert or a dense weight with bytes of its own."""

    file: str
    start: int
    size_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of a new file that an installed bundle has.

    file: number of the file in the manifest.
    xxh3: checksum that the bytes must have; None: not known.
    """

    file: int
    start: int
    size_bytes: int
    xxh3: str | None
    source: Path
    source_start: int

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


@dataclass(frozen=True, slots=True)
class Delta:
    """The source of each byte of a bundle.

    links: files that an installed bundle has, by number.
    copies: in the order of the files and their bytes.
    fetched: ranges of each other file that are fetched, by number.
    """

    links: dict[int, Path]
    copies: tuple[Copy, ...]
    fetched: dict[int, tuple[tuple[int, int], ...]]

    def left_bytes(self, done: Sequence[Intervals]) -> tuple[int, int]:
        """Return the bytes that are not there yet: to copy, and to fetch.

        done: finished ranges of each file.
        """
        copied = sum(copy.size_bytes for copy in self.copies if not done[copy.file].has(copy.start, copy.end))
        fetched = sum(
            end - start - done[number].overlap_bytes(start, end)
            for number, ranges in self.fetched.items()
            for start, end in ranges
        )
        return copied, fetched


def source_of(folder: Path, manifest: BundleManifest, unchanged: Collection[str]) -> Source:
    """Return what a bundle offers.

    unchanged: names of its files that were checked and did not change since.
    """
    files = {(entry.sha256, entry.size_bytes): entry.name for entry in manifest.files if entry.name in unchanged}
    weights = {(weight.size_bytes, weight.xxh3): (weight.file, weight.start) for weight in _weights(manifest)}
    return Source(folder, files, weights)


def plan_delta(manifest: BundleManifest, sources: Sequence[Source]) -> Delta:
    """Return the plan for a bundle.

    sources: installed bundles, the one that is likely to have most first.
    """
    links: dict[int, Path] = {}
    copies: dict[int, list[Copy]] = {}
    weights = defaultdict(list)
    for weight in _weights(manifest):
        weights[weight.file].append(weight)
    for number, entry in enumerate(manifest.files):
        linked = _equal_file(entry, sources)
        if linked is not None:
            links[number] = linked
            continue
        equal = (_equal_weight(number, weight, sources) for weight in weights[entry.name])
        copies[number] = [copy for copy in equal if copy is not None]
    copies = _without_short_gaps(manifest.files, copies)
    fetched = {number: tuple(_between(copies[number], manifest.files[number].size_bytes)) for number in copies}
    return Delta(links, tuple(copy for number in sorted(copies) for copy in copies[number]), fetched)


def _weights(manifest: BundleManifest) -> Iterator[_Weight]:
    """Yield experts and dense weights, those of each file in the order of their bytes.

    `dense.safetensors` has the tensors in the order of the manifest, and nothing after them. So their places follow
    from their sizes. Source: docs/format.md, Dense weights.
    """
    for entry in manifest.stored_experts:
        if not entry.is_pruned:
            yield _Weight(entry.file, entry.offset_bytes, entry.size_bytes, entry.xxh3)
    sizes = [_dense_bytes(entry) for entry in manifest.dense]
    file_bytes = next((entry.size_bytes for entry in manifest.files if entry.name == DENSE_NAME), 0)
    start = file_bytes - sum(sizes)
    if start < 0:
        return
    for dense, size_bytes in zip(manifest.dense, sizes, strict=True):
        yield _Weight(DENSE_NAME, start, size_bytes, dense.xxh3)
        start += size_bytes


def _dense_bytes(entry: DenseEntry) -> int:
    return 2 * entry.shape[0] if len(entry.shape) == 1 else entry.spec.packed_bytes(*entry.shape)


def _equal_file(entry: FileEntry, sources: Iterable[Source]) -> Path | None:
    """Return a file of equal content that was checked, or None."""
    for source in sources:
        name = source.files.get((entry.sha256, entry.size_bytes))
        if name is not None:
            return source.folder / name
    return None


def _equal_weight(number: int, weight: _Weight, sources: Iterable[Source]) -> Copy | None:
    for source in sources:
        place = source.weights.get((weight.size_bytes, weight.xxh3))
        if place is not None:
            file, start = place
            return Copy(number, weight.start, weight.size_bytes, weight.xxh3, source.folder / file, start)
    return None


def _without_short_gaps(files: Sequence[FileEntry], copies: dict[int, list[Copy]]) -> dict[int, list[Copy]]:
    """Return the copies without those that are fetched together with what lies around them: a request less.

    The shortest gaps go first, as long as all together are a small share of what is fetched.
    """
    fetch_bytes, gaps = 0, list[tuple[int, int, int]]()
    for number, file_copies in copies.items():
        ranges = _between(file_copies, files[number].size_bytes)
        fetch_bytes += sum(end - start for start, end in ranges)
        for (_, start), (end, _) in pairwise(ranges):
            if end - start < MOST_GAP_BYTES:
                gaps.append((end - start, number, start))
    left = fetch_bytes // GAP_SHARE
    filled: dict[int, Intervals] = defaultdict(Intervals)
    for size_bytes, number, start in sorted(gaps):
        left -= size_bytes
        if left < 0:
            break
        filled[number].add(start, start + size_bytes)
    return {
        number: [copy for copy in file_copies if not filled[number].has(copy.start, copy.end)]
        for number, file_copies in copies.items()
    }


def _between(copies: Sequence[Copy], size_bytes: int) -> list[tuple[int, int]]:
    """Return the ranges of a file between its copies, which are in order."""
    starts, ends = [0, *(copy.end for copy in copies)], [*(copy.start for copy in copies), size_bytes]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Bytes of a pull.

    total_bytes: the bundle without its `moec.json`.
    linked_bytes: files that an installed bundle has; they take no disk.
    kept_bytes: bytes that an earlier pull left.
    copied_bytes: experts and dense weights that an installed bundle has.
    fetched_bytes: bytes that come from the store.
    """

    total_bytes: int
    linked_bytes: int
    kept_bytes: int
    copied_bytes: int
    fetched_bytes: int


class PullObserver:
    """Receives the events of a pull. This one ignores them."""

    def chosen(self, channel: Channel, bundle: ChannelBundle, name: str) -> None:
        """Receive the bundle of a verified channel. name: of its folder."""

    def planned(self, plan: PullPlan) -> None:
        """Receive the plan, before any weight is fetched."""

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Receive the bytes of the bundle that are there."""

    def testing(self) -> None:
        """Learn that all bytes are there, and that the bundle is opened."""

    def warning(self, text: str) -> None:
        """Receive a sentence that the user should read."""
