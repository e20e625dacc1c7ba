"""All checks of a compile before work: checkpoint, shapes, target, data, device, memory.

Of weights only the scales and zeros of integer codes are read.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from moec.evaluation.data import SplitData
from moec.evaluation.long_items import Context
from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.codec import canonical_json
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..bundle.emit import producer
from ..bundle.plan_bundles import require_trials
from ..checkpoint.checkpoint import Checkpoint, open_checkpoint
from ..checkpoint.tokenizer import load_tokenizer
from ..cluster.session import check_cluster
from ..families import Lowering, lower
from ..quantization.own_codes import held_units, units_held_by
from ..quantization.quantizers import check_format
from ..request.options import DEFAULT_QUANTIZER, UNIFORM_GROUP_SIZE
from ..request.plan import CompilePlan, plain_plan
from ..request.request import CompileRequest
from ..request.task_data import Shots, fit_splits, load_task_data
from ..request.uniform import uniform_spec
from ..search.pruning import prunes
from ..sensitivity.fisher import asks_gradients
from ..sensitivity.sensitivity import dense_formats
from ..walker.kept_layers import NOTHING_KEPT, KeptLayers, resident_bytes
from ..walker.torch_device import find_device
from ..workspace.journal import JOURNAL_FORMAT
from .device_fit import smallest_plan, summarise_device
from .kept_layers import MemoryNeed, choose_kept_layers
from .preflight import preflight, routed_widths

KL_ITEMS = 256
"""Number of validation items, over all tasks, whose answer tokens give the KL of a trial."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A compile that passed all checks.

    kept_layers: the layers that stay in memory between passes, and the sizes of texts.
    prunes: experts may be left out.
    offered: formats on offer to units instead of those of the options. Empty: those of the options.
    """

    request: CompileRequest
    checkpoint: Checkpoint
    lowering: Lowering
    splits: tuple[SplitData, ...]
    shots: Shots
    kept_layers: KeptLayers = NOTHING_KEPT
    prunes: bool = False
    offered: tuple[QuantSpec, ...] = ()

    @property
    def specs(self) -> tuple[QuantSpec, ...]:
        """Formats on offer to units."""
        model, bitwidths = self.lowering.model, self.request.profile.bitwidths
        if self.offered:
            return self.offered
        if self.request.options.target.kind == "uniform":
            return (uniform_spec(self.request.options, self.lowering),)
        own, plain = held_units(self.lowering), self.lowering.own_unit_spec
        return self.request.options.unit_specs(bitwidths, plain, routed_widths(model), own)

    @property
    def torch_device(self) -> torch.device:
        """The device on which texts pass layers and experts are quantized."""
        return torch.device(self.request.options.torch_device)

    @property
    def stored_specs(self) -> tuple[QuantSpec, ...]:
        """Formats in which every unit is quantized: those on offer, and that of low versions."""
        low = self.request.options.low_spec
        return self.specs if low is None or low in self.specs else (*self.specs, low)

    def required_specs(self) -> tuple[QuantSpec, ...]:
        """Return the formats that every expert must fit."""
        options = self.request.options
        low = () if options.low_spec is None else (options.low_spec,)
        return (uniform_spec(options, self.lowering), *low) if options.target.kind == "uniform" else low

    def uniform_units(self) -> dict[UnitKey, QuantSpec]:
        """Return the format of every unit of a uniform target."""
        return dict.fromkeys(self.lowering.units, uniform_spec(self.request.options, self.lowering))

    def plain_plan(self) -> CompilePlan:
        """Return the plan with all weights at 16 bits."""
        return plain_plan(self.lowering.model, self.lowering.spec_16bit, self.request.options.quantizer)

    def dense_formats(self) -> tuple[dict[str, QuantSpec], ...]:
        """Return the formats on offer to dense weights, one mapping for each bitwidth."""
        widths = self.request.options.dense_widths()
        return dense_formats(self.plain_plan(), widths, UNIFORM_GROUP_SIZE, self.lowering.float_type)

    def identity(self) -> str:
        """Return a digest of everything that measurements depend on. A device decides only what is done with them."""
        data = [[s.task.name, s.train.sha256, s.validation.sha256, s.test.sha256] for s in self.splits]
        files = [[entry.name, entry.sha256] for entry in self.checkpoint.source_files()]
        formats = [str(spec) for spec in self.stored_specs]
        limits = asdict(self.kept_layers.texts)
        plain = [producer(), JOURNAL_FORMAT, files, self.request.options.to_plain(), data, formats, limits]
        return hashlib.sha256(canonical_json(plain)).hexdigest()


def prepare(request: CompileRequest, like: Prepared | None = None) -> Prepared:
    """Run all checks.

    like: the same request for another device, or None. Its checkpoint and data are not read again.
    Raises MoecError.
    """
    options = request.options
    find_device(options.torch_device)
    checkpoint = open_checkpoint(request.source) if like is None else like.checkpoint
    lowering = lower(checkpoint) if like is None else like.lowering
    found = Prepared(request, checkpoint, lowering, (), {})
    kind, value = options.target.kind, options.target.value
    for spec in found.required_specs():
        check_format(options.quantizer, spec)
    report = preflight(
        lowering,
        required=found.required_specs(),
        offered=() if kind == "uniform" else found.specs,
        group_sizes=() if kind == "uniform" else options.group_sizes,
        bits_per_weight=value if kind == "bits_per_weight" else None,
        size_bytes=round(value) if kind == "size" else None,
        prunes=bool(options.prune),
    )
    if like is None:
        if checkpoint.precision:
            request.talk.note(f"the weights are stored as {checkpoint.precision}: what they decode to is the baseline")
        opened = None if request.templates is None else partial(request.templates, checkpoint.root)
        splits, shots = load_task_data(options, request.talk.note, opened)
        found = with_fitted_items(replace(found, splits=splits, shots=shots))
    else:
        found = replace(found, splits=like.splits, shots=like.shots)
    for note in report.notes:
        request.talk.note(note)
    if request.measure_modes is not None:
        request.measure_modes.check(lowering.model, options.fallback_bits is not None)
    if request.cluster is not None:
        check_cluster(kind, options.torch_device)
    rounds = kind == "uniform" and value < 16 and units_held_by(lowering, found.uniform_units()) < len(lowering.units)
    if rounds and not splits and options.quantizer == DEFAULT_QUANTIZER:
        request.talk.note("without `--data` weights are rounded to nearest; with it, GPTQ keeps far more below 4 bits")
    if kind == "uniform":
        return with_kept_layers(found) if found.splits else found
    smallest = smallest_plan(lowering, options, found.specs)
    summarise_device(request.profile, smallest, found.checkpoint.tokenizer_file_bytes)
    return with_kept_layers(found)


def with_fitted_items(prepared: Prepared) -> Prepared:
    """Shorten or leave out validation and test items that exceed the context. Raises ContextOverflow, DataError."""
    if not prepared.splits:
        return prepared
    model, request = prepared.lowering.model, prepared.request
    has_encoder = model.encoder is not None
    encode = partial(encode_pairs, load_tokenizer(prepared.checkpoint.root), is_joint=not has_encoder)
    context = Context(model.default_context, encode, has_encoder)
    policy, note = request.options.long_items, request.talk.note
    return replace(prepared, splits=fit_splits(prepared.splits, prepared.shots, context, policy, note))


def with_kept_layers(prepared: Prepared) -> Prepared:
    """Decide how much of the model stays in memory. Raises OptionError if one layer does not fit."""
    request, model = prepared.request, prepared.lowering.model
    need = MemoryNeed(model, request.options, prepared.stored_specs, torch.get_num_threads(), len(prepared.splits))
    kept_layers = choose_kept_layers(need, request.memory_limit_bytes)
    require_trials(request, model)
    if not kept_layers.holds_model:
        peak = need.bytes_with(kept_layers.texts) + resident_bytes(model, kept_layers.count)
        request.talk.note(
            f"memory holds {kept_layers.count} of {model.num_layers} layers between passes, "
            f"{peak / 2**30:.1f} GiB at most"
        )
    prunes_experts = prunes(request.options, model, asks_gradients(request.options.sensitivity, model))
    return replace(prepared, kept_layers=kept_layers, prunes=prunes_experts)
