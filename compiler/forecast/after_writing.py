"""Stages on the written bundle after its certificate: learning to look ahead, and measuring lossy modes."""

from __future__ import annotations

from functools import partial

from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.model import ModelSpec
from moec.profiles.weight_counts import active_weights, all_weights, expert_weights

from ..checkpoint.tokenizer import load_tokenizer
from ..linear_maps import (
    HELD_OUT,
    MAX_AHEAD,
    can_learn,
    layer_groups,
    learned_weights,
    regression_bytes,
    regression_products,
    token_bytes,
)
from ..preflight.prepared import Prepared
from ..request.ports import MeasureModes, ModesWork
from ..stages.learning import sample_bytes, sample_texts
from ..walker.memory import certifying_bytes, resident_bytes
from .answers import count_mode_answers
from .rates import DiskRates, LayerRates
from .stages import StageForecast, layer_scales

_FLOAT = 4


def stages_after_writing(
    prepared: Prepared,
    disk: DiskRates,
    rates: LayerRates,
    bundle_bytes: int,
    disk_bytes: int,
    measure_modes: MeasureModes | None,
) -> list[StageForecast]:
    """Return the stages that follow a certificate.

    disk, rates: seconds of the pieces of work.
    bundle_bytes: weights of the bundle that answers.
    disk_bytes: what the disk holds then.
    measure_modes: measures lossy modes; None: nothing does.
    """
    stages = _learning(prepared, rates, disk_bytes)
    if measure_modes is None:
        return stages
    work = measure_modes.work(prepared.lowering.model, prepared.options.fallback_bits is not None)
    return stages + _modes(prepared, disk, rates, bundle_bytes, disk_bytes, work)


def _learning(prepared: Prepared, rates: LayerRates, disk_bytes: int) -> list[StageForecast]:
    """Return the stage that learns routers; none if the model or the texts allow none.

    The texts pass once for each group of layers. The regressions of all layers follow each other.
    """
    model = prepared.lowering.model
    if not can_learn(model):
        return []
    tokenizer = load_tokenizer(prepared.checkpoint.root)
    texts = sample_texts(prepared, partial(encode_pairs, tokenizer))
    if len(texts) < HELD_OUT:
        return []
    tokens = sum(map(len, texts))
    groups = layer_groups(model, tokens, max(sample_bytes(prepared), 0))
    seconds = len(groups) * tokens * rates.token * sum(layer_scales(model, rates.layer))
    seconds += regression_products(model, tokens) * rates.product
    seconds += 2 * sum(learned_weights(model)) * rates.rounded_weight  # in two formats at most
    sampled = min(len(groups[0]) + MAX_AHEAD, len(model.expert_layers))
    memory = _runtime_bytes(prepared) + sampled * tokens * token_bytes(model) + regression_bytes(model, tokens)
    passes = "once" if len(groups) == 1 else f"{len(groups)} times"
    text = f"{tokens:,} tokens {passes}, at most {len(learned_weights(model)):,} maps"
    return [StageForecast("learning to look ahead", seconds, memory, disk_bytes, text)]


def _modes(
    prepared: Prepared, disk: DiskRates, rates: LayerRates, bundle_bytes: int, disk_bytes: int, work: ModesWork
) -> list[StageForecast]:
    """Return the stage that measures lossy modes; none if it does nothing.

    A prompt reads all experts that the cache does not hold, a decoded token those that it chooses. It also moves the
    weights that it uses through the processor, and takes the longer of both times, as `profiles/predict.py` has it. A
    real cache holds what is chosen more often. A small model does not reach the rate of memory.
    """
    model = prepared.lowering.model
    if not work.settings:
        return []
    items, prompts, read, decoded = count_mode_answers(prepared, work)
    missed = (1 - work.cached_share) * bundle_bytes * disk.digested_byte
    seconds = read * rates.tried_token * sum(layer_scales(model, rates.layer)) + prompts * missed
    moved = bundle_bytes * active_weights(model) / all_weights(model) * rates.memory_byte
    seconds += decoded * max(moved, missed * _share_of_chosen(model))
    text = f"at most {work.settings} settings on {items:,} items, token by token"
    logits = min(work.kept_logits, work.divergence_items * work.divergence_tokens * model.vocab_size)
    memory = _runtime_bytes(prepared) + _FLOAT * logits
    return [StageForecast("measuring lossy modes", work.settings * seconds, memory, disk_bytes, text)]


def _share_of_chosen(model: ModelSpec) -> float:
    """Return the share of all experts' weights that one token uses."""
    routed = [(model.layers[layer].experts, expert_weights(model, layer)) for layer in model.expert_layers]
    return sum(experts.top_k * one for experts, one in routed) / sum(experts.count * one for experts, one in routed)


def _runtime_bytes(prepared: Prepared) -> int:
    """Return the least memory of the runtime next to the layers that the compile keeps."""
    model = prepared.lowering.model
    return certifying_bytes(model, 0) + resident_bytes(model, prepared.kept_layers.count)
