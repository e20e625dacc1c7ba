"""The `mode:` line: the options of a run, and the code that it takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moec.manifests.bundle import LOOKAHEAD_NAME, BundleManifest

from .. import kernels
from ..expert_cache.open_cache import why_not_native
from ..memory.budget import MemoryPlan, resident_experts_bytes
from ..model.one_call import why_not_one_call
from ..options.runtime import RuntimeOptions


@dataclass(frozen=True, slots=True)
class CodePath:
    """The code that a run takes. Each implementation gives the same bits.

    why_not_native: why the expert cache is not the one of the extension; None if it is.
    why_not_one_call: why a token takes several steps per layer; None if it takes one call of the extension.
    """

    why_not_native: str | None
    why_not_one_call: str | None

    def to_text(self) -> str:
        """Return the end of the `mode:` line, like `cache native, layers in one call`."""
        cache = "native" if self.why_not_native is None else f"python ({self.why_not_native})"
        layers = "in one call" if self.why_not_one_call is None else f"in steps ({self.why_not_one_call})"
        return f"cache {cache}, layers {layers}"

    def to_plain(self) -> dict[str, Any]:
        kinds = {
            "cache": "native" if self.why_not_native is None else "python",
            "layers": "one call" if self.why_not_one_call is None else "steps",
        }
        return kinds | asdict(self)


def code_path(manifest: BundleManifest, options: RuntimeOptions, reads_ahead: bool = True) -> CodePath:
    """Return the code that a run of a bundle takes on this machine.

    reads_ahead: whether some experts do not fit into the cache.
    """
    return CodePath(why_not_native(options), why_not_one_call(manifest, options, reads_ahead))


def mode_line(
    manifest: BundleManifest,
    options: RuntimeOptions,
    memory: MemoryPlan,
    path: CodePath,
    io: str,
    holds_all: bool,
    grows: bool,
) -> str:
    """Return the `mode:` line.

    io: way of reading experts: `direct`, `buffered` or `mmap`.
    holds_all: whether all experts fit into the cache.
    grows: whether the cache uses the part of the budget that short sequences leave free.
    """
    share = min(memory.cache_bytes / max(resident_experts_bytes(manifest), 1), 1)
    weights = f" {options.policy_weights}" if options.policy_weights else ""
    has_learned = options.uses_learned_routers and any(entry.name == LOOKAHEAD_NAME for entry in manifest.files)
    advice = "off (all fit)" if holds_all else options.prefetch_text + " by learned routers" * has_learned
    return (
        f"mode: {'resident' if holds_all else 'streaming'}, {_loss_text(options, memory)}; expert cache "
        f"{'from ' if grows else ''}{memory.cache_bytes / 2**20:.1f} MiB ({share:.0%} of experts), "
        f"policy {options.policy}{weights}, prefetch {advice}, io {io}, readers {options.readers}, "
        f"kernels {kernels.active()}, threads {kernels.threads()}, {path.to_text()}"
    )


def _loss_text(options: RuntimeOptions, memory: MemoryPlan) -> str:
    cold, modes = "" if options.cache_state == "warm" else ", cold start", options.modes
    rounded = "keys and values in 16 bits" if options.kv == "float16" else ""
    if modes.is_exact:
        return f"LOSSY ({rounded}){cold}" if rounded else f"exact{cold}"
    cache_text = f", deciding by a cache of {memory.logical_cache_bytes / 2**20:.1f} MiB" if modes.reads_cache else ""
    named = " + ".join(name for name in (modes.to_text(), rounded) if name)
    return f"LOSSY ({named}){cache_text}{cold}"
