"""Forecast of a compile: time, memory and disk of each stage, before any work is done.

rates: pieces of the real work, timed on one layer of the checkpoint.
stages: how many pieces each stage consists of.
"""

from __future__ import annotations

from collections.abc import Sequence

from moec.manifests.errors import OptionError

from ..preflight.preparation import prepare
from ..preflight.prepared import Prepared
from ..request.options import DEFAULT_TORCH_DEVICE
from ..request.request import CompileRequest
from ..request.uniform import requested_specs, uniform_quantizer
from ..stages.encode_texts import CompileTexts, encode_all_texts
from ..workspace.output_lock import existing_parent
from .after_writing import stages_after_writing
from .answers import answer_slots
from .rates import DiskRates, LayerRates, measure_disk, measure_expert, measure_layer
from .stages import SearchForecast, StageForecast, uniform_stages

__all__ = ["StageForecast", "forecast", "forecast_each"]


def forecast(request: CompileRequest) -> list[StageForecast]:
    """Return the stages of a compile, in order.

    Reads headers, task data and one layer's weights. Writes only temporary files.
    Raises the errors of a compile's checks before work.
    """
    if request.options.torch_device != DEFAULT_TORCH_DEVICE:
        raise OptionError(
            f"`--estimate` times work on the CPU, found `--torch-device {request.options.torch_device}`",
            "leave one of the two out",
        )
    return forecast_each([prepare(request)])[0]


def forecast_each(compiles: Sequence[Prepared]) -> list[list[StageForecast]]:
    """Return the stages of compiles whose checks are done. Raises OptionError for a search without data.

    compiles: the second and later ones have searches in the formats of the first, on whose texts the work is timed.
    """
    prepared = compiles[0]
    request = prepared.request
    lowering, options, talk = prepared.lowering, request.options, request.talk
    parent = existing_parent(request.output)
    disk = measure_disk(prepared.checkpoint, parent, request.disk)
    if options.target.kind == "uniform" and not prepared.splits:
        rates = measure_expert(lowering, requested_specs(options, lowering)[:1], uniform_quantizer(options))
        return [uniform_stages(prepared, disk, rates)]
    if not prepared.splits:
        raise OptionError(
            "a forecast of a search counts the texts that pass the model",
            "add `--data`, or leave out `--estimate`: `--plan-only` tells what each stage took",
        )
    texts = [encode_all_texts(each) for each in compiles]
    layer = measure_layer(
        lowering,
        texts[0].calibration,
        prepared.stored_specs,
        options.quantizer,
        answer_slots(prepared),
        talk.progress("timing a layer"),
    )
    return [_counted(each, encoded, disk, layer) for each, encoded in zip(compiles, texts, strict=True)]


def _counted(prepared: Prepared, texts: CompileTexts, disk: DiskRates, layer: LayerRates) -> list[StageForecast]:
    """Return the stages of a compile with data. disk, layer: seconds of the pieces of work."""
    counted = SearchForecast(prepared, texts, disk, layer)
    stages = counted.calibrated_stages() if prepared.options.target.kind == "uniform" else counted.stages()
    bundle_bytes, disk_bytes, modes = counted.answering_bytes, counted.disk_bytes, prepared.request.measure_modes
    return stages + stages_after_writing(prepared, disk, layer, bundle_bytes, disk_bytes, modes)
