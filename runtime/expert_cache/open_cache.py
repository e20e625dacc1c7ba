"""Open the expert cache of a run: NativeCache where it can serve the run, else PythonCache."""

from __future__ import annotations

from .. import kernels
from ..options.runtime import RuntimeOptions
from ..storage.interface import NativeStorage
from .bound_experts import BoundExperts
from .cache_spec import CacheSpec
from .interface import StreamingCache
from .native_cache import NativeCache
from .policies import policy_score
from .python_cache import PythonCache


def open_cache(
    storage: NativeStorage,
    experts: BoundExperts,
    spec: CacheSpec,
    options: RuntimeOptions,
) -> StreamingCache:
    """Return a NativeCache if a run can have one, else a PythonCache. Both make the same decisions."""
    if why_not_native(options) is None:
        return NativeCache(storage, experts, spec, options)
    score = policy_score(options.policy, options.policy_weights)
    return PythonCache(storage, spec, score, options.reader_threads)


def why_not_native(options: RuntimeOptions) -> str | None:
    """Return why a run cannot have a NativeCache, in a few words; None if it can."""
    if kernels.compiled() is None:
        return f"kernels {kernels.active()}"
    return None if options.accelerator is None else "an accelerator"
