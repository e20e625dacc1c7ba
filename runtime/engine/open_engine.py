"""Open a bundle for running: all steps between the checked files and an engine, in the order that they need."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from moec.manifests.bundle import LOOKAHEAD_NAME, TABLES_NAME, BundleManifest
from moec.profiles.probe import available_threads

from .. import kernels
from ..bundle.open_bundle import Bundle, verify_files
from ..expert_cache.bound_experts import bind_experts, check_activations
from ..expert_cache.cache_spec import CacheSpec
from ..expert_cache.interface import StreamingCache
from ..expert_cache.native_cache import eviction_of
from ..expert_cache.open_cache import open_cache
from ..expert_cache.policies import policy_score
from ..expert_cache.records import ExpertRecords, bundle_records, warm_order
from ..layers.kv_cache import KVCache
from ..memory.budget import MemoryPlan, plan_memory, require_machine_memory
from ..memory.elastic_cache import ElasticCache
from ..model.dense_weights import load_dense
from ..model.forward import Model
from ..model.one_call import NativeModes
from ..modes.decoder import LossyDecoder, check_modes
from ..modes.expert_choice import Versions, low_version_indices
from ..modes.logical_cache import DecidingCache, LogicalCache, NativeLogicalCache
from ..options.runtime import MAX_THREADS, RuntimeOptions
from ..prefetch.learned_routers import learned_routers, read_lookahead
from ..prefetch.predictors import make_predictor
from ..storage.interface import ExpertStorage, page_bytes
from ..storage.read_storage import open_storage
from ..text.tokenizer import BundleTokenizer, load_tokenizer
from .mode_line import CodePath, code_path

if TYPE_CHECKING:
    from ..accelerator.cooperative import CooperativeExperts
    from ..bundle.tables import Tables


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Bytes of the experts, and the memory that a run has for them.

    sizes: bytes of each stored expert, int64 [N]. Low versions come last.
    count: number of experts without their low versions.
    capacity_bytes: size of the cache.
    minimum_bytes: bytes of the experts that one token needs in a layer.
    """

    sizes: np.ndarray
    count: int
    capacity_bytes: int
    minimum_bytes: int

    @property
    def holds_all(self) -> bool:
        """True if all experts fit into the cache."""
        return int(self.sizes[: self.count].sum()) <= self.capacity_bytes

    def cache_spec(self, records: ExpertRecords) -> CacheSpec:
        """Return a cache of these experts. Experts read ahead leave room for those that one token needs in a layer."""
        return CacheSpec(self.sizes, self.capacity_bytes, records, self.capacity_bytes - self.minimum_bytes)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """All parts of an opened bundle.

    experts: sizes of the experts.
    records: uses of each expert. The eviction policy reads them.
    path: the code that the run takes.
    elastic: sets the size of the cache before each pass; None if its size is fixed.
    accelerator: computes some experts; None without one.
    lossy: decides under the lossy modes; None if none decides.
    """

    tokenizer: BundleTokenizer
    memory: MemoryPlan
    experts: ExpertSizes
    records: ExpertRecords
    storage: ExpertStorage
    cache: StreamingCache
    kv: KVCache
    model: Model
    path: CodePath
    elastic: ElasticCache | None
    accelerator: CooperativeExperts | None
    lossy: LossyDecoder | None


