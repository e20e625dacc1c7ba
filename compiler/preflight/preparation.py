"""All checks of a compile before work: checkpoint, shapes, target, data, device, memory.

Of weights only the scales and zeros of integer codes are read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from moec.evaluation.long_items import Context
from moec.evaluation.text_pairs import encode_pairs
from moec.profiles.probe import available_memory_bytes, resident_set_bytes

from ..bundle.plan_bundles import require_trials
from ..calibration.device_use import read_device_use
from ..checkpoint.opening import open_checkpoint
from ..checkpoint.tokenizer import load_tokenizer
from ..cluster.session import check_cluster
from ..families import lower
from ..quantization.own_codes import units_held_by
from ..quantization.quantizers import check_format
from ..request.options import DEFAULT_QUANTIZER
from ..request.request import CompileRequest
from ..request.task_data import fit_splits, load_task_data
from ..search.pruning import prunes
from ..sensitivity.fisher import asks_gradients
from ..walker.memory import fitting_layers, resident_bytes
from ..walker.torch_device import find_device
from .device_fit import smallest_plan, summarise_device
from .preflight import preflight
from .prepared import MemoryNeed, Prepared, choose_kept_layers


def prepare(request: CompileRequest, like: Prepared | None = None) -> Prepared:
    """Run all checks.

    like: the same request for another device, or None. Its checkpoint and data are not read again.
    Raises MoecError.
    """
    options = request.options
    find_device(options.torch_device)
    checkpoint = open_checkpoint(request.source) if like is None else like.checkpoint
    lowering = lower(checkpoint) if like is None else like.lowering
    prepared = Prepared(request, checkpoint, lowering, (), {})
    kind, value = options.target.kind, options.target.value
    for spec in prepared.required_specs():
        check_format(options.quantizer, spec)
    notes = preflight(
        lowering,
        required=prepared.required_specs(),
        offered=() if kind == "uniform" else prepared.specs,
        group_sizes=() if kind == "uniform" else options.group_sizes,
        bits_per_weight=value if kind == "bits_per_weight" else None,
        size_bytes=round(value) if kind == "size" else None,
        prunes=bool(options.prune),
        check_companions=request.check_companions if like is None else None,
    )
    if like is None:
        if checkpoint.precision:
            request.talk.note(f"the weights are stored as {checkpoint.precision}: what they decode to is the baseline")
        for note in checkpoint.notes:
            request.talk.note(note)
        opened = None if request.templates is None else partial(request.templates, checkpoint.root)
        splits, shots = load_task_data(options, request.talk.note, opened)
        prepared = with_fitted_items(replace(prepared, splits=splits, shots=shots))
    else:
        prepared = replace(prepared, splits=like.splits, shots=like.shots)
    if request.popularity is not None:
        use = read_device_use(request.popularity, lowering.model) if like is None else like.use
        prepared = replace(prepared, use=use)
    for note in notes:
        request.talk.note(note)
    if request.measure_modes is not None:
        request.measure_modes.check(lowering.model, options.fallback_bits is not None)
    if request.cluster is not None:
        check_cluster(kind, options.torch_device)
    if kind == "uniform" and value < 16 and not prepared.splits and options.quantizer == DEFAULT_QUANTIZER:
        units = dict.fromkeys(lowering.units, *prepared.specs)
        if units_held_by(lowering, units) < len(units):
            request.talk.note(
                "without `--data` weights are rounded to nearest; with it, GPTQ keeps far more below 4 bits"
            )
    if kind == "uniform":
        return with_kept_layers(prepared) if prepared.splits else prepared
    smallest = smallest_plan(lowering, options, prepared.specs)
    summarise_device(request.profile, smallest, prepared.checkpoint.tokenizer_file_bytes)
    return with_kept_layers(prepared)


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
    """Decide how much of the model stays in memory. Raises OptionError if one layer does not fit.

    The size of the texts decides results. It follows the memory of the machine, so that other processes change none.
    """
    request, model = prepared.request, prepared.lowering.model
    need = MemoryNeed(model, request.options, prepared.stored_specs, torch.get_num_threads(), len(prepared.splits))
    kept_layers = choose_kept_layers(need, request.memory_limit_bytes)
    require_trials(request, model)
    free_bytes = request.memory_bytes or resident_set_bytes() + available_memory_bytes()
    least = need.bytes_with(kept_layers.texts)
    if not kept_layers.holds_model:
        count = min(kept_layers.count, fitting_layers(model, free_bytes - least))
        kept_layers = replace(kept_layers, count=count)
        request.talk.note(
            f"memory holds {count} of {model.num_layers} layers between passes, "
            f"{(least + resident_bytes(model, count)) / 2**30:.1f} GiB at most"
        )
    peak = least + resident_bytes(model, kept_layers.count)
    if peak > free_bytes:
        request.talk.note(
            f"the compile may take {peak / 2**30:.1f} GiB of memory, {free_bytes / 2**30:.1f} GiB are free now: "
            "end other programs, or give it less by --memory"
        )
    prunes_experts = prunes(request.options, model, asks_gradients(request.options.sensitivity, model))
    return replace(prepared, kept_layers=kept_layers, prunes=prunes_experts)
