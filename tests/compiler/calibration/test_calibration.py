"""Statistics compared with counts from the model's router logits, and path predictions on routes made by hand."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.bundle.quality import unimportance_deciles
from moec.compiler.calibration.activation_paths import (
    count_paths,
    count_popularity,
    count_transitions,
    frequent_share,
    report_paths,
)
from moec.compiler.calibration.collect import (
    UNIMPORTANCE_BINS,
    ActivationStatistics,
    choose_texts,
    count_statistics,
    weight_summary,
)
from moec.compiler.calibration.layer_inputs import calibrate_layer
from moec.compiler.calibration.tables import Tables
from moec.compiler.families import Lowering
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.texts import TextStates, TokenTexts
from moec.compiler.workspace.parallel import workers
from moec.manifests.errors import DataError
from moec.manifests.model import ExpertKey
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.transformers_oracle import TransformersOracle

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = [("Question: what?\nAnswer:", " this"), ("a", "b"), ("longer " * 9, "and more"), ("", "alone"), ("x", "")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> TransformersOracle:
    tiny = TinyMixtral(layers=4, experts=5, top_k=2, seed=5)
    return TransformersOracle(save_tiny_mixtral(tmp_path_factory.mktemp("tiny"), tiny))


@pytest.fixture(scope="module")
def lowering(reference) -> Lowering:
    return reference.lowering


@pytest.fixture(scope="module")
def pairs(reference):
    return reference.encode_pairs(TEXTS)


def calibrate(lowering: Lowering, pairs, seed: int = 0, max_tokens: int = 10**6) -> ActivationStatistics:
    """Pass texts through the layers, and count."""
    rows = TokenTexts([prompt + answer for prompt, answer in pairs])
    texts = choose_texts(rows, lowering.model.original_positions, seed, max_tokens)[0]
    slot, counts = LoadedLayer(lowering), []
    states = TextStates.begin(texts, slot.embed)
    with workers(1) as pool:
        for layer in range(lowering.model.num_layers):
            slot.load(layer)
            counts.append(calibrate_layer(slot, states, pool, has_moments=False)[1])
    return count_statistics(lowering.model, texts, seed, counts, "pairs")


@pytest.fixture(scope="module")
def statistics(lowering, pairs) -> ActivationStatistics:
    return calibrate(lowering, pairs)


def router_choices(reference, pairs):
    """Return for each text experts [T, L, K] and weights from `output_router_logits`, and inputs of all experts."""
    top_k = reference.model.layers[0].experts.top_k
    for row in (prompt + answer for prompt, answer in pairs):
        with torch.no_grad():
            logits = reference.network(torch.tensor([row]), output_router_logits=True).router_logits
        weights, chosen = torch.stack(list(logits), 1).softmax(-1).topk(top_k)
        yield chosen.numpy(), (weights / weights.sum(-1, keepdim=True)).numpy()


def test_counts_are_those_of_the_router_logits(reference, pairs, statistics):
    layers, experts = 4, 5
    popularity = np.zeros((layers, experts), np.uint32)
    transitions = np.zeros((layers - 1, experts, experts), np.uint32)
    paths: dict[tuple[int, int, int], dict[int, int]] = {}
    largest, lower = [], []
    for chosen, weights in router_choices(reference, pairs):
        largest.append(weights.max(-1))
        lower.append(weights.min(-1) / weights.sum(-1))
        for token in chosen.tolist():
            for layer, current in enumerate(token):
                for expert in current:
                    popularity[layer, expert] += 1
                    for before in token[layer - 1] if layer else ():
                        transitions[layer - 1, before, expert] += 1
                    for a in token[layer - 2] if layer > 1 else ():
                        for b in token[layer - 1]:
                            successors = paths.setdefault((layer, a, b), {})
                            successors[expert] = successors.get(expert, 0) + 1
    np.testing.assert_array_equal(statistics.popularity, popularity)
    np.testing.assert_array_equal(statistics.transitions, transitions)
    assert [tuple(key) for key in statistics.path_keys.tolist()] == sorted(paths)
    for at, key in enumerate(sorted(paths)):
        span = slice(statistics.path_offsets[at], statistics.path_offsets[at + 1])
        found = dict(zip(statistics.path_experts[span].tolist(), statistics.path_counts[span].tolist(), strict=True))
        assert list(found) == sorted(found) and found == paths[key]
    expected = np.quantile(np.concatenate(largest), [0, 0.5, 1], axis=0).T
    np.testing.assert_allclose(statistics.router_quantiles[:, [0, 50, 100]], expected, rtol=1e-5)
    np.testing.assert_allclose(statistics.lower_half, np.concatenate(lower).mean(0), rtol=1e-5)  # the second of two
    assert statistics.num_tokens == sum(len(p) + len(a) for p, a in pairs) == popularity[0].sum() // 2
    Tables.of(statistics).check(reference.model)


def test_equal_input_gives_equal_statistics(lowering, pairs, statistics):
    again = calibrate(lowering, pairs)
    for field in fields(ActivationStatistics):
        ours, theirs = getattr(statistics, field.name), getattr(again, field.name)
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
        else:
            assert ours == theirs, field.name


def test_experts_without_tokens_are_listed(lowering):
    few = calibrate(lowering, [([5], [6])])
    unseen = [ExpertKey(*map(int, at)) for at in np.argwhere(few.popularity == 0)]
    assert unseen and list(few.unseen_experts) == unseen


def test_texts_are_chosen_by_seed_and_cut_at_the_context(lowering, pairs):
    sizes = [len(p) + len(a) for p, a in pairs]
    chosen = {calibrate(lowering, pairs, seed, max_tokens=20).texts_sha256 for seed in range(6)}
    assert len(chosen) > 1
    assert min(sizes) <= calibrate(lowering, pairs, 1, max_tokens=20).num_tokens <= 60
    assert calibrate(lowering, [([5] * 500, [])]).num_tokens == lowering.model.max_positions
    with pytest.raises(DataError, match="no text"):
        calibrate(lowering, [([], [])])


ROUTES = st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(1, 2), st.integers(0, 2**32 - 1))


@given(ROUTES)
def test_counts_add_up(shape):
    tokens, layers, top_k, seed = shape
    rng = np.random.default_rng(seed)
    routes = rng.random((tokens, layers, 4)).argsort(axis=2)[:, :, :top_k]
    popularity, transitions, paths = count_popularity(routes, 4), count_transitions(routes, 4), count_paths(routes, 4)
    assert popularity.shape == (layers, 4) and transitions.shape == (layers - 1, 4, 4)
    np.testing.assert_array_equal(popularity.sum(1), np.full(layers, tokens * top_k))
    np.testing.assert_array_equal(transitions.sum(2), popularity[:-1] * top_k)
    np.testing.assert_array_equal(transitions.sum(1), popularity[1:] * top_k)
    assert paths.counts.sum() == tokens * max(0, layers - 2) * top_k**3
    assert paths.offsets[-1] == len(paths.experts) == len(paths.counts) and (np.diff(paths.offsets) > 0).all()
    again = count_paths(routes[::-1, :, ::-1], 4)
    for name in ("keys", "offsets", "experts", "counts"):
        np.testing.assert_array_equal(getattr(again, name), getattr(paths, name))


def test_paths_that_repeat_are_predicted_and_chance_is_not():
    cycle = np.array([[(i + step) % 8 for step in range(4)] for i in range(8)])[:, :, None]
    certain = report_paths(np.repeat(cycle, 20, axis=0), cycle, 8)
    assert certain.accuracy_pairs == certain.accuracy_sets == certain.accuracy_previous == 1.0
    assert certain.accuracy_popularity == pytest.approx(1 / 8)
    assert certain.observed_paths == 8 and certain.frequent_paths == pytest.approx(2 / 8)
    rng = np.random.default_rng(0)
    random = rng.random((4000, 3, 8)).argsort(axis=2)[:, :, :2]
    chance = report_paths(random[:3000], random[3000:], 8)
    assert 0.2 < chance.accuracy_pairs < 0.3 and 0.2 < chance.accuracy_sets < 0.3


@pytest.mark.parametrize(("layers", "held_out"), [(2, 6), (1, 6), (3, 0), (0, 0)])
def test_what_is_not_predicted_has_no_accuracy(layers: int, held_out: int):
    routes = np.zeros((6, layers, 1), np.int64)
    values = report_paths(routes, routes[:held_out], 4).to_json()
    assert not [name for name in values if name.startswith("accuracy")]
    assert ("frequent_windows" in values) == (layers > 2) and values["observed_paths"] <= 1


def test_rare_pairs_back_off_to_the_layer_before_and_then_to_popularity():
    # Expert 3 follows expert 1 of layer 1. Exception: after expert 0 of layer 0 it is expert 2.
    routes = np.array([[[0], [1], [2]]] * 8 + [[[4], [1], [3]]] * 20 + [[[5], [6], [7]]] * 30)
    assert report_paths(routes, np.array([[[0], [1], [2]]]), 8).accuracy_pairs == 1.0
    assert report_paths(routes[1:], np.array([[[0], [1], [3]]]), 8).accuracy_pairs == 1.0  # seven are too few
    unseen = report_paths(routes, np.array([[[0], [5], [7]]]), 8)
    assert unseen.accuracy_pairs == unseen.accuracy_sets == unseen.accuracy_popularity == 1.0


def test_the_frequent_share_counts_observed_paths():
    paths = np.array([[[0, 1]]] * 7 + [[[1, 2]], [[2, 1]], [[3, 4]], [[5, 6]], [[0, 6]]])
    assert frequent_share(paths) == (7 / 12, 5)
    assert frequent_share(paths[:0]) == (0.0, 0)


def test_unimportance_is_the_weight_of_the_experts_before() -> None:
    """With weights 0.5, 0.3 and 0.2, the second expert has 0.5 and the third 0.8. The order of the experts is free."""
    counts = weight_summary(torch.tensor([[0.3, 0.5, 0.2], [0.2, 0.5, 0.3], [2.0, 1.0, 1.0]]))[1]
    assert counts.sum() == 6 and counts[int(0.5 * UNIMPORTANCE_BINS)] == 3
    assert counts[int(0.8 * UNIMPORTANCE_BINS) - 1 : int(0.8 * UNIMPORTANCE_BINS) + 1].sum() == 2
    assert counts[int(0.75 * UNIMPORTANCE_BINS)] == 1
    deciles = unimportance_deciles(np.stack([counts, np.zeros_like(counts)]))
    assert deciles == pytest.approx([0.5] * 5 + [0.75] + [0.8] * 3, abs=1.5 / UNIMPORTANCE_BINS)
    assert weight_summary(torch.ones(3, 1))[1].sum() == 0 and unimportance_deciles(counts[None] * 0) == []


def test_unimportance_is_counted_of_every_token(statistics):
    """One of two experts is not the best. If weights sum to 1, its unimportance is the largest weight."""
    assert (statistics.unimportance.sum(axis=1) == statistics.popularity.sum(axis=1) // 2).all()
    found = np.repeat((np.arange(UNIMPORTANCE_BINS) + 0.5) / UNIMPORTANCE_BINS, statistics.unimportance[0])
    expected = statistics.router_quantiles[0]
    assert np.quantile(found, np.linspace(0, 1, len(expected))) == pytest.approx(expected, abs=1 / UNIMPORTANCE_BINS)
