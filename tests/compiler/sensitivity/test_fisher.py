"""The Fisher proxy: what it predicts is what is measured, on every family, for any number of threads, with no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moec.compiler.calibration.collect import calibrate
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.sensitivity import fisher
from moec.compiler.sensitivity.fisher import FisherProxy, gradient_bytes, in_turns, predict_units, ranks_well, shortened
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.divergence import log_softmax, summarise_divergence
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.search.toy_search import toy_model
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

SPECS = (QuantSpec(3, 32), QuantSpec(4, 64), QuantSpec.parse("bf16"))
FAMILIES = (
    "mixtral", "qwen2-plain-between", "qwen3-plain-first", "deepseek-v2-groups-yarn", "deepseek-v3", "ernie",
    "granite-scaled", "gpt-oss", "phimoe",
)  # fmt: skip
MEASURED_UNITS = 12
"""Number of units of the last layer, and of the layers before it."""


def pairs(count: int = 48) -> list[tuple[list[int], list[int]]]:
    """Token ids of made-up prompts and answers, of several lengths."""
    random = np.random.default_rng(7)
    return [
        (random.integers(4, 250, 3 + at % 5).tolist(), random.integers(4, 250, 6 + at % 7).tolist())
        for at in range(count)
    ]


def silent(done: int, total: int) -> None:
    """Show no progress."""


def open_model(folder: Path) -> tuple[ReferenceModel, UnitStore]:
    return ReferenceModel(folder), UnitStore(lower(open_checkpoint(str(folder))), None, "rtn")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ReferenceModel, UnitStore]:
    root = tmp_path_factory.mktemp("fisher") / "tiny"
    if request.param == "mixtral":
        return open_model(save_tiny_mixtral(root, TinyMixtral(width=64)))
    return open_model(save_tiny_family(root, TINY_FAMILIES[request.param]))


def test_predictions_are_what_is_measured(model: tuple[ReferenceModel, UnitStore]) -> None:
    reference, store = model
    texts = pairs()
    predicted = FisherProxy(reference, store, SPECS).run(texts, seed=0, threads=2, progress=silent)
    units = [UnitKey(*key, p) for key in store.model.expert_keys() for p in PROJECTIONS]
    assert predicted.shape == (len(units), 2)
    before = [log_softmax(rows) for rows in reference.forced_logits(texts)]
    layers, last = np.array([unit.layer for unit in units]), store.model.expert_layers[-1]

    def ratios(places: np.ndarray) -> np.ndarray:
        """Predicted over measured KL of some of these units, those that no token reads left out."""
        found = []
        for at in places[:: max(1, len(places) // MEASURED_UNITS)]:
            with reference.weights({units[at]: store.weight(units[at], SPECS[0])}):
                measured = summarise_divergence(before, reference.forced_logits(texts)).mean
            assert (predicted[at, 0] == 0) == (measured == 0)
            found += [predicted[at, 0] / measured] if measured else []
        return np.array(found)

    fits = np.isfinite(predicted[:, 0])
    # No router follows the last layer. Before it, the cost of other routing is not predicted.
    last_ratios = ratios(np.flatnonzero(fits & (layers == last)))
    assert 0.75 < np.median(last_ratios) < 1.33
    assert np.abs(np.log(last_ratios)).mean() < 0.45
    if (fits & (layers < last)).any():
        front = np.median(ratios(np.flatnonzero(fits & (layers < last))))
        assert 0.3 < front < 1.2 if ranks_well(store.model) else 0.1 < front < 0.4


def test_where_weights_of_a_router_jump_measured_gains_rank_better(tmp_path: Path) -> None:
    """Compare the rank correlations by which `auto` decides. The reference is the cost of each unit alone."""
    folder = save_tiny_family(tmp_path / "tiny", TINY_FAMILIES["phimoe"])
    reference, texts, spec = ReferenceModel(folder), pairs(), SPECS[0]
    store = UnitStore(lower(open_checkpoint(str(folder))), calibrate(reference, texts).second_moments, "rtn")
    assert not ranks_well(store.model)
    units = [UnitKey(*key, p) for key in store.model.expert_keys() for p in PROJECTIONS]
    before = [log_softmax(rows) for rows in reference.forced_logits(texts)]

    def measured(*changed: UnitKey) -> float:
        with reference.weights({unit: store.weight(unit, spec) for unit in changed}):
            return float(summarise_divergence(before, reference.forced_logits(texts)).mean)

    gains = {}
    for layer in store.model.expert_layers:
        for projection in PROJECTIONS:
            own = [unit for unit in units if (unit.layer, unit.projection) == (layer, projection)]
            gains[layer, projection] = measured(*own) / sum(store.error(unit, spec) for unit in own)
    by_gain = np.array([gains[unit.layer, unit.projection] * store.error(unit, spec) for unit in units])
    by_gradient = FisherProxy(reference, store, (spec,)).run(texts, seed=0, threads=2, progress=silent)[:, 0]
    exact = np.array([measured(unit) for unit in units])
    ranks = [values.argsort().argsort() for values in (exact, by_gain, by_gradient)]
    _, with_gain, with_gradient = np.corrcoef(ranks)[0]
    assert with_gain > 0.95 > with_gradient > 0.85


def test_nothing_of_the_model_is_changed_and_threads_change_no_bit(tmp_path: Path) -> None:
    reference, store = open_model(save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(width=64)))
    texts, network = pairs(), reference.network.model
    logits, implementation = reference.forced_logits(texts), network.get_experts_implementation()
    proxy = FisherProxy(reference, store, SPECS)
    one, two = (proxy.run(texts, seed=3, threads=threads, progress=silent) for threads in (1, 2))
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, proxy.run(texts, seed=4, threads=2, progress=silent))
    assert network.get_experts_implementation() == implementation
    for before, after in zip(logits, reference.forced_logits(texts), strict=True):
        np.testing.assert_array_equal(before, after)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_what_does_not_fit_is_left_out_and_the_journal_is_asked_first(tmp_path: Path) -> None:
    reference, store = open_model(save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(width=96)))
    specs = (QuantSpec(2, 64), QuantSpec(2, 32), QuantSpec.parse("bf16"))
    journal = Journal(tmp_path / "tiny.work", "one", Disk())
    found = predict_units(reference, store, specs, [pairs(4), pairs(6)], 0, journal, silent)
    assert {spec for unit, spec in found if unit.projection == "down"} == {specs[1]}  # 96 columns are not groups of 64
    assert {spec for unit, spec in found if unit.projection == "gate"} == set(specs[:2])

    class Gone:
        model = reference.model

    assert predict_units(Gone(), store, specs, [pairs(4)], 0, journal, silent) == found  # type: ignore[arg-type]


def test_a_long_text_is_shortened_to_what_the_graph_is_counted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shortened(([1, 2, 3], [4, 5]), 9) == ([1, 2, 3], [4, 5])
    assert shortened(([1, 2, 3], [4, 5]), 3) == ([3], [4, 5])
    assert shortened(([1, 2, 3], [4, 5]), 1) == ([], [4])
    reference, store = open_model(save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(width=64)))
    monkeypatch.setattr(fisher, "TOKENS_PER_BACKWARD", 12)
    proxy, seen = FisherProxy(reference, store, (SPECS[0],)), list[int]()
    plain = type(reference.network).hidden_with_graph

    def counted(network: Any, rows: Any) -> Any:
        seen.extend(map(len, rows))
        return plain(network, rows)

    monkeypatch.setattr(type(reference.network), "hidden_with_graph", counted)
    texts = [([5] * 20, [6] * 4), ([], [7] * 500), ([5], [6])]
    assert np.isfinite(proxy.run(texts, 0, 1, silent)).all() and max(seen) == 12


def test_the_graph_counts_in_memory() -> None:
    small, deep = toy_model(), toy_model(layers=8)
    assert gradient_bytes(deep, 2) > 2 * gradient_bytes(small, 2) > 2 * gradient_bytes(small, 1) > 0
    assert torch.is_grad_enabled()


def test_texts_of_several_tasks_take_turns() -> None:
    one, two = ([([at], [task]) for at in range(300)] for task in (1, 2))
    found = in_turns([one, two[:2]])
    assert found[:5] == [one[0], two[0], one[1], two[1], one[2]]
    assert len(found) == fisher.TEXTS // 2 + 2
