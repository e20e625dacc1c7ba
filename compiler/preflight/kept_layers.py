"""The choice of how much of a model stays in memory, and the refusal of a compile without memory for one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.manifests import sizes
from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec

from ..request.options import CompileOptions
from ..sensitivity.fisher import asks_gradients
from ..walker.kept_layers import LARGE_TEXTS, SMALL_TEXTS, KeptLayers, TextLimits, fitting_layers, resident_bytes
from ..walker.memory import certificate_bytes, certifying_bytes, gradients_bytes, sweep_bytes


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """A search as far as it decides the memory.

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
        runtimes = 1 + measures_tasks(self.options, texts == LARGE_TEXTS)
        return max(peak, certificate_bytes(model) + certifying_bytes(model, scored, runtimes))


def measures_tasks(options: CompileOptions, holds_model: bool) -> bool:
    """Return whether a certificate measures tasks: for a loss, and if memory holds the model."""
    return options.target.kind == "loss" or holds_model


def may_compare(options: CompileOptions, holds_model: bool) -> bool:
    """Return whether baselines may be measured: on request, and by default if memory holds the model."""
    return holds_model if options.comparisons is None else options.comparisons


def choose_kept_layers(need: MemoryNeed, limit_bytes: int) -> KeptLayers:
    """Return what stays in memory within a limit.

    Raises OptionError with the memory that would do, if one layer does not fit.
    """
    layers = need.model.num_layers
    if need.bytes_with(LARGE_TEXTS) + resident_bytes(need.model, layers) <= limit_bytes:
        return KeptLayers(layers, holds_model=True)
    least = need.bytes_with(SMALL_TEXTS)
    if least > limit_bytes:
        needed = sizes.option_bytes(least, limit_bytes)
        raise OptionError(
            f"one layer at a time takes {needed} of memory, found {sizes.limit_bytes(limit_bytes)}",
            f"give `--memory {needed}` if the machine has them, or offer fewer `--bits`",
        )
    return KeptLayers(fitting_layers(need.model, limit_bytes - least), holds_model=False)


def runtime_bytes(model: ModelSpec, limit_bytes: int) -> int:
    """Return the budget of a runtime that answers for a compile. Without one it would take most of the machine.

    A runtime counts all memory of its process, resident layers included.
    """
    return limit_bytes - certificate_bytes(model)
