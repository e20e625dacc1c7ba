"""The best speed of decoding on this machine: bandwidth of memory and storage, and the bytes that a token moves."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moec.profiles.device import DeviceProfile
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.trace.statistics import RunStatistics


def measured_host(bundle: Bundle, threads: int | None) -> DeviceProfile:
    """Return the profile of this machine. Memory is read by as many threads as will decode.

    Storage is measured by reads of the largest expert's size, in the largest file of the bundle. If that file is too
    small, the reads are in a file made next to the bundle, if its folder can be written.
    threads: number of threads, or None for all processors.
    """
    from moec.profiles.probe import MIN_SAMPLE_BYTES, available_threads, probe_host
    from moec.runtime.memory.bandwidth import buffer_bytes, read_bytes_per_s

    files = bundle.manifest.files
    largest = max(files, key=lambda entry: entry.size_bytes)
    request_bytes = max(entry.size_bytes for entry in bundle.manifest.experts)
    folder = bundle.path.resolve().parent
    if largest.size_bytes < MIN_SAMPLE_BYTES and os.access(folder, os.W_OK | os.X_OK):
        host = probe_host(folder, request_bytes=request_bytes)
    else:
        host = probe_host(bundle.path / largest.name, request_bytes=request_bytes, least_bytes=0)
    threads = threads or available_threads()
    size = buffer_bytes(sum(entry.size_bytes for entry in files))
    source = f"measured: {threads} threads reading {size} bytes, best of three"
    provenance = {**host.provenance, "memory_bytes_per_s": source}
    return replace(host, memory_bytes_per_s=read_bytes_per_s(size, threads), provenance=provenance)


def predict(bundle: Bundle, host: DeviceProfile, cache_bytes: int) -> dict[str, Any]:
    """Return the ceiling of decoding: the bytes that one token moves, over the bandwidth.

    cache_bytes: size of the expert cache.
    The result has these keys:
    compute_bytes_per_token: dense weights, one row of the embedding, and the chosen experts.
    missed_bytes_per_token: misses of a cache that holds the experts that calibration saw most often. Without
        calibration all experts are equally popular.
    compute_ns, storage_ns: time of each per token. tpot_ns is the larger one.
    """
    from moec.profiles.predict import compute_ns, expected_misses, storage_ns

    manifest = bundle.manifest
    model, popularity = manifest.model, bundle.tables().popularity
    experts, expert_bytes = [], 0.0
    for entry in manifest.experts:
        layer = model.layers[entry.layer].experts
        seen = int(popularity[entry.layer].sum())
        share = int(popularity[entry.layer, entry.expert]) / seen if seen else 1 / layer.count
        reads_per_token = share * model.reads_per_token(entry.layer)
        experts.append((entry.size_bytes, reads_per_token))
        expert_bytes += entry.size_bytes * reads_per_token
    dense_bytes = 0
    for dense in manifest.dense:
        if model.is_decoded_with(dense.name):
            is_one_row = len(dense.shape) == 1 or (dense.name == "embedding" and not model.tie_embeddings)
            dense_bytes += round((1 if is_one_row else dense.shape[0]) * dense.spec.row_bytes(dense.shape[-1]))
    compute_bytes = round(dense_bytes + expert_bytes)
    missed_bytes, reads = expected_misses(experts, cache_bytes)
    compute, storage = compute_ns(host, compute_bytes), storage_ns(host, missed_bytes, reads)
    return {
        "is_calibrated": bool(popularity.any()),
        "compute_bytes_per_token": compute_bytes,
        "missed_bytes_per_token": round(missed_bytes),
        "reads_per_token": reads,
        "compute_ns": compute,
        "storage_ns": storage,
        "tpot_ns": max(compute, storage),
        "cache_bytes": cache_bytes,
    }


def run_ceiling_ns(ceiling: dict[str, Any], host: DeviceProfile, statistics: RunStatistics) -> int:
    """Return the least time per token, in ns, for the bytes that a run has read: the longer of compute and storage.

    Bytes that were read and not used count too. The rate of storage is the larger of the probe's and the run's own.
    Reason: a virtual disk may serve a process that only reads at half the rate.
    """
    read, shares, rate = statistics.decode_bytes_read_per_token, statistics.decode_shares, host.storage_bytes_per_s
    if shares is not None and shares.storage_busy and statistics.tokens_per_s:
        rate = max(rate, int(read * statistics.tokens_per_s / shares.storage_busy))
    return max(int(ceiling["compute_ns"]), math.ceil(read / rate * 1e9))
