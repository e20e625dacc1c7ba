"""Compare a finished bundle with the baselines of the search, without changing it."""

from __future__ import annotations

from typing import Any

from moec.manifests.errors import OptionError

from .measured_bundle import BundleRequest, opened_measurement, prepare_measurement
from .search.comparison import can_compare, compare_with_baselines
from .stages.measure import measure

COMPARISON_SUFFIX = ".comparison"


def compare_bundle(request: BundleRequest) -> dict[str, Any]:
    """Measure the best uniform format and EdgeMoE's search. Return the entry `comparison` of quality.json.

    Raises OptionError if no baseline exists.
    Raises the errors of `prepare_measurement` and of a compile.
    """
    # The plan is there: predictions decide nothing, and gradients take long.
    measurement = prepare_measurement(request, COMPARISON_SUFFIX, "proxy")
    prepared, plan = measurement.prepared, measurement.plan
    if not can_compare(plan, prepared.specs):
        raise OptionError(
            f"`{request.bundle}` has nothing to be compared with: no format below 16 bits fits every expert",
            "offer others with `--bits` when you compile",
        )
    with opened_measurement(measurement) as context:
        trials = measure(context).trials
        target = prepared.request.options.target
        return compare_with_baselines(plan, prepared.specs, trials, trials.store, target, request.talk).to_json()
