"""Sampling: penalties, biases, log probabilities, and what a bundle recommends."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
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

from moec.manifests.bundle import MANIFEST_NAME, FileEntry
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.errors import (
    ChecksumMismatch,
    ExecutionError,
    ManifestInvalid,
    OptionError,
)
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.text.generation_defaults import (
    GENERATION_NAME,
    PLAIN,
    recommended_sampling,
    sampling_text,
    with_given,
    without_limits,
)
from moec.runtime.text.sampling import Sampler, SamplingOptions, penalised, token_log_prob

LOGITS = np.array([1.0, 3.0, 2.5, 0.0], np.float32)
HOT = {"temperature": 1.0}


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
    ("options", "message"),
    [
        *(({"temperature": value}, "temperature must be") for value in (-0.1, 101.0, float("nan"))),
        ({**HOT, "top_k": -1}, "top-k must"),
        *(({**HOT, "top_p": value}, "top-p must be") for value in (0.0, 1.1)),
        ({**HOT, "min_p": 1.5}, "min-p must be"),
        *(({name: value}, "temperature 0") for name, value in (("top_k", 3), ("top_p", 0.5), ("min_p", 0.1))),
        ({"seed": -1}, "seed must not be negative"),
        *(
            ({**HOT, "repetition_penalty": value}, r"must be 0\.01 to 100, found")
            for value in (0.0, 1e-40, 0.009, 101.0, float("nan"), float("inf"), -1.0)
        ),
        ({"presence_penalty": 101.0}, "-100 to 100"),
        ({"frequency_penalty": -101.0}, "-100 to 100"),
        ({"logit_bias": ((1, 1e9),)}, "-100 to 100"),
    ],
)
def test_what_is_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    """A smaller or larger repetition penalty would overflow."""
    with pytest.raises(OptionError, match=message):
        SamplingOptions(**options)


def test_equal_tokens_are_listed_by_their_id() -> None:
    logits = np.array([0.0, 2.0, 2.0, 2.0, -np.inf], np.float32)
    found = token_log_prob(logits, 2, 2)
    assert [token for token, _ in found.likeliest] == [1, 2]
    assert found.log_prob == pytest.approx(np.log(np.exp(2) / (1 + 3 * np.exp(2))), abs=1e-6)
    assert token_log_prob(logits, 4, 0).log_prob == -np.inf
    assert len(token_log_prob(logits, 0, 9).likeliest) == 5


EXAMPLE = Path(__file__).parents[3] / "examples" / "bundle"
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
OF_QWEN = SamplingOptions(temperature=0.6, top_k=20, top_p=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("defaults") / "bundle"))


def recommended(folder: Path, content: Any) -> SamplingOptions | None:
    """Return what a bundle with this file recommends. None: it has no file."""
    manifest = decode_manifest((folder / MANIFEST_NAME).read_bytes(), "test")
    files = [entry for entry in manifest.files if entry.name != GENERATION_NAME]
    (folder / GENERATION_NAME).unlink(missing_ok=True)
    if content is not None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / GENERATION_NAME).write_bytes(data)
        files.append(FileEntry(GENERATION_NAME, len(data), hashlib.sha256(data).hexdigest()))
    listed = tuple(sorted(files, key=lambda entry: entry.name))
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(replace(manifest, files=listed)))
    with open_bundle(folder) as opened:
        return recommended_sampling(opened, verify=True)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (None, None),
        ({"eos_token_id": 1}, None),
        ({"temperature": None, "do_sample": None}, None),
        (QWEN, OF_QWEN),
        ({"do_sample": True}, PLAIN),
        ({"do_sample": True, "temperature": 1, "top_k": -1, "min_p": 0.1}, replace(PLAIN, min_p=0.1)),
        ({"do_sample": False}, SamplingOptions()),
        ({**QWEN, "do_sample": False, "repetition_penalty": 1.05}, SamplingOptions(repetition_penalty=1.05)),
        ({"temperature": 0.0, "top_p": 0.9}, SamplingOptions()),
        ({"top_p": 0.8}, replace(PLAIN, top_p=0.8)),
    ],
    ids=str,
)
def test_what_a_bundle_recommends(folder: Path, content: Any, wanted: SamplingOptions | None) -> None:
    assert recommended(folder, content) == wanted


@pytest.mark.gate("G10")
@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is not JSON"),
        (b"[" * 9999, "is not JSON"),
        (b"[]", "must be an object"),
        ({"temperature": "0.6"}, "key `temperature`: expected a number"),
        ({"temperature": True}, "key `temperature`: expected a number"),
        (b'{"temperature": 1' + b"0" * 3000 + b"}", "key `temperature`: expected a number"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 2}, "top-p must be"),
        ({"repetition_penalty": 0}, "the repetition penalty must be"),
        ({"top_k": 1.5}, "key `top_k`: expected"),
        ({"top_k": -2}, "key `top_k`: expected"),
        ({"do_sample": 1}, "key `do_sample`: expected true or false"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_damaged_recommendation_is_refused(folder: Path, content: Any, fault: str) -> None:
    with pytest.raises(ManifestInvalid, match="generation_config") as raised:
        recommended(folder, content)
    assert fault in raised.value.message


def test_an_altered_recommendation_is_refused(folder: Path) -> None:
    recommended(folder, QWEN)
    path = folder / GENERATION_NAME
    path.write_bytes(path.read_bytes().replace(b"0.6", b"9.9"))
    with open_bundle(folder) as opened, pytest.raises(ChecksumMismatch):
        recommended_sampling(opened, verify=True)


def test_options_of_a_user_count_more() -> None:
    assert with_given(OF_QWEN, {}) == OF_QWEN
    assert with_given(OF_QWEN, {"temperature": 0.9}) == replace(OF_QWEN, temperature=0.9)
    assert with_given(replace(OF_QWEN, repetition_penalty=1.2), {"temperature": 0.0}) == SamplingOptions()
    assert with_given(SamplingOptions(), {"top_p": 0.9}) == replace(PLAIN, top_p=0.9)
    assert with_given(SamplingOptions(), {"top_p": 1.0, "top_k": 0}) == SamplingOptions()
    with pytest.raises(OptionError, match="no effect at temperature 0"):
        with_given(OF_QWEN, {"temperature": 0.0, "top_k": 5})
    assert without_limits({"temperature": 0.0, "top_k": 5, "min_p": 0.1}) == {"temperature": 0.0}


def test_sampling_as_text() -> None:
    assert sampling_text(OF_QWEN) == "temperature 0.6, top-k 20, top-p 0.95"
    assert sampling_text(SamplingOptions(repetition_penalty=1.1)) == (
        "the likeliest token (temperature 0), repetition penalty 1.1"
    )


def test_logits_that_the_penalty_makes_infinite_are_refused() -> None:
    sampler = Sampler(SamplingOptions(temperature=1.0, repetition_penalty=0.01))
    with pytest.raises(ExecutionError, match="NaN or infinity"):
        sampler(np.array([1, 3e38, 3], np.float32), [1])
    assert sampler(np.array([-1e30, 3e30, -3], np.float32), [1]) == 1


ANY_LOGITS = arrays.arrays(np.float32, st.integers(1, 20), elements=st.floats(-50, 50, width=32))


@given(logits=ANY_LOGITS, top_k=st.integers(0, 6), top_p=st.floats(0.01, 1), temperature=st.floats(1e-300, 100))
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


def test_logits_that_are_not_numbers_are_an_error() -> None:
    for temperature in (0.0, 0.8):
        sampler = Sampler(SamplingOptions(temperature=temperature))
        for value in (np.nan, np.inf):
            with pytest.raises(ExecutionError, match="NaN or infinity"):
                sampler(np.array([0.0, value, 1.0], np.float32))
