"""A compile that passed all checks: its request, checkpoint, data, the formats on offer.

How much of the model stays in memory is chosen here. A compile without memory for one layer is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from moec.evaluation.data import SplitData
from moec.manifests import sizes
from moec.manifests.codec import canonical_json
from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from moec.profiles.device import DeviceProfile

from ..bundle.emit import producer
from ..calibration.device_use import DeviceUse
from ..checkpoint.checkpoint import Checkpoint
from ..families import Lowering
from ..quantization.own_codes import held_units
from ..request.options import FEW_GROUP_SIZES, QUICK_GROUP_SIZES, UNIFORM_GROUP_SIZE, CompileOptions, Talk
from ..request.plan import CompilePlan, plain_plan
from ..request.request import CompileRequest
from ..request.task_data import Shots
from ..request.uniform import requested_specs
from ..sensitivity.fisher import asks_gradients
from ..sensitivity.sensitivity import dense_formats
from ..walker.memory import (
    LARGE_TEXTS,
    NOTHING_KEPT,
    SMALL_TEXTS,
    KeptLayers,
    TextLimits,
    certificate_bytes,
    certifying_bytes,
    fitting_layers,
    gradients_bytes,
    is_large,
    resident_bytes,
    sweep_bytes,
    usual_texts,
)
from ..workspace.journal import JOURNAL_FORMAT
from .preflight import routed_widths

_OF_THE_SEARCH = frozenset({"target", "search", "objective", "confidence", "swaps", "prune"})
"""Options that only the search and the certificate use. Of the target, measurements know the kind alone."""
KL_ITEMS = 256
"""Number of validation items, over all tasks, whose answer tokens give the KL of a trial."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A compile that passed all checks.

    kept_layers: the layers that stay in memory between passes, and the sizes of texts.
    prunes: experts may be left out.
    offered: formats on offer to units instead of those of the options. Empty: those of the options.
    use: use of experts on devices; None: calibration says it.
    """

    request: CompileRequest
    checkpoint: Checkpoint
    lowering: Lowering
    splits: tuple[SplitData, ...]
    shots: Shots
    kept_layers: KeptLayers = NOTHING_KEPT
    prunes: bool = False
    offered: tuple[QuantSpec, ...] = ()
    use: DeviceUse | None = None

    @property
    def options(self) -> CompileOptions:
        """Options of the request."""
        return self.request.options

    @property
    def talk(self) -> Talk:
        """Output of the request."""
        return self.request.talk

    @property
    def profile(self) -> DeviceProfile:
        """Device of the request."""
        return self.request.profile

    @property
    def runtime_bytes(self) -> int:
        """Memory that the compile leaves to a runtime."""
        return runtime_bytes(self.lowering.model, self.request.memory_limit_bytes)

    @property
    def specs(self) -> tuple[QuantSpec, ...]:
        """Formats on offer to units."""
        model, bitwidths = self.lowering.model, self.profile.bitwidths
        if self.offered:
            return self.offered
        if self.options.target.kind == "uniform":
            return requested_specs(self.options, self.lowering)
        held_formats, plain = held_units(self.lowering), self.lowering.own_unit_spec
        groups: Mapping[float, tuple[int, ...]] = {}
        if self.options.effort != "thorough" and is_large(model):
            groups = FEW_GROUP_SIZES if self.options.effort == "default" else QUICK_GROUP_SIZES
        return self.options.unit_specs(bitwidths, plain, routed_widths(model), held_formats, groups)

    @property
    def torch_device(self) -> torch.device:
        """The device on which texts pass layers and experts are quantized."""
        return torch.device(self.options.torch_device)

    @property
    def stored_specs(self) -> tuple[QuantSpec, ...]:
        """Formats in which every unit is quantized: those on offer, and that of low versions."""
        low = self.options.low_spec
        return self.specs if low is None or low in self.specs else (*self.specs, low)

    def required_specs(self) -> tuple[QuantSpec, ...]:
        """Return the formats that every expert must fit."""
        options = self.options
        low = () if options.low_spec is None else (options.low_spec,)
        is_one = options.target.kind == "uniform" and not options.target.keeps_codes
        return (*requested_specs(options, self.lowering), *low) if is_one else low

    def plain_plan(self) -> CompilePlan:
        """Return the plan with all weights at 16 bits."""
        return plain_plan(self.lowering.model, self.lowering.spec_16bit, self.options.quantizer)

    def dense_formats(self) -> tuple[dict[str, QuantSpec], ...]:
        """Return the formats on offer to dense weights, one mapping for each bitwidth."""
        widths = self.options.dense_widths()
        return dense_formats(self.plain_plan(), widths, UNIFORM_GROUP_SIZE, self.lowering.float_type)

    def options_plain(self) -> dict[str, str]:
        """Return what decides the bytes as text, for the manifest. Items and a popularity file are digests."""
        digests = {} if self.use is None else {"popularity": self.use.sha256}
        if self.splits:
            items = [[s.task.name, s.train.sha256, s.validation.sha256, s.test.sha256] for s in self.splits]
            digests["data_sha256"] = hashlib.sha256(canonical_json(items)).hexdigest()
        return {**self.options.to_plain(), **digests}

    def identity(self) -> str:
        """Return a digest of everything that a search depends on: measurements, target, devices, what is compared."""
        request = self.request
        devices = (request.profile.sha256,) if request.shared is None else request.shared.devices
        decisions = {
            "devices": " ".join(devices),
            "sweep": str(request.sweep),
            "compared": str(request.options.comparisons),
        }
        return self._digest_with({**self.options_plain(), **decisions})

    def measurement_identity(self) -> str:
        """Return a digest of everything that measurements depend on, whatever is searched with them."""
        options = {name: text for name, text in self.options_plain().items() if name not in _OF_THE_SEARCH}
        kind = self.options.target.kind
        return self._digest_with({**options, "target": kind, "prunes": str(self.prunes).lower()})

    def _digest_with(self, options: Mapping[str, str]) -> str:
        files = [[entry.name, entry.sha256] for entry in self.checkpoint.source_files()]
        formats = [str(spec) for spec in self.stored_specs]
        limits = asdict(self.kept_layers.texts)
        plain = [producer(), JOURNAL_FORMAT, files, dict(options), formats, limits]
        return hashlib.sha256(canonical_json(plain)).hexdigest()


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

        texts: sizes of the texts. Shorter data needs less.
        """
        model, specs, threads = self.model, self.specs, self.threads
        scored = texts.scored(self.tasks)
        peak = sweep_bytes(model, texts.calibration + scored, texts.probe, specs, threads)
        if asks_gradients(self.options.sensitivity, model):
            peak = max(peak, gradients_bytes(model, texts.gradients, scored, specs, threads))
        return max(peak, certificate_bytes(model) + certifying_bytes(model, scored))


