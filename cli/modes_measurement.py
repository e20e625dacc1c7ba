"""`moec compile --modes`: what lossy modes of a bundle cost, measured before it is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .mode_sweep import DEFAULT_CACHE, QualitySweep, allowed_settings, settings_of

if TYPE_CHECKING:
    from moec.evaluation.tasks import Item, Task
    from moec.manifests.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ModesMeasurement:
    """What `moec compile --modes` does: a `certify.MeasureModes`, experts in a cache of DEFAULT_CACHE, or, where the
    memory of the compile is too little for that, in what it leaves.
    """

    modes: str

    def check(self, model: ModelSpec, has_low_versions: bool) -> None:
        """Raise OptionError for modes that cannot be measured."""
        allowed_settings(self.modes, model, has_low_versions, (), None)

    def __call__(
        self,
        partial: Path,
        task: Task,
        items: Sequence[Item],
        shots: Sequence[Item],
        deciles: Sequence[float],
        memory_bytes: int = 0,
    ) -> dict[str, Any]:
        """The record for quality.json of a bundle that is not published yet. Raises MemoryBudgetExceeded."""
        from moec.runtime.budget import plan_memory
        from moec.runtime.bundle import open_bundle
        from moec.runtime.options import RuntimeOptions

        manifest = open_bundle(partial, allow_partial=True).manifest
        settings = settings_of(self.modes, manifest, deciles)
        options = RuntimeOptions(expert_cache=DEFAULT_CACHE)
        if memory_bytes:
            bounded = RuntimeOptions(memory=str(memory_bytes))
            if plan_memory(manifest, bounded).cache_bytes < plan_memory(manifest, options).cache_bytes:
                options = bounded
        return untimed(QualitySweep(partial, options, None, task, items, shots).run(settings, is_partial=True))


def untimed(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what differs from run to run, for a bundle that is equal whenever it is compiled."""
    varying = ("tokens_per_s", "ttft_ns", "hit_rate", "bytes_read_per_token")
    rows = [{name: value for name, value in row.items() if name not in varying} for row in record["rows"]]
    return {**record, "rows": rows}
