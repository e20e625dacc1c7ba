"""Sizes, shares and settings of a run; sampling."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moec.manifests.errors import ExecutionError, InputError, OptionError
from moec.runtime import RuntimeOptions, load
from moec.runtime.options.runtime import MAX_THREADS, parse_cache
from moec.runtime.text.sampling import Sampler, SamplingOptions, penalised
from moec.runtime.text.tokenizer import checked_ids


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
        ({"context": -1}, "context must be 0 or more"),
        ({"threads": -1}, "threads must be 0 to 256"),
        ({"slots": 0}, "slots must be 1 or more"),
        ({"threads": MAX_THREADS + 1}, f"threads must be 0 to {MAX_THREADS}"),
        ({"memory": 2 << 30}, "`memory` must be a text or None, found 2147483648"),
        ({"expert_cache": 0.5}, "`expert_cache` must be a text or None, found 0.5"),
        ({"slots": 1.5}, "`slots` must be a whole number, found 1.5"),
        ({"threads": True}, "`threads` must be a whole number, found True"),
        ({"verify": "no"}, "`verify` must be True or False, found 'no'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        RuntimeOptions(**options)


class Strange:
    """Has no representation."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize("name", [field.name for field in fields(RuntimeOptions)])
def test_every_option_has_a_type(name: str) -> None:
    default = getattr(RuntimeOptions(), name)
    for value in (True, 1, 1.5, float("nan"), "text", b"text", [], {}, Strange(), DEEP, np.int64(1), 10**5000):
        if type(value) is type(default) or (default is None and isinstance(value, str)):
            continue
        with pytest.raises(OptionError, match=f"`{name}` must be") as caught:
            RuntimeOptions(**{name: value})
        assert len(caught.value.message) < 150


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingOptions)])
def test_every_option_of_sampling_has_a_type(name: str) -> None:
    for value in (True, "1", None, [], np.float32(1)):
        with pytest.raises(OptionError, match=f"`{name}` must be"):
            SamplingOptions(**{name: value})
    assert SamplingOptions(temperature=1) == SamplingOptions(temperature=1.0), "a whole number is a number"


@pytest.mark.parametrize("penalty", [1e-40, 0.009, 101.0, float("nan"), float("inf"), -1.0])
def test_a_penalty_that_would_overflow_is_refused(penalty: float) -> None:
    with pytest.raises(OptionError, match=r"must be 0\.01 to 100, found"):
        SamplingOptions(temperature=1.0, repetition_penalty=penalty)


def test_logits_that_the_penalty_makes_infinite_are_refused() -> None:
    sampler = Sampler(SamplingOptions(temperature=1.0, repetition_penalty=0.01))
    with pytest.raises(ExecutionError, match="NaN or infinity"):
        sampler(np.array([1, 3e38, 3], np.float32), [1])
    assert sampler(np.array([-1e30, 3e30, -3], np.float32), [1]) == 1


@pytest.mark.parametrize(
    "tokens",
    [[float("nan")], ["a"], [1.5], [True], [None], [[1]], [b"a"], 5, None, [np.float32(1)], [1, 2, "3"]],
)
def test_token_ids_that_are_none(tokens: Any) -> None:
    with pytest.raises(InputError) as caught:
        checked_ids(tokens)
    assert "\n" not in caught.value.message


def test_token_ids() -> None:
    assert checked_ids((1, np.int64(2), np.uint16(3))) == [1, 2, 3]
    assert checked_ids(np.array([4, 5], np.int32)) == [4, 5]  # type: ignore[arg-type]


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


@given(logits=LOGITS, top_k=st.integers(0, 6), top_p=st.floats(0.01, 1), temperature=st.floats(1e-300, 100))
def test_what_is_drawn_is_allowed(logits: np.ndarray, top_k: int, top_p: float, temperature: float) -> None:
    token = Sampler(SamplingOptions(temperature, top_k, top_p))(logits)
    ranked = np.argsort(-logits.astype(np.float64), kind="stable")
    assert token in (ranked[:top_k] if top_k else ranked)
    # The probability of a token with a logit this much lower underflows.
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


@given(
    logits=arrays.arrays(np.float32, st.integers(2, 20), elements=st.floats(-8, 8, width=32), unique=True),
    top_k=st.integers(0, 6), top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.5), temperature=st.floats(0.2, 3),
    penalty=st.floats(0.5, 2), data=st.data(),
)  # fmt: skip
def test_the_distribution_is_that_of_transformers(
    logits: np.ndarray, top_k: int, top_p: float, min_p: float, temperature: float, penalty: float, data: st.DataObject
) -> None:
    assume(np.diff(np.sort(logits)).min() > 1e-4)  # the order of two equal shares is not defined
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