def measures_tasks(options: CompileOptions, holds_model: bool) -> bool:
    """Return whether a certificate measures tasks: for a loss, and if memory holds the model."""
    return options.target.kind == "loss" or holds_model


def may_compare(options: CompileOptions, kept_layers: KeptLayers) -> bool:
    """Return whether baselines may be measured: on request, and by default if plans are cheap to measure."""
    return kept_layers.has_cheap_plans if options.comparisons is None else options.comparisons


def choose_kept_layers(need: MemoryNeed, limit_bytes: int) -> KeptLayers:
    """Return what stays in memory within a limit.

    Raises OptionError with the memory that would do, if one layer does not fit.
    """
    layers, texts = need.model.num_layers, usual_texts(need.model, need.options.effort)
    if need.bytes_with(texts) + resident_bytes(need.model, layers) <= limit_bytes:
        return KeptLayers(layers, True, texts)
    texts = SMALL_TEXTS if texts == LARGE_TEXTS else texts
    least = need.bytes_with(texts)
    if least > limit_bytes:
        needed = sizes.option_bytes(least, limit_bytes)
        raise OptionError(
            f"one layer at a time takes {needed} of memory, found {sizes.limit_bytes(limit_bytes)}",
            f"give `--memory {needed}` if the machine has them, or offer fewer `--bits`",
        )
    return KeptLayers(fitting_layers(need.model, limit_bytes - least), False, texts)


def runtime_bytes(model: ModelSpec, limit_bytes: int) -> int:
    """Return the budget of a runtime that answers for a compile. Without one it would take most of the machine.

    A runtime counts all memory of its process, resident layers included.
    """
    return limit_bytes - certificate_bytes(model)
