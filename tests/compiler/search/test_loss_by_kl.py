"""The loss of answers as a function of the KL, from noisy losses of several plans."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.search.loss_by_kl import REACH, LossByKl, MeasuredPlan, measured_plans
from moec.compiler.sensitivity.acceptance import keeps
from tests.compiler.search.toy_search import ITEMS, estimate

TARGET, ERROR = 0.02, 0.002


def relation(*points: tuple[float, float], error: float = ERROR) -> LossByKl:
    """Return the relation after plans of these (KL, loss)."""
    found = LossByKl(TARGET, {"toy": ITEMS})
    for kl, loss in points:
        found.add(MeasuredPlan(kl, {"toy": estimate(loss, error)}))
    return found


@given(st.floats(1e-5, 0.1), st.floats(0.0, 0.5), st.floats(1e-4, 0.01))
def test_a_single_plan_is_judged_by_its_own_loss(kl: float, loss: float, error: float) -> None:
    found = relation((kl, loss), error=error)
    assert found.loss("toy", kl) == pytest.approx(loss, abs=1e-12)
    assert found.accepts(found.measured[0]) == keeps(estimate(loss, error), TARGET, ITEMS)


@given(st.floats(1e-5, 0.1), st.floats(-0.05, 0.0), st.floats(1e-4, 0.01))
def test_a_loss_below_zero_counts_as_none(kl: float, loss: float, error: float) -> None:
    """Else the expected loss would fall with the KL, and with few items no KL would be small enough."""
    found = relation((kl, loss), error=error)
    assert found.loss("toy", kl) == found.loss("toy", 9 * kl) == 0.0
    assert found.accepts(found.measured[0]) == keeps(estimate(0.0, error), TARGET, ITEMS)


def test_the_losses_of_near_plans_correct_a_lucky_one() -> None:
    """Alone, the last plan would be kept. Its neighbours lose more at less KL."""
    lucky = (0.0022, 0.010)
    assert keeps(estimate(lucky[1], ERROR), TARGET, ITEMS)
    found = relation((0.0018, 0.019), (0.0020, 0.021), (0.0021, 0.020), lucky)
    assert not found.accepts(found.measured[-1])
    assert found.loss("toy", lucky[0]) == pytest.approx(0.0189, abs=5e-4)


def test_far_plans_hardly_count() -> None:
    """Losses rise faster than the KL: this one, at six times the KL, would say 0.06."""
    assert relation((0.002, 0.01), (0.012, 0.36)).loss("toy", 0.002) == pytest.approx(0.0105, abs=5e-4)


def test_more_plans_make_the_relation_more_precise() -> None:
    """The mean distance from the true loss falls, over 200 draws of the noise."""
    draw = np.random.default_rng(0)
    errors: dict[int, list[float]] = {1: [], 4: []}
    for count, found in errors.items():
        for _ in range(200):
            kls = 0.002 * draw.uniform(0.8, 1.25, count)
            noisy = relation(*((kl, 5 * kl + ERROR * draw.standard_normal()) for kl in kls.tolist()))
            found.append(abs(noisy.loss("toy", 0.002) - 0.01))
    assert np.mean(errors[4]) < 0.6 * np.mean(errors[1])


def test_the_target_is_used_up_where_the_bound_meets_it() -> None:
    found = relation((0.001, 0.006), (0.002, 0.012))
    kl = found.used_up()
    assert found.upper_bound("toy", kl) <= TARGET < found.upper_bound("toy", 1.05 * kl)


def test_a_plan_whose_own_loss_is_refused_limits_the_kl() -> None:
    found = relation((0.001, 0.001), (0.0011, 0.001), (0.0012, 0.001), (0.002, 0.03))
    assert 0.0012 < found.used_up() < 0.002


def test_the_kl_grows_at_most_to_a_factor_beyond_what_was_measured() -> None:
    assert 0.9 * REACH < relation((0.001, 0.0)).used_up() / 0.001 <= REACH * (1 + 1e-9)


def test_nothing_is_used_up_where_every_loss_is_too_large() -> None:
    assert relation((0.001, 0.5)).used_up() == 0.0


def test_a_plan_needs_every_task() -> None:
    found = LossByKl(TARGET, {"toy": ITEMS, "other": ITEMS})
    part = MeasuredPlan(0.001, {"toy": estimate(0.0, ERROR)})
    found.add(part)
    assert not found.accepts(part)
    both = MeasuredPlan(0.001, {"toy": estimate(0.0, ERROR), "other": estimate(0.0, ERROR)})
    found.add(both)
    assert found.accepts(both)


def test_a_standard_error_that_is_not_known_refuses() -> None:
    found = relation((0.001, 0.0), error=math.inf)
    assert not found.accepts(found.measured[0])


def test_answers_that_are_all_equal_have_an_error_of_one_item() -> None:
    found = relation((0.001, 0.0), error=0.0)
    found.add(MeasuredPlan(0.001, {"toy": estimate(0.01, ERROR)}))
    assert 0 < found.loss("toy", 0.001) < 0.002


def test_measured_plans_are_stored_and_read() -> None:
    plans = [MeasuredPlan(0.001, {"toy": estimate(0.01, ERROR)}), MeasuredPlan(0.002, {"toy": estimate(0.5, math.inf)})]
    again = measured_plans([plan.to_json() for plan in plans])
    assert again[0] == plans[0] and again[1].losses["toy"].standard_error == math.inf
