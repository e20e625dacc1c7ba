"""`NAME.tune.json`: options measured to be faster for one bundle, machine, storage and size of the expert cache.

The file is next to the bundle, never inside.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.errors import BundleIncomplete, OptionError
from moec.manifests.files.implied_names import check_implied, write_implied
from moec.manifests.files.input_file import UnreadableFile, read_input
from moec.manifests.files.limits import MAX_MANIFEST_BYTES, MAX_TUNE_BYTES, TUNE_JSON
from moec.manifests.files.strict_json import load_strict_json, shown
from moec.manifests.runtime_limits import MAX_READERS

from ..options.runtime import (
    MAX_PREFETCH_EXPERTS,
    MAX_PREFETCH_LAYERS,
    MAX_THREADS,
    POLICIES,
    PREFETCH_RULES,
    PREFETCHERS,
    WEIGHTED_POLICIES,
    parse_weights,
)

SUFFIX = ".tune.json"
FORMAT_VERSION = 1
_MARK = re.compile(rb'\A\{\s*"format_version": [0-9]+,\s*"machine": "')
CACHE_TOLERANCE = 0.2
"""Largest relative difference of cache sizes for which options are used. Their benefit depends on the miss rate."""
# Options that may be tuned, and their limits. All are exact.
_NUMBERS = {
    "readers": MAX_READERS,
    "threads": MAX_THREADS,
    "prefetch_layers": MAX_PREFETCH_LAYERS,
    "prefetch_experts": MAX_PREFETCH_EXPERTS,
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tuned options and what they were measured on.

    machine: digest of the machine (profiles.probe.machine_sha256).
    storage: digest of the storage that holds the bundle (profiles.probe.storage_sha256).
    bundle: SHA-256 of the bundle's manifest file.
    expert_cache_bytes: capacity of the measured cache, while a short text is decoded.

    options: options that differ from the defaults and were faster.
    trials: every comparison that was made.
    """

    machine: str
    storage: str
    bundle: str
    expert_cache_bytes: int
    options: dict[str, str | int]
    trials: list[dict[str, Any]] = field(default_factory=list)

    def fits_cache(self, cache_bytes: int) -> bool:
        """Return whether a cache of this capacity is close enough to the measured one."""
        return abs(cache_bytes - self.expert_cache_bytes) <= CACHE_TOLERANCE * self.expert_cache_bytes


def tuning_path(bundle: Path) -> Path:
    """Return the path of a bundle's file."""
    return file_next_to(bundle, SUFFIX)


def file_next_to(bundle: Path, suffix: str) -> Path:
    """Return the path of a file next to a bundle's folder: the folder's name, links followed, and a suffix."""
    folder = bundle.resolve()
    return folder.parent / (folder.name + suffix)


def bundle_sha256(bundle: Path) -> str:
    """Return the digest of a bundle's manifest file, which contains the digests of all others.

    Raises BundleIncomplete.
    """
    path = bundle / MANIFEST_NAME
    try:
        return hashlib.sha256(read_input(path, MAX_MANIFEST_BYTES)).hexdigest()
    except UnreadableFile as error:
        raise BundleIncomplete(f"`{path}` {error}", "copy the bundle again") from error


def write_tuning(bundle: Path, tuning: Tuning) -> Path:
    """Write the file atomically. Raises the errors of `write_implied`."""
    path = tuning_path(bundle)
    plain = {"format_version": FORMAT_VERSION, **asdict(tuning)}
    write_implied(path, (json.dumps(plain, indent=1) + "\n").encode(), _MARK)
    return path


def check_tuning(bundle: Path) -> None:
    """Check before the measurement that the file can be written. Raises the errors of `check_implied`."""
    check_implied(tuning_path(bundle), _MARK)


def read_tuning(bundle: Path) -> Tuning | None:
    """Return the tuning next to a bundle, or None if there is none. Raises ValueError with the error in the file."""
    path = tuning_path(bundle)
    try:
        data = read_input(path, MAX_TUNE_BYTES, follow_links=True)
    except UnreadableFile as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise ValueError(str(error)) from error
    try:
        plain = load_strict_json(data, TUNE_JSON)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(plain, dict) or plain.pop("format_version", None) != FORMAT_VERSION:
        raise ValueError(f"is not of version {FORMAT_VERSION}")
    if set(plain) != {item.name for item in fields(Tuning)} or not isinstance(plain["options"], dict):
        raise ValueError("lacks a field, or has one too many")
    if type(plain["expert_cache_bytes"]) is not int or plain["expert_cache_bytes"] < 0:
        raise ValueError("has an expert cache of no size")
    if not isinstance(plain["trials"], list) or not all(isinstance(trial, dict) for trial in plain["trials"]):
        raise ValueError("has trials that are no list of objects")
    for name, value in plain["options"].items():
        if not _is_valid(name, value):
            raise ValueError(f"has the option `{name[:40]}` = {shown(value)}, which is not on offer")
    if "policy_weights" in plain["options"] and plain["options"].get("policy") not in WEIGHTED_POLICIES:
        raise ValueError("has weights of a policy that takes none")
    return Tuning(**plain)


def _is_valid(name: str, value: object) -> bool:
    if name == "prefetch":
        return value in PREFETCHERS
    if name == "prefetch_rule":
        return value in PREFETCH_RULES
    if name == "policy":
        return value in POLICIES
    if name == "policy_weights":
        try:
            return isinstance(value, str) and bool(parse_weights(value))
        except OptionError:
            return False
    return name in _NUMBERS and type(value) is int and 0 < value <= _NUMBERS[name]
