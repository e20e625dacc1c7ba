"""How much of a model a compile keeps in memory, and what it refuses because memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec

from ..request.options import CompileOptions
from ..sensitivity.fisher import asks_gradients
from ..walker.memory import certificate_bytes, certifying_bytes, gradients_bytes, sweep_bytes
from ..walker.residency import (
    LARGE_TEXTS,
    SCORED_TOKENS,
    SMALL_TEXTS,
    Residency,
    TextLimits,
    fitting_layers,
    resident_bytes,
)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """What decides the memory of a search.

    specs: formats on offer.
    tasks: number of tasks; 0 without data.
    """

    model: ModelSpec
    options: CompileOptions
    specs: Sequence[QuantSpec]
    threads: int
    tasks: int

    def bytes_with(self, texts: TextLimits) -> int:
        """Return the peak memory with one loaded layer: of the passes, or of the certificate.

        texts: sizes of the texts. Shorter data needs less. With LARGE_TEXTS tasks are certified for every target.
        """
        model, specs, threads = self.model, self.specs, self.threads
        scored = texts.scored(self.tasks)
        peak = sweep_bytes(model, texts.calibration + scored, texts.probe, specs, threads)
        if asks_gradients(self.options.sensitivity, model):
            peak = max(peak, gradients_bytes(model, texts.gradients, scored, specs, threads))
        # The certificate of tasks runs two bundles. One of them holds the checkpoint's own weights.
        has_tasks = self.options.target.kind == "loss" or (self.tasks > 0 and texts == LARGE_TEXTS)
        runtimes = 2 if has_tasks else 1
        certified = runtimes * certifying_bytes(model, scored)
        return max(peak, certificate_bytes(model, SCORED_TOKENS) + certified)


def choose_residency(need: MemoryNeed, limit_bytes: int) -> Residency:
    """Return what stays in memory within a limit.

    Raises OptionError with the memory that would do, if one layer does not fit.
    """
    layers = need.model.num_layers
    if need.bytes_with(LARGE_TEXTS) + resident_bytes(need.model, layers) <= limit_bytes:
        return Residency(layers, holds_model=True)
    least = need.bytes_with(SMALL_TEXTS)
    if least > limit_bytes:
        raise OptionError(
            f"one layer at a time takes {least} bytes of memory, found {limit_bytes}",
            f"give `--memory {-(-least // 2**20)}MiB` if the machine has them, or offer fewer `--bits`",
        )
    return Residency(fitting_layers(need.model, limit_bytes - least), holds_model=False)


def runtime_bytes(model: ModelSpec, residency: Residency, limit_bytes: int) -> int:
    """Return the budget of a runtime that answers for a compile. Without one it would take most of the machine."""
    resident = resident_bytes(model, model.num_layers) if residency.holds_model else 0
    return limit_bytes - resident - certificate_bytes(model, SCORED_TOKENS)
