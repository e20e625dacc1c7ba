"""The forecast at the start of a long compile, with the option that brings it nearest to half the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..preflight.preparation import with_kept_layers
from ..preflight.prepared import Prepared
from ..request.options import DEFAULT_TORCH_DEVICE, Talk
from ..search.loss_search import USUAL_GENERATED
from ..walker.memory import is_large
from ..workspace.journal import Journal
from . import forecast_each
from .stages import ANSWERING, CALIBRATING, PREDICTING, StageForecast, formats_below_16_bits

LONG_S = 600.0
"""Seconds from which a compile tells its forecast."""
_LEAST_LIMIT = 100
_SHORTER = 0.75
"""Largest share of the time that an option may leave to be named."""


def tell_forecast(prepared: Prepared, journal: Journal) -> None:
    """Tell the forecast of a compile of a large model, if it takes LONG_S or more. Shapes decide what is large.

    Work on a GPU or on a cluster is not foreseen, and neither is a format by request.
    journal: keeps the forecast, so that a resumed compile does not time its work again.
    Raises MoecError if the disk refuses.
    """
    request, options = prepared.request, prepared.options
    is_foreseen = options.torch_device == DEFAULT_TORCH_DEVICE and request.cluster is None and prepared.splits
    is_first = request.shared is None or request.shared.is_first
    if not (is_foreseen and is_first and options.target.kind != "uniform" and is_large(prepared.lowering.model)):
        return

    def foreseen() -> dict[str, Any]:
        stages, *quick = forecast_each([prepared, *_quick(prepared)])
        quick_seconds = [sum(stage.seconds for stage in its_stages) for its_stages in quick]
        shorter = shorter_option(prepared, stages, [("--effort quick", seconds) for seconds in quick_seconds])
        return {"stages": [stage.to_json() for stage in stages], "shorter": shorter}

    plain = journal.json("forecast", foreseen)
    if sum(stage["seconds"] for stage in plain["stages"]) >= LONG_S:
        request.talk.forecast(plain["stages"], plain["shorter"])


def _quick(prepared: Prepared) -> list[Prepared]:
    """Return the compile with `--effort quick`, which has the same formats; none if another effort is chosen."""
    request = prepared.request
    if request.options.effort != "default":
        return []
    options = replace(request.options, effort="quick")
    return [with_kept_layers(replace(prepared, request=replace(request, options=options, talk=Talk())))]


def shorter_option(
    prepared: Prepared, stages: Sequence[StageForecast], others: Sequence[tuple[str, float]] = ()
) -> tuple[str, float] | None:
    """Return the option that brings the time nearest to half, and the seconds with it. None: no option saves much.

    others: further options, and the seconds with each.
    """
    seconds = {stage.title: stage.seconds for stage in stages}
    total = sum(seconds.values())
    limited = _with_limit(prepared, total, seconds.get(ANSWERING, 0.0))
    candidates = [*others, limited, _with_one_group_size(prepared, seconds)]
    options = [(text, left) for text, left in candidates if left <= _SHORTER * total]
    return min(options, key=lambda option: abs(option[1] - total / 2), default=None)


def _with_limit(prepared: Prepared, total: float, answering: float) -> tuple[str, float]:
    """Return the `--limit` that leaves half of the time, or else the least one. Answers take as long for each item."""
    sizes = [(len(split.validation.items), len(split.test.items)) for split in prepared.splits]
    tried = 1 + USUAL_GENERATED if prepared.options.target.kind == "loss" else 0

    def left(limit: int) -> float:
        answers = sum(tried * min(limit, validation) + 2 * min(limit, test) for validation, test in sizes)
        return total - answering * (1 - answers / sum(tried * validation + 2 * test for validation, test in sizes))

    limit = max(map(max, sizes)) // _LEAST_LIMIT * _LEAST_LIMIT
    while limit > _LEAST_LIMIT and left(limit) > total / 2:
        limit -= _LEAST_LIMIT
    return f"--limit {max(limit, _LEAST_LIMIT)}", left(max(limit, _LEAST_LIMIT))


def _with_one_group_size(prepared: Prepared, seconds: dict[str, float]) -> tuple[str, float]:
    """Return the option that offers one group size, where its formats take a share of the time of all."""
    formats = formats_below_16_bits(prepared.stored_specs)
    size = max((spec.group_size for spec in formats), default=0)
    share = sum(spec.group_size == size for spec in formats) / max(len(formats), 1)
    left = sum(spent * (share if title in (CALIBRATING, PREDICTING) else 1) for title, spent in seconds.items())
    return f"--group-size {size}", left
