"""Options of `moec tune`: valid for the same compile, machine and storage, and a cache of about the same size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..terminal import output
from .profile_defaults import payable_threads

if TYPE_CHECKING:
    from moec.runtime.options.runtime import RuntimeOptions
    from moec.runtime.tuning.tune_file import Tuning


def tuned_options(bundle: Path, options: RuntimeOptions) -> dict[str, Any]:
    """Return the tuned options for this run. If the file is not valid for it, warn and return none.

    Raises the errors of `planned_cache_bytes`.
    """
    from moec.runtime.tuning.tune_file import read_tuning, tuning_path

    of_size = ""
    try:
        tuning = read_tuning(bundle)
        if tuning is None:
            return {}
        if (problem := made_elsewhere(tuning, bundle)) is None:
            cache_bytes = planned_cache_bytes(bundle, options)
            if tuning.fits_cache(cache_bytes):
                return payable_threads(tuning.options)
            then, now = output.human_bytes(tuning.expert_cache_bytes), output.human_bytes(cache_bytes)
            problem = f"was made with an expert cache of {then}, this run has {now}"
            of_size = f" {bundle} --expert-cache {options.expert_cache or cache_bytes}"
    except (ValueError, OSError) as error:
        problem = str(error)
    output.say(f"warning: `{tuning_path(bundle)}` {problem}; it is ignored, `moec tune{of_size}` makes a new one")
    return {}


def made_elsewhere(tuning: Tuning, bundle: Path) -> str | None:
    """Return the reason why a tuning is not valid for this bundle on this machine, or None. Raises OSError.

    The size of the cache is not checked.
    """
    from moec.profiles.probe import machine_sha256, storage_sha256
    from moec.runtime.tuning.tune_file import bundle_sha256

    if tuning.bundle != bundle_sha256(bundle):
        return "was made for another compile of the bundle"
    if tuning.machine != machine_sha256():
        return "was made on another machine"
    if tuning.storage != storage_sha256(bundle):
        return "was made on other storage than that of the bundle"
    return None


def planned_cache_bytes(bundle: Path, options: RuntimeOptions) -> int:
    """Return the bytes of the expert cache while a run decodes a short text, with as many slots as fit.

    Memory that an accelerator takes on the host is not counted.
    Raises the errors of `open_engine`.
    """
    import moec.runtime.engine.batch  # noqa: F401  # a run imports it, so its memory counts
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.memory.budget import plan_memory, require_machine_memory
    from moec.runtime.memory.elastic_cache import CacheBudget

    from .opening import bundle_folder, with_fitting_slots

    manifest = open_bundle(bundle_folder(bundle)).manifest

    def cache_bytes(fitting: RuntimeOptions) -> int:
        require_machine_memory(bundle, manifest, fitting)
        plan = plan_memory(manifest, fitting)
        if fitting.expert_cache is not None:
            return plan.cache_bytes
        return CacheBudget(manifest, plan, fitting).capacity_bytes(1, [0] * fitting.slots)

    return with_fitting_slots(cache_bytes, options)
