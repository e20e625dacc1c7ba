"""Sizes, shares and settings of a run; sampling."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moec.manifests.errors import OptionError
from moec.runtime import RuntimeOptions, load
from moec.runtime.options import MAX_THREADS, parse_bytes, parse_cache
from moec.runtime.sampling import Sampler, SamplingOptions, penalised


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096), ("0", 0), ("1B", 1), ("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("512 MiB", 512 << 20),
        (" 1.5KiB ", 1536), ("2.1GB", 2_100_000_000), ("9007199254740993", 9007199254740993), ("1TiB", 1 << 40),
        ("0.5B", 0),
    ],
)  # fmt: skip
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "G", "2G", "2gb", "2M", "-1", "-1GB", "1e9", "1.5", "GB2", "nan", "inf", "\uff12GB", "9" * 400 + "GB"],
)  # fmt: skip
def test_not_a_size(text: str) -> None:
    with pytest.raises(OptionError, match="is not a"):
        parse_bytes(text)


def test_shares_of_the_experts() -> None:
    assert parse_cache("50%", 1001) == 500 and parse_cache(" 100% ", 1001) == 1001 and parse_cache("0.5%", 1000) == 5
    assert parse_cache("1KiB", 5) == 1024
    for text in ("0%", "101%", "-5%", "%", "x%", "1e1%", "nan%", "50 %%", "\u0665%%"):
        with pytest.raises(OptionError, match="is not a share of the experts"):
            parse_cache(text, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "fifo"}, "unknown policy `fifo`"),
        ({"prefetch": "all"}, "unknown prefetch `all`"),
        ({"io": "tape"}, "unknown io mode `tape`"),
        ({"context": -1}, "must not be negative"),
        ({"threads": -1}, "must not be negative"),
        ({"slots": 0}, "slots must be at least 1"),
        ({"threads": MAX_THREADS + 1}, f"threads must be at most {MAX_THREADS}"),
        ({"memory": 2 << 30}, "`2147483648` is not a size"),
        ({"expert_cache": 0.5}, "`0.5` is not a size"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RuntimeOptions(**options)


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(OptionError, match="colour"):
        load("nowhere", colour="red")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1}, {"temperature": 101.0}, {"temperature": float("nan")}, {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1.0, "top_p": 1.1}, {"top_k": 3}, {"top_p": 0.5},
        {"seed": -1}, {"min_p": 0.1}, {"temperature": 1.0, "min_p": 1.5}, {"repetition_penalty": 0.0},
    ],
)  # fmt: skip
def test_sampling_options(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        SamplingOptions(**options)


LOGITS = arrays.arrays(np.float32, st.integers(1, 20), elements=st.floats(-50, 50, width=32))


@settings(max_examples=60, deadline=None)
@given(logits=LOGITS, top_k=st.integers(0, 6), top_p=st.floats(0.01, 1), temperature=st.floats(1e-300, 100))
def test_what_is_drawn_is_allowed(logits: np.ndarray, top_k: int, top_p: float, temperature: float) -> None:
    token = Sampler(SamplingOptions(temperature, top_k, top_p))(logits)
    ranked = np.argsort(-logits.astype(np.float64), kind="stable")
    assert token in (ranked[:top_k] if top_k else ranked)
    # The odds of a token that lies this far behind underflow.
    assert logits.max() - logits[token] <= 1000 * temperature


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert Sampler(SamplingOptions())(np.array([1, 3, 3, 0], np.float32)) == 1


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampler = Sampler(SamplingOptions(temperature=1.0, top_p=top_p))
        assert {sampler(logits) for _ in range(300)} == kept


def test_draws_follow_the_distribution_and_the_seed() -> None:
    logits = np.log(np.array([0.7, 0.2, 0.1], np.float32))
    runs = []
    for seed in (0, 0, 1):
        sampler = Sampler(SamplingOptions(temperature=1.0, seed=seed))
        runs.append([sampler(logits) for _ in range(2000)])
    assert runs[0] == runs[1] != runs[2]
    shares = [Counter(runs[0])[token] / 2000 for token in range(3)]
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.04)


@settings(max_examples=80, deadline=None)
@given(
    logits=arrays.arrays(np.float32, st.integers(2, 20), elements=st.floats(-8, 8, width=32), unique=True),
    top_k=st.integers(0, 6), top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.5), temperature=st.floats(0.2, 3),
    penalty=st.floats(0.5, 2), data=st.data(),
)  # fmt: skip
def test_the_distribution_is_that_of_transformers(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float, penalty: float, data: st.DataObject
) -> None:
    assume(np.diff(np.sort(logits)).min() > 1e-4)  # which of two equal shares passes is nobody's promise
    tokens = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=5))
    steps = [RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    steps += [MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(logits)[None]
    for step in steps:
        scores = step(torch.tensor([tokens]), scores)
    expected = scores.double().softmax(-1)[0].numpy()
    sampler = Sampler(SamplingOptions(temperature, top_k, top_p, min_p, penalty))
    order, weights = sampler.distribution(penalised(logits, tokens, penalty))
    found = np.zeros(len(logits))
    found[order] = weights
    # Where a sum or a share falls on the bound itself, rounding decides.
    assume(abs(np.cumsum(np.sort(expected)[::-1]) - top_p).min() > 1e-5)
    if set(np.flatnonzero(expected)) == set(np.flatnonzero(found)):
        assert found == pytest.approx(expected, abs=1e-5)
    else:
        ratios = np.exp(np.log(np.maximum(expected, 1e-30)) - np.log(expected.max()))
        boundary = np.abs(np.cumsum(np.sort(weights)[::-1]) - top_p).min() < 1e-4 or np.abs(ratios - min_p).min() < 1e-4
        assert boundary


def test_a_penalty_holds_for_greedy_tokens_too() -> None:
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0))
    assert sampler(np.array([4, 3, -1], np.float32), [0]) == 1
    assert sampler(np.array([4, 3, -1], np.float32), [2]) == 0
