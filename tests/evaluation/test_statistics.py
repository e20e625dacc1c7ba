"""The bootstrap against formulas, its coverage, what verdicts claim, and losses that are stored as JSON."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.evaluation.statistics import (
    MIN_ITEMS,
    LossEstimate,
    distribution_summary,
    judge,
    loss_from_json,
    mean_interval95,
    perplexity_interval95,
    perplexity_loss,
    relative_loss,
    summary_from_json,
)
from moec.evaluation.verdict_scope import verdict_scope
from moec.manifests.errors import ExecutionError, OptionError

Z95 = 1.6448536269514722  # normal quantile, one-sided 95 %


def _flips(n: int, right: float, lost: float, won: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact-match pairs: right items lose with rate `lost`, wrong ones win with rate `won`."""
    rng = np.random.default_rng(seed)
    baseline = (rng.random(n) < right).astype(float)
    flip = rng.random(n) < np.where(baseline > 0, lost, won)
    return baseline, np.where(flip, 1 - baseline, baseline)


def test_loss_is_relative_and_signed_by_direction() -> None:
    baseline, scores = np.array([1.0, 1, 0, 1, 1]), np.array([1.0, 0, 0, 1, 1])
    estimate = relative_loss(baseline, scores, resamples=200)
    assert (estimate.baseline, estimate.value, estimate.n) == (0.8, 0.6, 5)
    assert estimate.loss == pytest.approx(0.25)
    assert relative_loss(baseline, scores, higher_is_better=False, resamples=200).loss == pytest.approx(-0.25)


def test_standard_error_and_bounds_follow_the_delta_method() -> None:
    baseline, scores = _flips(4000, 0.75, 0.03, 0.05, seed=1)
    estimate = relative_loss(baseline, scores)
    ratio = scores.mean() / baseline.mean()
    expected = np.std(scores - ratio * baseline, ddof=1) / math.sqrt(4000) / baseline.mean()
    assert estimate.standard_error == pytest.approx(expected, rel=0.05)
    width = Z95 * expected + 1 / (4000 * baseline.mean())  # one item more
    assert estimate.upper95 == pytest.approx(estimate.loss + width, abs=0.1 * expected)
    assert estimate.lower95 == pytest.approx(estimate.loss - width, abs=0.1 * expected)
    low, high = estimate.interval95
    assert low < estimate.lower95 < estimate.loss < estimate.upper95 < high


def test_perplexity_loss_follows_the_delta_method() -> None:
    rng = np.random.default_rng(2)
    tokens = rng.integers(5, 50, 1500).astype(float)
    nll = tokens * rng.normal(2.0, 0.3, 1500)
    worse = nll + tokens * rng.normal(0.02, 0.05, 1500)
    estimate = perplexity_loss(nll, tokens, worse, tokens)
    difference = worse - nll
    log_ratio = difference.sum() / tokens.sum()
    expected = np.exp(log_ratio) * np.sqrt(np.sum((difference - log_ratio * tokens) ** 2)) / tokens.sum()
    assert estimate.loss == pytest.approx(np.expm1(log_ratio))
    assert estimate.standard_error == pytest.approx(expected, rel=0.05)
    assert estimate.baseline == pytest.approx(np.exp(nll.sum() / tokens.sum()))
    assert estimate.largest_item_loss is None
    low, high = perplexity_interval95(nll, tokens)
    assert low < estimate.baseline < high


