"""The `mode:` line: what is on in a run."""

from __future__ import annotations

from moec.manifests.bundle import BundleManifest

from .. import kernels
from ..memory.budget import MemoryPlan
from ..options.runtime import RuntimeOptions


def mode_line(
    manifest: BundleManifest, options: RuntimeOptions, memory: MemoryPlan, io: str, holds_all: bool, grows: bool
) -> str:
    """One line. io: how storage is read; grows: whether the cache takes what short sequences leave of the budget."""
    share = min(memory.cache_bytes / max(manifest.cost.expert_padded_bytes, 1), 1)
    weights = f" {options.policy_weights}" if options.policy_weights else ""
    advice = "off (all fit)" if holds_all else options.prefetch_text
    return (
        f"mode: {'resident' if holds_all else 'streaming'}, {_loss_text(options, memory)}; expert cache "
        f"{'from ' if grows else ''}{memory.cache_bytes / 2**20:.1f} MiB ({share:.0%} of experts), "
        f"policy {options.policy}{weights}, prefetch {advice}, io {io}, readers {options.readers}, "
        f"kernels {kernels.active()}, threads {kernels.threads()}"
    )


def _loss_text(options: RuntimeOptions, memory: MemoryPlan) -> str:
    cold, modes = "" if options.cache_state == "warm" else ", cold start", options.modes
    rounded = "keys and values in 16 bits" if options.kv == "float16" else ""
    if modes.is_lossless:
        return f"LOSSY ({rounded}){cold}" if rounded else f"lossless{cold}"
    held = f", deciding by a cache of {memory.logical_cache_bytes / 2**20:.1f} MiB" if modes.reads_cache else ""
    named = " + ".join(part for part in (modes.to_text(), rounded) if part)
    return f"LOSSY ({named}){held}{cold}"
