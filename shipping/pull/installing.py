"""Bring one bundle to its place on the device. What an earlier pull left is used, and stays if this one fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moec.manifests.bundle import MANIFEST_NAME, BundleManifest
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import BundleError, DiskFull
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_MANIFEST_BYTES
from moec.manifests.files.output_file import WRITING_SUFFIX, AtomicFile, FileSystem, put_in_place
from moec.manifests.sizes import human_bytes

from ..installed.places import Places
from ..installed.prune import partial_names, remove_partial
from ..installed.receipt import is_unchanged, make_receipt, read_receipt, write_receipt
from ..store.interface import Store
from .choose import SignedManifest
from .delta import Copy, Delta, PullObserver, PullPlan, Source, plan_delta, source_of
from .fetch import Fetch, FetchOptions
from .journal import Intervals
from .partial_bundle import PartialBundle, copy_all, kept_ranges

_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""
_SPARE_BYTES = 4 << 20
"""Disk for journal, receipt and folders."""


@dataclass(frozen=True, slots=True)
class Installation:
    """A bundle that is to be installed.

    name: of its folder.
    manifest_sha256: SHA-256 of its `moec.json`.
    """

    places: Places
    name: str
    manifest_sha256: str
    signed: SignedManifest

    @property
    def manifest(self) -> BundleManifest:
        return self.signed.manifest


def delta_of(installation: Installation) -> Delta:
    """Return what installed bundles offer for a new one. Nothing is changed."""
    places, current = installation.places, installation.places.current
    names = sorted(places.ids(), key=lambda name: (name != current, name))
    sources = (_source(places, name) for name in names)
    return plan_delta(installation.manifest, [source for source in sources if source is not None])


def plan_of(installation: Installation, delta: Delta, done: Sequence[Intervals] | None = None) -> PullPlan:
    """Return the bytes of an installation.

    done: finished ranges of each file; None: those on the disk.
    """
    entries = installation.manifest.files
    if done is None:
        done = kept_ranges(installation.places, installation.name, installation.manifest_sha256, entries)
    copied, fetched = delta.left_bytes(done)
    linked = sum(entries[number].size_bytes for number in delta.links)
    total = sum(entry.size_bytes for entry in entries)
    return PullPlan(total, linked, total - linked - copied - fetched, copied, fetched)


def install(
    store: Store,
    installation: Installation,
    options: FetchOptions,
    observer: PullObserver,
    system: FileSystem,
    make_room: Callable[[int], bool],
) -> None:
    """Fetch and check all bytes of a bundle, then give it its name, its signature and its receipt.

    make_room: takes the bytes that the disk lacks, and returns whether it has removed a bundle.
    Raises StoreFailed, ChecksumMismatch, DiskFull, OSError. Finished ranges stay for the next pull.
    """
    places, name, entries = installation.places, installation.name, installation.manifest.files
    for other in partial_names(places):
        if other != name:
            remove_partial(places, other, system)
    with PartialBundle(places, name, installation.manifest_sha256, entries, system) as partial:
        partial.keep_manifest(installation.signed.manifest_bytes)
        delta = _linked(partial, delta_of(installation))
        plan = plan_of(installation, delta, partial.done)
        missing = _needed_bytes(plan) - shutil.disk_usage(places.folder).free
        if missing > 0 and make_room(missing):
            delta = _linked(partial, delta_of(installation))
            plan = plan_of(installation, delta, partial.done)
        observer.planned(plan)
        _require_disk(installation, plan)
        for number in delta.fetched:
            partial.prepare(number)
        fetch = Fetch(store, installation.manifest_sha256, partial, frozenset(delta.links), options)
        fetch.run(lambda check: copy_all(partial, delta.copies, check), observer.progress)
        partial.complete(installation.signed.manifest_bytes)
        _publish(installation, partial, system)


def _source(places: Places, name: str) -> Source | None:
    """Return what an installed bundle offers; None if its manifest cannot be used."""
    folder, receipt = places.bundle(name), read_receipt(places.receipt(name))
    try:
        manifest = decode_manifest(read_input(folder / MANIFEST_NAME, MAX_MANIFEST_BYTES), str(folder / MANIFEST_NAME))
    except (UnreadableFile, BundleError):
        return None
    files = receipt.files if receipt is not None else ()
    return source_of(folder, manifest, {file.name for file in files if is_unchanged(folder, file)})


def _linked(partial: PartialBundle, delta: Delta) -> Delta:
    """Make the links of a plan. Where the file system has none, the files are copied."""
    refused = {number: source for number, source in delta.links.items() if not partial.link(number, source)}
    if not refused:
        return delta
    copies = [
        Copy(number, 0, partial.entries[number].size_bytes, None, source, 0) for number, source in refused.items()
    ]
    return replace(
        delta,
        links={number: source for number, source in delta.links.items() if number not in refused},
        copies=(*delta.copies, *copies),
        fetched={**delta.fetched, **dict.fromkeys(refused, ())},
    )


def _needed_bytes(plan: PullPlan) -> int:
    return plan.copied_bytes + plan.fetched_bytes + _SPARE_BYTES


def _require_disk(installation: Installation, plan: PullPlan) -> None:
    """Raise DiskFull if the disk has less space than a plan takes."""
    places, need = installation.places, _needed_bytes(plan)
    free = shutil.disk_usage(places.folder).free
    if free < need:
        has_others = bool(set(places.ids()) - {places.current, installation.name})
        raise DiskFull(
            f"the disk of `{places.folder}` has {human_bytes(free)} free, {human_bytes(need)} are needed: "
            f"{human_bytes(need - _SPARE_BYTES)} for the bundle, {human_bytes(_SPARE_BYTES)} for journal and receipt",
            "free space, or keep no previous bundle: --keep 0" if has_others else "free space",
        )


def _publish(installation: Installation, partial: PartialBundle, system: FileSystem) -> None:
    """Give a complete bundle its name. Its signature and its receipt come first. Raises OSError."""
    places, name = installation.places, installation.name
    signature = places.signature(name)
    with AtomicFile(signature, signature.with_name(f".{signature.name}{WRITING_SUFFIX}"), system) as file:
        file.write(installation.signed.signature)
    names = [MANIFEST_NAME, *(entry.name for entry in partial.entries)]
    receipt = make_receipt(partial.folder, installation.manifest_sha256, names)
    write_receipt(places.receipt(name), receipt, system)
    if is_implied_folder(places.bundle(name)):  # its files had changed
        exchange(partial.folder, places.bundle(name), places.removing(name), system)
        remove_partial(places, name, system)
    else:
        put_in_place(partial.folder, places.bundle(name), system)
    with contextlib.suppress(FileNotFoundError):
        system.remove(places.journal(name))


def exchange(new: Path, old: Path, aside: Path, system: FileSystem) -> None:
    """Exchange the names of two folders.

    Where the system cannot, `old` gets the name `aside` for a moment, in which there is nothing under its name.
    Raises OSError.
    """
    if not _in_one_step(new, old):
        system.rename(old, aside)
        system.rename(new, old)
        system.rename(aside, new)
    system.sync_directory(old.parent)


def _in_one_step(first: Path, second: Path) -> bool:
    """Return whether the system exchanged two names."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    result: int = call(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE)
    return result == 0