def test_interval_of_a_mean() -> None:
    scores = np.random.default_rng(3).random(2000)
    low, high = mean_interval95(scores)
    error = scores.std(ddof=1) / math.sqrt(2000)
    assert low == pytest.approx(scores.mean() - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(scores.mean() + 1.96 * error, abs=0.15 * error)
    assert mean_interval95([0.5]) == (0.5, 0.5)


def test_bounds_cover_the_true_loss_as_often_as_they_say() -> None:
    lost, won, right = 0.05, 0.02, 0.7
    truth = (right * lost - (1 - right) * won) / right
    under = over = 0
    for seed in range(300):
        estimate = relative_loss(*_flips(400, right, lost, won, seed), resamples=400)
        under += truth <= estimate.upper95
        over += truth >= estimate.lower95
    # 95 % of 300 is 285, its standard deviation 3.8; one item more makes the bounds a little wide at n = 400
    assert 277 <= under <= 299
    assert 277 <= over <= 299


@pytest.mark.parametrize(("right", "rescued", "items"), [(0.95, 0.0, 160), (0.5, 0.0, 500), (0.75, 0.0, 500)])
def test_a_loss_in_few_items_is_supported_no_more_often_than_may_be(right: float, rescued: float, items: int) -> None:
    """The true loss is the target. Plain percentiles support it in up to 14 % of these runs."""
    target, runs = 0.02, 400
    supported = 0
    for seed in range(runs):
        before, after = _flips(items, right, target, rescued, seed)
        supported += judge(relative_loss(before, after, resamples=500), target).supported
    assert supported / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


def test_a_perplexity_that_few_texts_lose_has_a_wider_bound() -> None:
    """The further item is the text that loses most."""
    tokens = np.full(200, 250.0)
    nll = 3.5 * tokens
    even, uneven = nll + 5.0, nll + np.where(np.arange(200) < 4, 250.0, 0.0)
    by_skew = [perplexity_loss(nll, tokens, worse, tokens) for worse in (even, uneven)]
    assert by_skew[0].upper95 == pytest.approx(by_skew[0].loss)
    drawn = np.random.default_rng(1).integers(0, 201, (20_000, 201))
    means = np.mean(np.where((drawn < 4) | (drawn == 200), 1.0, 0.0), axis=1)
    assert by_skew[1].upper95 == pytest.approx(math.exp(np.quantile(means, 0.95)) - 1, rel=0.02)


def test_a_metric_without_a_range_takes_that_of_its_scores() -> None:
    scores = np.repeat([1.0, 0.0], [24, 6])
    unbounded = relative_loss(scores, scores, score_range=None)
    assert unbounded.largest_item_loss is None
    assert unbounded.upper95 == relative_loss(scores, scores).upper95 > 0.1
    assert not judge(unbounded, 0.02).supported


def test_same_input_same_bits_and_seed_matters() -> None:
    data = _flips(500, 0.7, 0.05, 0.05, seed=4)
    assert relative_loss(*data, resamples=500) == relative_loss(*data, resamples=500)
    assert relative_loss(*data, resamples=500) != relative_loss(*data, resamples=500, seed=1)


def test_equal_scores_lose_nothing() -> None:
    scores = np.random.default_rng(5).random(300)
    estimate = relative_loss(scores, scores, resamples=4000)
    assert (estimate.loss, estimate.standard_error, estimate.interval95) == (0, 0, (0, 0))
    # Of 301 draws, the one item more is among them at most three times in 95 % of cases: the rule of three.
    assert estimate.upper95 == pytest.approx(-estimate.lower95, rel=0.05)
    assert estimate.upper95 == pytest.approx(3 / 301 / scores.mean(), rel=0.1)


@given(st.lists(st.tuples(st.floats(0.1, 1), st.floats(0, 1)), min_size=1, max_size=40), st.floats(0.1, 8))
def test_loss_does_not_depend_on_the_unit(pairs: list[tuple[float, float]], scale: float) -> None:
    baseline, scores = np.array(pairs).T
    plain = relative_loss(baseline, scores, resamples=100)
    scaled = relative_loss(baseline * scale, scores * scale, score_range=scale, resamples=100)
    assert scaled.loss == pytest.approx(plain.loss, abs=1e-9)
    assert scaled.upper95 == pytest.approx(plain.upper95, abs=1e-9)
    assert plain.interval95[0] <= plain.interval95[1] and plain.lower95 <= plain.upper95


def test_4000_items_and_10000_resamples_in_three_seconds() -> None:
    rng = np.random.default_rng(6)
    started = time.process_time()
    relative_loss(rng.random(4000), rng.random(4000))
    assert time.process_time() - started < 3


def test_baseline_of_zero_names_the_other_targets() -> None:
    with pytest.raises(OptionError, match=r"baseline scores 0 on 50 items.*`--kl`, `--bits-per-weight` or `--size`"):
        relative_loss(np.zeros(50), np.ones(50))
    with pytest.raises(OptionError, match="baseline scores nan"):
        perplexity_loss([1.0], [0], [1.0], [0])


def test_undefined_resamples_widen_the_bounds() -> None:
    # one right item in 40: more than a third of the resamples have a baseline of 0
    baseline = np.zeros(40)
    baseline[0] = 1
    estimate = relative_loss(baseline, baseline, resamples=1000)
    assert estimate.interval95 == (-math.inf, math.inf)
    assert estimate.to_json()["upper95"] is None
    assert estimate.to_json()["interval95"] == [None, None]
    verdict = judge(estimate, 0.02)
    assert (verdict.met, verdict.supported, verdict.items_needed) == (True, False, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_must_be_numbers(bad: float) -> None:
    with pytest.raises(ExecutionError, match=f"score of item 1 is {bad}"):
        relative_loss([1.0, 1.0], [1.0, bad])
    with pytest.raises(ExecutionError, match="no items"):
        mean_interval95([])
    with pytest.raises(ValueError, match="one length"):
        relative_loss([1.0], [1.0, 0.5])


def _estimate(
    loss: float, error: float, n: int = 4000, largest: float | None = 1 / 0.75, baseline: float = 0.75
) -> LossEstimate:
    lower, upper = loss - Z95 * error, loss + Z95 * error
    interval = (loss - 1.96 * error, loss + 1.96 * error)
    return LossEstimate(baseline, baseline * (1 - loss), loss, interval, lower, upper, error, n, largest)


@pytest.mark.parametrize(
    ("loss", "error", "status"),
    [(0.01, 0.003, "supported"), (0.019, 0.003, "met"), (0.021, 0.003, "missed"), (0.03, 0.003, "refuted")],
)
def test_the_four_verdicts(loss: float, error: float, status: str) -> None:
    verdict = judge(_estimate(loss, error), 0.02)
    assert verdict.status == status
    assert verdict.met == (status in ("supported", "met"))
    assert (verdict.items_needed is None) == (status in ("supported", "refuted"))
    assert verdict.to_json()["status"] == status


def test_items_needed_follow_from_the_standard_error() -> None:
    # at n items the bound is 1.645 * 0.003 away, the target 0.001: (4.93)^2 times the items
    expected = math.ceil(4000 * (Z95 * 0.003 / 0.001) ** 2)
    assert judge(_estimate(0.019, 0.003), 0.02).items_needed == pytest.approx(expected, abs=1)
    assert judge(_estimate(0.021, 0.003), 0.02).items_needed == pytest.approx(expected, abs=1)
    assert judge(_estimate(0.02, 0.003), 0.02).items_needed is None


def test_items_needed_would_decide() -> None:
    small = relative_loss(*_flips(300, 0.75, 0.03, 0.05, seed=13))
    verdict = judge(small, 0.03)
    assert verdict.status == "met"
    assert verdict.items_needed is not None
    large = relative_loss(*_flips(2 * verdict.items_needed, 0.75, 0.03, 0.05, seed=9), resamples=1000)
    assert judge(large, 0.03).supported


def test_few_identical_answers_support_nothing() -> None:
    for n, enough in ((5, False), (100, False), (198, False), (199, True), (4000, True)):
        verdict = judge(relative_loss(np.full(n, 0.75), np.full(n, 0.75), resamples=50), 0.02)
        assert (verdict.met, verdict.supported, verdict.enough_items) == (True, enough, enough)
        # 1 - 0.05^(1/n) <= 0.02 * 0.75
        assert verdict.items_needed == (None if enough else 199)


def test_few_items_refute_nothing() -> None:
    verdict = judge(relative_loss([0.5, 0.5], [0.4, 0.4], resamples=50), 0.02)
    assert (verdict.status, verdict.enough_items, verdict.items_needed) == ("missed", False, MIN_ITEMS)


def test_a_target_of_zero_can_be_met_but_not_supported() -> None:
    verdict = judge(_estimate(-0.01, 0.001), 0.0)
    assert (verdict.status, verdict.items_needed) == ("met", None)
    assert judge(_estimate(0.01, 0.001, n=40, largest=None), 0.02).supported
    assert judge(_estimate(0.01, 0.001, n=40, largest=0.01), 0.02).supported
    assert not judge(_estimate(0.01, 0.001, n=29, largest=None), 0.02).supported


def test_divergence_summary() -> None:
    kl = np.arange(101, dtype=float)
    summary = distribution_summary(kl, np.arange(101) % 4 > 0)
    assert (summary.mean, summary.q50, summary.q99, summary.max, summary.n) == (50, 50, 99, 100, 101)
    assert summary.agreement == pytest.approx(75 / 101)
    assert summary.standard_error == pytest.approx(kl.std(ddof=1) / math.sqrt(101))
    assert distribution_summary([1.0], [True]).to_json()["standard_error"] is None


def test_divergence_error_over_items() -> None:
    rng = np.random.default_rng(10)
    per_item = rng.random(200)
    kl, items = np.repeat(per_item, 8), np.repeat(np.arange(200) * 3, 8)
    grouped = distribution_summary(kl, kl < 2, items)
    assert grouped.standard_error == pytest.approx(per_item.std(ddof=1) / math.sqrt(200))
    assert grouped.standard_error > 2.5 * distribution_summary(kl, kl < 2).standard_error
    with pytest.raises(ExecutionError, match="item 0 is nan"):
        distribution_summary([math.nan], [True])


def test_several_looks_together_err_no_more_often_than_one_may() -> None:
    """A model whose true loss is the target is supported in at most 5 % of runs, though each looks four times."""
    random, target, looks, runs = np.random.default_rng(5), 0.1, (60, 120, 240, 480), 300
    baseline_rate, rescued = 0.9, 0.02  # right before and wrong now, and the other way round
    broken = target * baseline_rate + rescued * (1 - baseline_rate)
    wrong = 0
    for _ in range(runs):
        before = random.random(looks[-1]) < baseline_rate
        draws = random.random(looks[-1])
        after = np.where(before, draws >= broken / baseline_rate, draws < rescued)
        for count in looks:
            estimate = relative_loss(
                before[:count].astype(float), after[:count].astype(float), resamples=400, error=0.05 / len(looks)
            )
            verdict = judge(estimate, target)
            if verdict.supported or verdict.refuted:
                wrong += verdict.supported
                break
    assert wrong / runs <= 0.05 + 2 * (0.05 * 0.95 / runs) ** 0.5


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=30), st.sampled_from([0.05, 0.0125]))
def test_a_loss_is_read_as_it_was_written(scores: list[float], error: float) -> None:
    """Few items leave bounds that cannot be told, and a standard error that is infinite."""
    baseline = np.maximum(scores, np.arange(len(scores)) == 0)
    found = relative_loss(baseline, scores, resamples=50, error=error)
    assert loss_from_json(json.loads(json.dumps(found.to_json()))) == found