def open_parts(bundle: Bundle, options: RuntimeOptions) -> EngineParts:
    """Check, plan, load and connect. Files that were opened here are closed if a step fails.

    Raises KernelUnavailable, MemoryBudgetExceeded, OptionError, StorageReadFailed, ChecksumMismatch, BundleError.
    """
    manifest = bundle.manifest
    if options.verify:
        verify_files(bundle, (TABLES_NAME, LOOKAHEAD_NAME))
    check_activations(manifest, options)
    device, host_bytes = None, 0
    if options.accelerator is not None:
        from ..accelerator.open_device import cooperate, open_device

        device = open_device(manifest, options, options.accelerator)
        host_bytes = device.host_bytes
    require_machine_memory(bundle.path, manifest, options, host_bytes)
    plan_memory(manifest, options, host_bytes)  # with the size of the tokenizer's file, before it is loaded
    tokenizer = load_tokenizer(bundle, options.verify)
    memory = plan_memory(manifest, options, host_bytes)  # with the memory that the tokenizer uses
    kernels.set_threads(options.threads or min(MAX_THREADS, available_threads()))
    check_modes(options.modes, manifest.model, len(manifest.low_experts))
    count, stored = len(manifest.experts), manifest.stored_experts
    page_sizes = np.array([page_bytes(entry.size_bytes) for entry in stored], np.int64)
    experts = ExpertSizes(page_sizes, count, memory.cache_bytes, memory.minimum_expert_bytes)
    decided = experts
    if options.modes.reads_cache:
        # Lossy modes depend neither on the pages of this machine nor on the memory that this process happens to use.
        sizes = np.array([entry.size_bytes for entry in stored], np.int64)
        decided = ExpertSizes(sizes, count, memory.logical_cache_bytes, manifest.cost.minimum_expert_bytes)
    reads_ahead = not decided.holds_all
    tables = bundle.tables(has_paths=reads_ahead and options.prefetch == "path")
    records = bundle_records(bundle, tables, stored)
    with ExitStack() as on_failure:
        storage = open_storage(bundle, options.io, options.verify, memory.cache_bytes)
        on_failure.callback(storage.close)
        with storage.made_ready(is_wanted=options.cache_state == "warm"):  # a warm start fills all of it
            dense = load_dense(bundle, options.verify)
            reads_bfloats = options.modes.expert_activations == "bfloat16"
            bound = bind_experts(bundle, stored, storage, dense, reads_bfloats)
            cache = open_cache(storage, bound, experts.cache_spec(records), options)
            on_failure.callback(cache.close)
            kv = KVCache(manifest.model, options.slots, memory.context, options.kv)
            model = Model(manifest, dense, bound.experts, cache, memory.context)
        _look_ahead(model, bundle, options, reads_ahead, tables)
        # The cache takes the part of the budget that short sequences leave free.
        is_elastic = memory.budget_bytes is not None and options.expert_cache is None and not experts.holds_all
        elastic = ElasticCache(manifest, memory, options, cache) if is_elastic else None
        accelerator = None
        if device is not None:  # the cache must not read yet
            accelerator = cooperate(device, manifest, options, model, kv, storage, records, cache.is_resident)
        model.accelerator = accelerator
        order = warm_order(records).tolist() if options.cache_state == "warm" else []
        warm = model.absent_first([index for index in order if index < count])  # low versions are read at a miss
        cache.warm(warm)
        lossy = _open_modes(manifest, options, decided, records, model, accelerator, warm)
        path = code_path(manifest, options, reads_ahead)
        if path.why_not_one_call is None:
            model.bind_one_call(_native_modes(lossy))
        on_failure.pop_all()
    return EngineParts(
        tokenizer=tokenizer,
        memory=memory,
        experts=experts,
        records=records,
        storage=storage,
        cache=cache,
        kv=kv,
        model=model,
        path=path,
        elastic=elastic,
        accelerator=accelerator,
        lossy=lossy,
    )


def _look_ahead(model: Model, bundle: Bundle, options: RuntimeOptions, reads_ahead: bool, tables: Tables) -> None:
    """Choose how experts are read ahead.

    reads_ahead: whether some experts have to be read while tokens are decoded.
    """
    manifest = bundle.manifest
    model.advisor.set_options(options, model.needs_no_read)
    if reads_ahead:
        matrices = read_lookahead(bundle) if options.uses_learned_routers else {}
        learned = learned_routers(manifest, matrices, model.advisor)
        model.advisor.predictor = make_predictor(
            options.prefetch, tables, manifest.model, model.router_norms(), model.routers(), learned
        )


def _open_modes(
    manifest: BundleManifest,
    options: RuntimeOptions,
    experts: ExpertSizes,
    records: ExpertRecords,
    model: Model,
    accelerator: CooperativeExperts | None,
    warm: list[int],
) -> LossyDecoder | None:
    """Return the object that decides under the lossy modes; None if none decides.

    experts: sizes by which the modes decide.
    warm: experts that fill the cache at the start.
    """
    if not options.modes.decides:
        return None
    logical: DecidingCache | None = None
    if options.modes.reads_cache:
        extension, spec = kernels.compiled(), experts.cache_spec(records)
        if extension is not None and accelerator is None:
            logical = NativeLogicalCache(extension, spec, eviction_of(extension, options, records), warm)
        else:
            on_device = () if accelerator is None else accelerator.placement.resident
            logical = LogicalCache(spec, policy_score(options.policy, options.policy_weights), warm, on_device)
        model.advisor.holds = logical.is_resident  # advice must not depend on when a read ends either
    versions = Versions(model.first_expert, low_version_indices(manifest))
    return LossyDecoder(options.modes, model, versions, logical)


def _native_modes(lossy: LossyDecoder | None) -> NativeModes | None:
    """Return what the extension needs to decide as the lossy modes do; None without modes."""
    if lossy is None:
        return None
    cache = lossy.cache.native if isinstance(lossy.cache, NativeLogicalCache) else None
    parts = (lossy.modes, lossy.versions, lossy.cache)
    return NativeModes(lossy.modes, parts, lossy.versions.low_indices.tolist(), cache)
