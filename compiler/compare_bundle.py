"""Compare a finished bundle with the baselines of the search, without changing it."""

from __future__ import annotations

from typing import Any

from moec.manifests.errors import OptionError

from .measured_bundle import BundleRequest, opened_measurement
from .search.comparison import can_compare, compare_with_baselines
from .stages.measure import measure

COMPARISON_SUFFIX = ".comparison"


def compare_bundle(request: BundleRequest) -> dict[str, Any]:
    """Measure the best uniform format and EdgeMoE's search. Return the entry `comparison` of quality.json.

    Raises OptionError if no baseline exists.
    Raises the errors of `opened_measurement`.
    """
    # The plan is there: predictions decide nothing, and gradients take long.
    with opened_measurement(request, COMPARISON_SUFFIX, "proxy") as (context, plan):
        specs, target = context.prepared.specs, context.prepared.options.target
        if not can_compare(plan, specs):
            raise OptionError(
                f"`{request.bundle}` has nothing to be compared with: no format below 16 bits fits every expert",
                "offer others with `--bits` when you compile",
            )
        trials = measure(context).trials
        return compare_with_baselines(plan, specs, trials, trials.store, target, request.talk).to_json()