def test_an_infinite_loss_stays_infinite() -> None:
    found = replace(relative_loss([1.0], [1.0], resamples=5), loss=math.inf, value=math.inf)
    again = loss_from_json(json.loads(json.dumps(found.to_json())))
    assert again.loss == again.value == math.inf


def test_a_kl_is_read_as_it_was_written() -> None:
    """Also that of several tasks, one of which has a single text."""
    whole = replace(distribution_summary([0.1, 0.3], [True, False], [0, 1]), by_task=((0.1, math.inf), (0.3, 0.2)))
    for found in (whole, replace(whole, by_task=(), standard_error=math.inf)):
        assert summary_from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


@pytest.mark.parametrize(
    ("quality", "scope"),
    [
        (None, ""),
        ({}, ""),
        ({"verdict": "not measured", "tasks": {}}, ""),
        ({"verdict": "measured", "tasks": {"gsm8k": {}}}, ""),
        ({"verdict": ["supported"], "tasks": {"gsm8k": {}}}, ""),
        ({"verdict": "supported", "tasks": ["gsm8k"]}, ""),
        ({"verdict": "supported", "tasks": {}}, ""),
        ({"verdict": "supported", "tasks": {"gsm8k": {}}}, "supported for gsm8k; other tasks were not measured"),
        ({"verdict": "refuted", "tasks": {"b": {}, "a": {}}}, "refuted for a, b; other tasks were not measured"),
        (
            {"verdict": "met", "tasks": {}, "held_out_kl": {"perplexity": {}}},
            "met for perplexity; other tasks were not measured",
        ),
        (
            {"verdict": "met", "tasks": {"a": {"n": 9, "max_new_tokens": 8, "cut": {"baseline": 0, "value": 0}}}},
            "met for a; other tasks were not measured",
        ),
        (
            {
                "verdict": "met",
                "tasks": {
                    "a": {
                        "n": 9,
                        "max_new_tokens": 8,
                        "cut": {"baseline": 2, "value": 3},
                        "settings": {"thinking": "on"},
                    }
                },
            },
            "met for a with thinking on; other tasks were not measured; 3 of 9 answers of a were cut at 8 tokens, and "
            "2 of the checkpoint's",
        ),
        (
            {"verdict": "met", "tasks": {"a": {"cut": {"value": "x"}, "settings": 1}}},
            "met for a; other tasks were not measured",
        ),
    ],
)
def test_the_scope_of_a_verdict(quality: dict[str, Any] | None, scope: str) -> None:
    assert verdict_scope(quality) == scope
