"""The memory budget: what a run needs, what it may have, and what is left for experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import MemoryBudgetExceeded, OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.profiles.probe import memory_limit_bytes, resident_set_bytes

from .kv_cache import kv_bytes
from .options import RuntimeOptions, parse_bytes, parse_cache

# Rows whose logits are computed at once for each slot; the rest of a pass waits, so that a large vocabulary fits.
LOGITS_ROWS_PER_SLOT = 4
# Growth of interpreter, allocator and thread stacks beyond the parts that are counted: 6 MiB measured on the example
# (a prompt of 395 tokens and 64 decoded ones, 2 threads), more than doubled.
PROCESS_SLACK_BYTES = 16 << 20
# What process and slack count for where it must not matter what they have: more than `moec run` takes (51 to 62 MiB
# here), so that lossy decisions go by a cache that is not larger than the real one.
NOMINAL_PROCESS_BYTES = 72 << 20
# The same with torch loaded for an accelerator: 240 MiB measured with its CPU build; not measured with CUDA's.
NOMINAL_TORCH_PROCESS_BYTES = 320 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All bytes of one run. floor_bytes is the least `--memory` that works; cache_bytes is the experts' share.

    logical_cache_bytes: the share that lossy decisions go by, the same for the same options wherever they run; without
    any, it is what this machine has free.
    """

    process_bytes: int
    dense_bytes: int
    kv_bytes: int
    scratch_bytes: int
    minimum_expert_bytes: int
    cache_bytes: int
    budget_bytes: int | None
    context: int
    accelerator_bytes: int = 0
    logical_cache_bytes: int = 0

    @property
    def floor_bytes(self) -> int:
        return self.fixed_bytes + self.minimum_expert_bytes

    @property
    def fixed_bytes(self) -> int:
        parts = self.process_bytes + self.dense_bytes + self.kv_bytes + self.scratch_bytes
        return parts + self.accelerator_bytes

    def to_plain(self) -> dict[str, int | None]:
        """For `--json`."""
        return {**asdict(self), "floor_bytes": self.floor_bytes}


def available_memory_bytes() -> int:
    """Memory that may still be taken: the least of MemAvailable and the room under the control group's limit."""
    available = [memory_limit_bytes() - resident_set_bytes()]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    return max(0, min(available))


def longest_pass(model: ModelSpec, slots: int, context: int) -> int:
    """Most tokens that go through a layer at once: an encoder takes a prompt whole, however long."""
    tokens = min(MAX_PASS_TOKENS, slots * context)
    return tokens if model.encoder is None else max(tokens, context)


def scratch_bytes(manifest: BundleManifest, slots: int, context: int) -> int:
    """Largest working memory of one pass: residual, norms, attention, expert parts and logits, float32."""
    model = manifest.model
    tokens, vocabulary = longest_pass(model, slots, context), model.vocab_size
    # Cosines and sines of every position, once per kind of rotary embedding.
    kinds = {layer.attention.rope for layer in model.layers}
    positions = sum(4 * context * spec.rotary_size for spec in kinds if spec is not None)
    # Biases by distance, once for encoder and decoder each.
    for layer in {0, model.first_decoder_layer}:
        attention = model.layers[layer].attention
        positions += 8 * context * attention.num_heads if attention.relative_bias is not None else 0
    # Norms and biases are kept in float32, beside the 16 bits they came as.
    vectors = sum(4 * entry.shape[0] for entry in manifest.dense if len(entry.shape) == 1)
    routers = [layer.experts.router for layer in model.layers]
    vectors += sum(4 * len(router.static.experts) for router in routers if router.static is not None)
    # A slot's keys that a beam puts aside.
    aside = max(4 * a.cache_heads * a.cache_size * context for a in model.cached_attentions) if slots > 1 else 0
    # They are there twice while a maximum or a softmax is taken.
    logits = 8 * vocabulary * LOGITS_ROWS_PER_SLOT * slots
    return pass_bytes(manifest, tokens) + logits + positions + vectors + aside


def pass_bytes(manifest: BundleManifest, tokens: int) -> int:
    """The part of `scratch_bytes` that grows with the tokens of a pass."""
    model, widest = manifest.model, 0
    for layer in model.layers:
        attention, experts = layer.attention, layer.experts
        if attention.latent is None:
            heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_size
        else:
            heads = attention.num_heads * (2 * attention.cache_size + 2 * attention.head_size)
        ranks, width = (
            experts.top_k + (layer.shared is not None),
            max(experts.width, layer.shared.width if layer.shared else 0),
        )
        widest = max(widest, heads, ranks * model.hidden_size + 2 * width)
    return 4 * tokens * (5 * model.hidden_size + widest)


def chosen_context(model: ModelSpec, options: RuntimeOptions) -> int:
    """Longest sequence of a run."""
    return options.context or model.default_context


def plan_memory(manifest: BundleManifest, options: RuntimeOptions, accelerator_bytes: int = 0) -> MemoryPlan:
    """Split the budget. Call after imports and before weights are read.

    accelerator_bytes: what an accelerator takes of this process's memory, staging buffers for instance.
    Raises MemoryBudgetExceeded with the floor when the budget is under it, OptionError when options conflict.
    """
    cost, model = manifest.cost, manifest.model
    context = chosen_context(model, options)
    if context > model.max_positions:
        raise OptionError(
            f"`--context {context}` is longer than the {model.max_positions} positions of the model", "ask for less"
        )
    fixed = {
        "process_bytes": resident_set_bytes() + PROCESS_SLACK_BYTES,
        "dense_bytes": cost.dense_packed_bytes,
        "kv_bytes": kv_bytes(model, options.kv, context, options.slots),
        "scratch_bytes": scratch_bytes(manifest, options.slots, context),
        "minimum_expert_bytes": cost.minimum_expert_bytes,
        "context": context,
        "accelerator_bytes": accelerator_bytes,
    }
    bare = MemoryPlan(cache_bytes=0, budget_bytes=None, **fixed)
    budget = parse_bytes(options.memory) if options.memory else None
    if options.expert_cache is not None:
        cache = parse_cache(options.expert_cache, cost.expert_padded_bytes)
        if budget is not None and bare.fixed_bytes + cache > budget:
            raise MemoryBudgetExceeded(
                f"`--expert-cache {options.expert_cache}` needs a budget of {bare.fixed_bytes + cache} bytes, "
                f"`--memory` gives {budget}",
                "give one of the two",
            )
    else:
        if budget is None:
            budget = resident_set_bytes() + available_memory_bytes() * 7 // 8
        cache = budget - bare.fixed_bytes
    if cache < cost.minimum_expert_bytes:
        what = f"the budget of {budget} bytes" if options.expert_cache is None else f"an expert cache of {cache} bytes"
        least = bare.floor_bytes if options.expert_cache is None else cost.minimum_expert_bytes
        raise MemoryBudgetExceeded(
            f"{what} is under the floor of {least} bytes for a context of {context}",
            "raise it, or shorten `--context`" if options.expert_cache is None else "raise it",
        )
    logical = cache
    if options.expert_cache is None and options.memory is not None:
        nominal = NOMINAL_PROCESS_BYTES if options.accelerator is None else NOMINAL_TORCH_PROCESS_BYTES
        logical = max(cache + fixed["process_bytes"] - nominal, cost.minimum_expert_bytes)
    held = {"cache_bytes": cache, "logical_cache_bytes": logical}
    held = {name: min(size, cost.expert_padded_bytes) for name, size in held.items()}
    return MemoryPlan(**held, budget_bytes=budget, **fixed)
