"""The memory budget: the needs of a run, its limit, and the rest for experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from moec.manifests.bundle import LOOKAHEAD_NAME, MANIFEST_NAME, TABLES_NAME, TOKENIZER_NAME, BundleManifest
from moec.manifests.errors import MemoryBudgetExceeded, OptionError, ProfileError
from moec.manifests.model import ModelSpec
from moec.manifests.sizes import option_bytes, parse_bytes
from moec.profiles.memory_floor import (
    PROCESS_BYTES,
    PROCESS_SLACK_BYTES,
    FixedMemory,
    kv_bytes,
    process_bytes,
    scratch_bytes,
    tables_bytes,
)
from moec.profiles.probe import available_memory_bytes, memory_limit_bytes, resident_set_bytes

from ..layers.kv_cache import KV_TYPES
from ..options.runtime import RuntimeOptions, parse_cache
from ..storage.interface import page_bytes

_MANIFEST_FACTOR = 13
"""Upper bound of the peak memory while a manifest is read, as a multiple of its bytes.

Measured: 5 for 65,535 experts with low versions, 12.5 for a manifest with as many numbers as it can hold.
"""

_SMALL_MANIFEST_BYTES = 4 << 20
"""Size from which a manifest is checked before it is read.

The memory of every process suffices for a smaller one. After it is read, a refusal can name the floor of the run.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan(FixedMemory):
    """All bytes of one run. floor_bytes is the least `--memory` that works.

    cache_bytes: capacity of the expert cache.
    budget_bytes: budget of the process; None if only the expert cache is limited.
    context: longest sequence, tokens.

    logical_cache_bytes: capacity by which lossy modes decide, for experts of the bundle's sizes. With `--memory` or
        `--expert-cache` it is equal on all machines. Without both it depends on the free memory.
    """

    cache_bytes: int
    budget_bytes: int | None
    context: int
    logical_cache_bytes: int = 0

    def to_plain(self) -> dict[str, int | None]:
        return {**asdict(self), "floor_bytes": self.floor_bytes}


def resident_experts_bytes(manifest: BundleManifest) -> int:
    """Return the memory that all experts take, without low versions: whole pages of this machine."""
    return sum(page_bytes(entry.size_bytes) for entry in manifest.experts)


def default_budget_bytes() -> int:
    """Return the budget of a run without `--memory`: what this process has, and 7/8 of the free memory."""
    return resident_set_bytes() + available_memory_bytes() * 7 // 8


def chosen_context(model: ModelSpec, options: RuntimeOptions) -> int:
    """Return the longest sequence of a run, tokens."""
    return options.context or model.default_context


def _checked_context(model: ModelSpec, options: RuntimeOptions) -> int:
    """Return the longest sequence of a run, tokens. Raises OptionError if the model has fewer positions."""
    context = chosen_context(model, options)
    if context > model.max_positions:
        raise OptionError(
            f"`--context {context}` is longer than the {model.max_positions} positions of the model", "ask for less"
        )
    return context


def require_memory_for_manifest(bundle: Path, options: RuntimeOptions) -> None:
    """Refuse a large manifest that cannot be read within the budget. Call before it is opened.

    The floor of a run with such a manifest is higher in any case.
    Raises MemoryBudgetExceeded, OptionError.
    """
    try:
        size = (bundle / MANIFEST_NAME).stat().st_size
    except OSError:  # `open_bundle` reports the error
        return
    need = PROCESS_BYTES + _MANIFEST_FACTOR * size
    given = need if options.memory is None else parse_bytes(options.memory)
    if size > _SMALL_MANIFEST_BYTES and given < need:
        raise MemoryBudgetExceeded(
            f"`--memory {options.memory}` is less than the {option_bytes(need, given)} that reading a manifest of "
            f"{size} bytes takes",
            "`moec inspect` says what a run takes",
        )


def require_machine_memory(
    bundle: Path, manifest: BundleManifest, options: RuntimeOptions, accelerator_bytes: int = 0
) -> None:
    """Refuse a bundle whose floor exceeds all memory of this machine. `--memory` cannot help then.

    accelerator_bytes: as in `plan_memory`.
    Raises MemoryBudgetExceeded with the floor and the memory, OptionError. A system that does not tell its memory
    passes.
    """
    try:
        limit = memory_limit_bytes()
    except ProfileError:
        return
    context = _checked_context(manifest.model, options)
    floor = nominal_memory(manifest, options, accelerator_bytes).floor_bytes
    if floor > limit:
        raise MemoryBudgetExceeded(
            f"`{bundle}` needs at least {option_bytes(floor)} for a context of {context}, this machine has "
            f"{limit >> 20}MiB",
            "decode fewer sequences at once, or shorten `--context`"
            if options.slots > 1
            else "compile for this machine with `--device host`, or shorten `--context`",
        )


def nominal_process_bytes(manifest: BundleManifest, options: RuntimeOptions) -> int:
    """Return the memory of the process by the manifest alone. It is equal on every machine."""
    sizes = {entry.name: entry.size_bytes for entry in manifest.files}
    return process_bytes(
        manifest.model,
        len(manifest.experts) + len(manifest.low_experts),
        sizes.get(TOKENIZER_NAME, 0),
        has_accelerator=options.accelerator is not None,
    )


