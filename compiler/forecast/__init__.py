"""Forecast of a compile: time, memory and disk of each stage, before any work is done.

rates: pieces of the real work, timed on one layer of the checkpoint.
stages: how many pieces each stage consists of.
"""

from __future__ import annotations

from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.errors import OptionError

from ..checkpoint.tokenizer import load_tokenizer
from ..preflight.preparation import Prepared, prepare
from ..request.request import CompileRequest
from ..request.task_data import train_texts
from ..request.uniform import uniform_quantizer, uniform_spec
from ..workspace.output_lock import existing_parent
from .rates import measure_disk, measure_expert, measure_layer
from .stages import SearchForecast, StageForecast, uniform_stages

__all__ = ["StageForecast", "forecast"]


def forecast(request: CompileRequest) -> list[StageForecast]:
    """Return the stages of a compile, in order.

    Reads headers, task data and one layer's weights. Writes only temporary files.
    Raises the errors of a compile's checks before work.
    """
    prepared = prepare(request)
    lowering, options, talk = prepared.lowering, request.options, request.talk
    parent = existing_parent(request.output)
    disk = measure_disk(prepared.checkpoint, parent, request.disk)
    if options.target.kind == "uniform":
        rates = measure_expert(lowering, [uniform_spec(options, lowering)], uniform_quantizer(options))
        return uniform_stages(prepared, disk, rates)
    if lowering.model.encoder is not None or not prepared.splits:
        raise OptionError(
            "a forecast of a search counts the texts that pass a decoder",
            "add `--data`, or leave out `--estimate`: `--plan-only` tells what each stage took",
        )
    inputs = prepared.sweep_inputs()
    layer = measure_layer(
        lowering, inputs.calibration, inputs.specs, options.quantizer, talk.progress("timing a layer")
    )
    stages = SearchForecast(prepared, inputs, disk, layer)
    return stages.layerwise() if prepared.is_layerwise else stages.whole(_train_tokens(prepared))


def _train_tokens(prepared: Prepared) -> int:
    """Return the number of tokens of all train items, each cut to the context."""
    texts = [text for split in prepared.splits for text in train_texts(split, prepared.shots)]
    context = prepared.lowering.model.original_positions
    pairs = encode_pairs(load_tokenizer(prepared.checkpoint.root), texts)
    return sum(min(len(before) + len(answer), context) for before, answer in pairs)
