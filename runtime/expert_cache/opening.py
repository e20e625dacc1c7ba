"""Open the expert cache of a run: NativeCache where it can serve the run, else PythonCache."""

from __future__ import annotations

from .. import kernels
from ..options.runtime import Policy, RuntimeOptions
from ..storage.interface import ExpertStorage
from ..storage.read_storage import ReadStorage
from .bound_experts import BoundExperts
from .cache_spec import CacheSpec
from .interface import StreamingCache
from .native_cache import NativeCache
from .policies import policy_score
from .python_cache import PythonCache

NATIVE_POLICIES: tuple[Policy, ...] = ("lrfu", "lru", "lfu")


def open_cache(
    storage: ExpertStorage,
    experts: BoundExperts,
    spec: CacheSpec,
    options: RuntimeOptions,
) -> StreamingCache:
    """Return a NativeCache if a run can have one, else a PythonCache. Both make the same decisions."""
    has_encoder = bool(spec.records.encoder_layers)
    if why_not_native(options, has_encoder) is None and isinstance(storage, ReadStorage):
        return NativeCache(storage, experts, spec, options.policy, options.readers)
    score = policy_score(options.policy, options.policy_weights)
    return PythonCache(storage, spec, score, options.readers)


def why_not_native(options: RuntimeOptions, has_encoder: bool) -> str | None:
    """Return why a run cannot have a NativeCache, in a few words; None if it can."""
    if kernels.compiled() is None:
        return f"kernels {kernels.active()}"
    if options.accelerator is not None:
        return "an accelerator"
    if has_encoder:
        return "an encoder"
    if options.policy not in NATIVE_POLICIES:
        return f"policy {options.policy}"
    return "io mmap" if options.io == "mmap" else None
