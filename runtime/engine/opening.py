"""Open a bundle for running: every step between the checked files and an engine, in the order that they need."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moec.manifests.bundle import TABLES_NAME, BundleManifest

from .. import kernels
from ..accelerator import open_accelerator
from ..bundle.opening import Bundle, verify_files
from ..expert_cache.bound_experts import bind_experts
from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.eviction import ExpertRecords, bundle_records, policy_score, warm_order
from ..expert_cache.interface import StreamingCache
from ..expert_cache.native_cache import open_cache
from ..layers.kv_cache import KVCache
from ..memory.budget import MemoryPlan, plan_memory
from ..memory.elastic_cache import ElasticCache
from ..model.dense_weights import load_dense
from ..model.forward import Model
from ..modes.choice import Versions, low_version_indices
from ..modes.decoder import LossyDecoder, check_modes
from ..modes.logical_cache import LogicalCache
from ..options.runtime import MAX_THREADS, RuntimeOptions
from ..prefetch.predictors import make_predictor
from ..storage.interface import ExpertStorage, page_bytes
from ..storage.opening import open_storage
from ..text.streaming_text import load_tokenizer
from ..text.tokenizer import BundleTokenizer

if TYPE_CHECKING:
    from ..accelerator.cooperative import CooperativeExperts
    from ..accelerator.opening import OpenedAccelerator
    from ..bundle.tables import Tables


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Bytes of the experts against the memory that a run has for them.

    sizes: bytes of each stored expert in whole pages, low versions last, int64 [N].
    count: experts without their low versions.
    holds_all: whether all of these fit into the cache.
    decision_bytes: the cache by which lossy modes decide and experts are read ahead. It must not depend on what this
        process happens to take of the memory.
    minimum_bytes: experts that one token needs in a layer.
    """

    sizes: np.ndarray
    count: int
    holds_all: bool
    decision_bytes: int
    minimum_bytes: int

    @property
    def reads_ahead(self) -> bool:
        """Whether some experts have to be read while tokens are decoded."""
        return int(self.sizes[: self.count].sum()) > self.decision_bytes

    def cache_spec(self, capacity_bytes: int, records: ExpertRecords) -> CacheSpec:
        """Return a cache of these experts. Experts read ahead leave room for those that one token needs in a layer."""
        return CacheSpec(self.sizes, capacity_bytes, records, capacity_bytes - self.minimum_bytes)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything that an opened bundle runs with.

    experts: their sizes.
    records: the uses of each expert, from which the eviction policy decides.
    elastic: sizes the cache before each pass; None where its size is fixed.
    accelerator: computes some experts; None without one.
    lossy: decides under the lossy modes; None for a lossless run.
    """

    tokenizer: BundleTokenizer
    memory: MemoryPlan
    experts: ExpertSizes
    records: ExpertRecords
    storage: ExpertStorage
    cache: StreamingCache
    kv: KVCache
    model: Model
    elastic: ElasticCache | None
    accelerator: CooperativeExperts | None
    lossy: LossyDecoder | None


def open_parts(bundle: Bundle, options: RuntimeOptions) -> EngineParts:
    """Check, plan, load and connect. Files that were opened here are closed if a step fails.

    Raises KernelUnavailable, MemoryBudgetExceeded, OptionError, StorageReadFailed, ChecksumMismatch, BundleError.
    """
    manifest = bundle.manifest
    kernels.require(manifest.required_cpu_features)
    if options.verify:
        verify_files(bundle, (TABLES_NAME,))
    device = open_accelerator(manifest, options)  # before the plan: it takes memory of the host
    tokenizer, memory = _plan(bundle, options, 0 if device is None else device.host_bytes)
    kernels.set_threads(options.threads or min(MAX_THREADS, len(os.sched_getaffinity(0))))
    check_modes(options.modes, manifest.model, len(manifest.low_experts))
    experts = _sizes(manifest, memory, options)
    tables = bundle.tables(has_paths=experts.reads_ahead and options.prefetch == "path")
    records = bundle_records(bundle, tables, manifest.stored_experts)
    with ExitStack() as on_failure:
        storage = open_storage(bundle, options.io, options.verify, memory.cache_bytes)
        on_failure.callback(storage.close)
        with storage.made_ready(is_wanted=options.cache_state == "warm"):  # a warm start fills all of it
            dense = load_dense(bundle, options.verify)
            bound = bind_experts(bundle, manifest.stored_experts, storage, dense)
            cache = open_cache(storage, bound, experts.cache_spec(memory.cache_bytes, records), options)
            on_failure.callback(cache.close)
            kv = KVCache(manifest.model, options.slots, memory.context, options.kv)
            model = Model(bundle, dense, bound.experts, cache, memory.context)
        _look_ahead(model, manifest, options, experts, tables)
        elastic = ElasticCache(manifest, memory, options, cache) if _is_elastic(memory, options, experts) else None
        accelerator = _start_accelerator(device, manifest, options, (model, kv, storage, records, cache))
        warm = _warm_up(cache, model, records, options, experts)
        lossy = _open_modes(manifest, options, experts, (records, model, accelerator, warm))
        on_failure.pop_all()
    return EngineParts(tokenizer, memory, experts, records, storage, cache, kv, model, elastic, accelerator, lossy)


def _plan(bundle: Bundle, options: RuntimeOptions, host_bytes: int) -> tuple[BundleTokenizer, MemoryPlan]:
    """Load the tokenizer and divide the budget. host_bytes: taken by an accelerator."""
    plan_memory(bundle.manifest, options, host_bytes)  # by the size of the tokenizer's file, before it is loaded
    tokenizer = load_tokenizer(bundle, options.verify)
    return tokenizer, plan_memory(bundle.manifest, options, host_bytes)  # by the memory that it takes


def _sizes(manifest: BundleManifest, memory: MemoryPlan, options: RuntimeOptions) -> ExpertSizes:
    sizes = np.array([page_bytes(entry.size_bytes) for entry in manifest.stored_experts], np.int64)
    count = len(manifest.experts)
    return ExpertSizes(
        sizes,
        count,
        holds_all=int(sizes[:count].sum()) <= memory.cache_bytes,
        decision_bytes=memory.logical_cache_bytes if options.modes.reads_cache else memory.cache_bytes,
        minimum_bytes=manifest.cost.minimum_expert_bytes,
    )


def _is_elastic(memory: MemoryPlan, options: RuntimeOptions, experts: ExpertSizes) -> bool:
    """Whether the cache takes what short sequences leave of the budget."""
    return memory.budget_bytes is not None and options.expert_cache is None and not experts.holds_all


def _look_ahead(
    model: Model, manifest: BundleManifest, options: RuntimeOptions, experts: ExpertSizes, tables: Tables
) -> None:
    """Choose how experts are read ahead, and then whether a token takes one call of the extension per layer."""
    if experts.reads_ahead:
        model.advisor.predictor = make_predictor(
            options.prefetch, tables, manifest.model, model.router_norms(), model.routers()
        )
    model.advisor.set_options(options, model.needs_no_read)
    model.bind_one_call(manifest, options, experts.reads_ahead)


def _start_accelerator(
    device: OpenedAccelerator | None,
    manifest: BundleManifest,
    options: RuntimeOptions,
    host: tuple[Model, KVCache, ExpertStorage, ExpertRecords, StreamingCache],
) -> CooperativeExperts | None:
    """Bring the most popular experts to the accelerator, if one was opened. The cache must not read yet."""
    if device is None:
        return None
    from ..accelerator.opening import HostParts, start_cooperation

    model, kv, storage, records, cache = host
    accelerator = start_cooperation(device, manifest, options, HostParts(model, kv, storage, records, cache.has))
    model.accelerator = accelerator
    return accelerator


def _warm_up(
    cache: StreamingCache, model: Model, records: ExpertRecords, options: RuntimeOptions, experts: ExpertSizes
) -> list[int]:
    """Begin to fill the cache with the most popular experts. Returns these; low versions come with a miss."""
    order = warm_order(records).tolist() if options.cache_state == "warm" else []
    warm = model.absent_first([index for index in order if index < experts.count])
    cache.warm(warm)
    return warm


def _open_modes(
    manifest: BundleManifest,
    options: RuntimeOptions,
    experts: ExpertSizes,
    known: tuple[ExpertRecords, Model, CooperativeExperts | None, list[int]],
) -> LossyDecoder | None:
    """Return what decides under the lossy modes; None if all are off."""
    if options.modes.is_lossless:
        return None
    records, model, accelerator, warm = known
    logical = None
    if options.modes.reads_cache:
        on_device = () if accelerator is None else accelerator.placement.resident
        score = policy_score(options.policy, options.policy_weights)
        logical = LogicalCache(experts.cache_spec(experts.decision_bytes, records), score, warm, on_device)
        model.advisor.holds = logical.holds  # advice must not depend on when a read ends either
    versions = Versions(model.first_expert, low_version_indices(manifest))
    return LossyDecoder(options.modes, model, versions, logical)
