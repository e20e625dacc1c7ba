"""Weights fitted by a compile: the requests of a text, and a verdict by texts that the fit did not see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moec.cli.simulation.compile_eviction import EvictionReplays, fit_to_texts, requests_of
from moec.cli.simulation.traces import replayed_bundle
from moec.compiler.request.ports import RoutedText
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache.policies import DEFAULT_WEIGHTS
from moec.runtime.options.runtime import EvictionWeights

RECENT = EvictionWeights(1, 0, 0, 0)


def text(seed: int, tokens: int, habit: int) -> RoutedText:
    """Return a text of three layers whose tokens choose two of eight experts.

    habit: number of experts from which consecutive tokens choose; they move on every few tokens.
    """
    draw = np.random.default_rng(seed)
    chosen = {
        layer: np.array([(draw.permutation(habit)[:2] + at // 6 * habit + layer) % 8 for at in range(tokens)], np.int32)
        for layer in range(3)
    }
    return RoutedText(4, chosen)


def test_a_prompt_requests_each_expert_once_and_tokens_their_own() -> None:
    chosen = {0: np.array([[1, 2], [2, 3], [0, 1], [3, 0]], np.int32), 2: np.array([[0, 1]] * 4, np.int32)}
    assert requests_of(RoutedText(2, chosen), [0, 8, 16, 24]) == [
        (0, (1, 2, 3)),
        (2, (16, 17)),
        (0, (0, 1)),
        (2, (16, 17)),
        (0, (3, 0)),
        (2, (16, 17)),
    ]


def test_penalties_are_relative_to_the_default_weights(mixed_bundle: Path) -> None:
    with open_bundle(mixed_bundle) as opened:
        replayed = replayed_bundle(opened)
    replays = EvictionReplays(replayed, [requests_of(text(seed, 60, 3), [0, 8, 16, 24]) for seed in range(4)])
    assert replays.capacities and replays.penalty(DEFAULT_WEIGHTS) == 1
    by_text = replays.by_text(RECENT)
    assert by_text.shape == (4,) and replays.penalty(RECENT) == pytest.approx(by_text.mean()) != 1


def test_weights_are_fitted_to_one_set_and_judged_on_another(mixed_bundle: Path) -> None:
    alike = [text(seed, 40, 3) for seed in range(8)]
    unlike = [text(100 + seed, 40, 8) for seed in range(8)]
    told: list[tuple[int, int]] = []
    found = fit_to_texts(mixed_bundle, alike, unlike, lambda done, every: told.append((done, every)))
    assert found is not None and told[-1] == (1, 1)
    record = found.record
    assert record["texts"] == record["held_out_texts"] == 8
    with open_bundle(mixed_bundle) as opened:
        replayed = replayed_bundle(opened)
    weights = EvictionWeights(**found.weights)
    for texts, ratio in ((alike, record["fitted_ratio"]), (unlike, record["held_out_ratio"])):
        replays = EvictionReplays(replayed, [requests_of(each, [0, 8, 16, 24]) for each in texts])
        assert replays.penalty(weights) == pytest.approx(ratio, abs=1e-6)
    assert record["fitted_ratio"] < 1, "these texts have habits that the default weights do not know"
    assert found.is_better == record["kept"] == (record["held_out_interval95"][1] < 1)
    again = fit_to_texts(mixed_bundle, alike, alike, lambda done, every: None)
    assert again is not None and again.record["held_out_ratio"] == record["fitted_ratio"]
