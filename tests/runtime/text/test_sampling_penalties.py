"""Penalties of an answer's own tokens, biases, and log probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from moec.manifests.errors import OptionError
from moec.runtime.text.sampling import Sampler, SamplingOptions, token_log_prob

LOGITS = np.array([1.0, 3.0, 2.5, 0.0], np.float32)


@pytest.mark.parametrize(
    ("options", "answer", "chosen"),
    [
        ({}, [1, 1], 1),
        ({"presence_penalty": 0.6}, [], 1),
        ({"presence_penalty": 0.6}, [1], 2),
        ({"presence_penalty": 0.4}, [1, 1, 1], 1),
        ({"frequency_penalty": 0.2}, [1, 1], 1),
        ({"frequency_penalty": 0.2}, [1, 1, 1], 2),
        ({"logit_bias": ((3, 4.0),)}, [], 3),
        ({"logit_bias": ((1, -100.0), (2, -100.0))}, [], 0),
    ],
)
def test_penalties_and_biases(options: dict[str, object], answer: list[int], chosen: int) -> None:
    before = LOGITS.copy()
    assert Sampler(SamplingOptions(**options))(LOGITS, [1, 1, 1, *answer], 3) == chosen  # type: ignore[arg-type]
    assert np.array_equal(LOGITS, before)


@pytest.mark.parametrize(
    "options", [{"presence_penalty": 101.0}, {"frequency_penalty": -101.0}, {"logit_bias": ((1, 1e9),)}]
)
def test_ranges(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="-100 to 100"):
        SamplingOptions(**options)  # type: ignore[arg-type]


def test_equal_tokens_are_listed_by_their_id() -> None:
    logits = np.array([0.0, 2.0, 2.0, 2.0, -np.inf], np.float32)
    found = token_log_prob(logits, 2, 2)
    assert [token for token, _ in found.likeliest] == [1, 2]
    assert found.log_prob == pytest.approx(np.log(np.exp(2) / (1 + 3 * np.exp(2))), abs=1e-6)
    assert token_log_prob(logits, 4, 0).log_prob == -np.inf
    assert len(token_log_prob(logits, 0, 9).likeliest) == 5