def nominal_memory(
    manifest: BundleManifest, options: RuntimeOptions | None = None, accelerator_bytes: int = 0
) -> FixedMemory:
    """Return the memory of a run by the manifest alone. `moec inspect` prints it, and `--memory` must be at least this.

    options: None for the defaults.
    """
    options = options or RuntimeOptions()
    model, context = manifest.model, chosen_context(manifest.model, options)
    sizes = {entry.name: entry.size_bytes for entry in manifest.files}
    path_file = sizes.get(TABLES_NAME, 0) if options.prefetch == "path" else 0
    lookahead_file = sizes.get(LOOKAHEAD_NAME, 0) if options.uses_learned_routers else 0
    return FixedMemory(
        process_bytes=nominal_process_bytes(manifest, options) + options.other_bytes,
        dense_bytes=manifest.cost.dense_packed_bytes,
        kv_bytes=kv_bytes(model, context, options.slots, np.dtype(KV_TYPES[options.kv]).itemsize),
        scratch_bytes=scratch_bytes(model, options.slots, context),
        tables_bytes=tables_bytes(model, path_file) + lookahead_file,
        minimum_expert_bytes=manifest.cost.minimum_expert_bytes,
        accelerator_bytes=accelerator_bytes,
    )


def plan_memory(manifest: BundleManifest, options: RuntimeOptions, accelerator_bytes: int = 0) -> MemoryPlan:
    """Split the budget. Call after imports and before weights are read.

    accelerator_bytes: memory of this process that an accelerator takes, for example staging buffers.
    Raises MemoryBudgetExceeded with the floor if the budget is lower. Raises OptionError if options conflict.
    """
    context = _checked_context(manifest.model, options)
    nominal = nominal_memory(manifest, options, accelerator_bytes)
    # Experts take whole pages of this machine, which may be larger than 4096 bytes.
    page_sizes: list[list[int]] = [[] for _ in manifest.model.layers]
    for entry in manifest.experts:
        page_sizes[entry.layer].append(page_bytes(entry.size_bytes))
    top_ks = [layer.experts.top_k for layer in manifest.model.layers]
    largest = (sum(sorted(sizes)[-top_k:]) for sizes, top_k in zip(page_sizes, top_ks, strict=True))
    needs = replace(
        nominal,
        # An engine may be loaded into a process that is larger already.
        process_bytes=max(nominal.process_bytes, resident_set_bytes() + PROCESS_SLACK_BYTES),
        minimum_expert_bytes=max(largest),
    )
    all_experts_bytes = sum(map(sum, page_sizes))
    budget = parse_bytes(options.memory) if options.memory is not None else None
    if options.expert_cache is not None:
        cache_bytes = parse_cache(options.expert_cache, all_experts_bytes)
        logical_bytes = parse_cache(options.expert_cache, manifest.cost.expert_padded_bytes)
        asked_for = f"`--expert-cache {options.expert_cache}`"
        if cache_bytes < needs.minimum_expert_bytes:
            least = option_bytes(needs.minimum_expert_bytes, 0 if "%" in asked_for else cache_bytes)
            is_number = options.expert_cache is not None and options.expert_cache.isdigit()
            share = f"; a share is written `{options.expert_cache}%`" if is_number else ""
            raise MemoryBudgetExceeded(f"{asked_for} is under the floor of {least}", f"--expert-cache {least}{share}")
        if budget is not None and needs.fixed_bytes + cache_bytes > budget:
            least = option_bytes(needs.fixed_bytes + cache_bytes, budget)
            raise MemoryBudgetExceeded(
                f"{asked_for} needs a budget of {least}, `--memory {options.memory}` is less",
                f"give one of the two, or --memory {least}",
            )
    else:
        if budget is None:
            budget = default_budget_bytes()
        cache_bytes = logical_bytes = budget - needs.fixed_bytes
        if cache_bytes < needs.minimum_expert_bytes:
            raise _under_floor(needs, options, context, budget, nominal.process_bytes)
        if options.memory is not None:
            logical_bytes = max(budget - nominal.fixed_bytes, nominal.minimum_expert_bytes)
    return MemoryPlan(
        **asdict(needs),
        cache_bytes=min(cache_bytes, all_experts_bytes),
        logical_cache_bytes=min(logical_bytes, manifest.cost.expert_padded_bytes),
        budget_bytes=budget,
        context=context,
    )


def _under_floor(
    needs: FixedMemory, options: RuntimeOptions, context: int, budget: int, nominal_bytes: int
) -> MemoryBudgetExceeded:
    """Return the error for a budget under the floor, with an option that works.

    nominal_bytes: memory of a process that holds nothing else.
    """
    least = option_bytes(needs.floor_bytes, 0 if options.memory is None else budget)
    if options.memory is not None:
        already = resident_set_bytes()
        share = f", and this process already holds {already >> 20}MiB of it" if already > nominal_bytes else ""
        return MemoryBudgetExceeded(
            f"`--memory {options.memory}` is under the floor of {least} for a context of {context}{share}",
            f"--memory {least}, or {'fewer `--slots`' if options.slots > 1 else 'a shorter `--context`'}",
        )
    return MemoryBudgetExceeded(
        f"this machine's free memory, {budget >> 20}MiB of it usable, is under the floor of {least} for a context of "
        f"{context}",
        f"free memory, shorten `--context`, or take the risk with --memory {least}",
    )
