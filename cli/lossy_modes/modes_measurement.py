"""`moec compile --modes`: measure the cost of lossy modes of a bundle before it is published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moec.manifests.errors import OptionError

from ..options.runtime_options import DEFAULT_CACHE
from .mode_sweep import (
    KL_ITEMS,
    KL_LOGITS,
    KL_TOKENS,
    TTFT_ITEMS,
    QualitySweep,
    allowed_settings,
    settings_of,
    thresholds_text,
)

if TYPE_CHECKING:
    from moec.compiler.request.ports import ModesWork, UnpublishedBundle
    from moec.manifests.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ModesMeasurement:
    """Measurement of `moec compile --modes`, for `CompileRequest.measure_modes`.

    Experts have a cache of DEFAULT_CACHE, or of what one token needs in a layer if that is more. If the memory of the
    compile is too small for that, they have the rest of it.

    modes: value of `--modes`.
    is_asked: whether the command line asks for it. Otherwise modes that cannot be measured are left out.
    """

    modes: str
    is_asked: bool = True

    def check(self, model: ModelSpec, has_low_versions: bool) -> None:
        """Raise OptionError for modes that cannot be measured."""
        if not self.is_asked:
            return
        for setting in allowed_settings(self.modes, model, has_low_versions, (), None):
            if "expert_activations" in setting:
                raise OptionError(
                    "a compile does not measure `expert-activations`, because few processors have it",
                    'measure it afterwards: `moec eval --modes "expert-activations bfloat16"`',
                )

    def work(self, model: ModelSpec, has_low_versions: bool) -> ModesWork:
        """Return what the measurement does at most: the thresholds of HOBBIT's shares are added to low versions."""
        from moec.compiler.request.ports import ModesWork

        try:
            settings = len(allowed_settings(self.modes, model, has_low_versions, (), None)) + has_low_versions
        except OptionError:
            if self.is_asked:
                raise
            settings = 0
        cached_share = float(DEFAULT_CACHE.rstrip("%")) / 100
        return ModesWork(settings, KL_ITEMS, KL_TOKENS, KL_LOGITS, TTFT_ITEMS, cached_share)

    def __call__(self, bundle: UnpublishedBundle) -> dict[str, Any]:
        """Return the record for quality.json. Raises MemoryBudgetExceeded."""
        from moec.compiler.walker.memory import COMPILE_PROCESS_BYTES
        from moec.manifests.sizes import option_bytes
        from moec.runtime.bundle.open_bundle import open_bundle
        from moec.runtime.memory.budget import plan_memory
        from moec.runtime.options.runtime import RuntimeOptions, parse_cache

        manifest = open_bundle(bundle.path, allow_partial=True).manifest
        published = thresholds_text(*bundle.hobbit_thresholds) if bundle.hobbit_thresholds else ""
        try:
            settings = settings_of(self.modes, manifest, bundle.deciles)
        except OptionError:
            if self.is_asked:
                raise
            return {}
        if published and manifest.low_experts and {"dynamic_precision": published} not in settings:
            settings.append({"dynamic_precision": published})
        cost = manifest.cost
        has_room = parse_cache(DEFAULT_CACHE, cost.expert_padded_bytes) >= cost.minimum_expert_bytes
        cache = DEFAULT_CACHE if has_room else option_bytes(cost.minimum_expert_bytes)
        options = RuntimeOptions(expert_cache=cache)
        if bundle.memory_bytes:
            # Computed from shapes, not from the memory of this process: equal compiles must give equal bytes.
            plan = plan_memory(manifest, options)
            need = COMPILE_PROCESS_BYTES + plan.dense_bytes + plan.kv_bytes + plan.scratch_bytes + plan.cache_bytes
            options = RuntimeOptions(memory=str(bundle.memory_bytes)) if need > bundle.memory_bytes else options
        sweep = QualitySweep(bundle.path, options, None, bundle.task, bundle.items, bundle.shots)
        # Values that differ between runs are left out: equal compiles must give equal bytes.
        varying = ("tokens_per_s", "ttft_ns", "hit_rate", "bytes_read_per_token")
        record = sweep.run(settings, is_partial=True)
        rows = [{name: value for name, value in row.items() if name not in varying} for row in record["rows"]]
        record |= {"rows": rows}
        return {**record, "published": published} if published and manifest.low_experts else record
