"""Gradients one layer at a time: what the whole model predicts, for every family, and a killed run that goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import Lowering, lower
from moec.compiler.quantization.quantized import LEFT_OUT
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.sensitivity.fisher import FisherProxy
from moec.compiler.sensitivity.sensitivity import SensitivityTable, plain_plan
from moec.compiler.walker import gradients
from moec.compiler.walker.gradients import LayerGradients, with_gradients
from moec.compiler.walker.memory import gradients_bytes
from moec.compiler.walker.store import StreamedStore
from moec.compiler.walker.sweep import AnswerTexts, Sweep, SweepInputs
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.manifests.quant import QuantSpec
from tests.compiler.sensitivity.test_fisher import FAMILIES, pairs, silent
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

SPECS = (QuantSpec(2, 32), QuantSpec(4, 64))
ASKED = (*SPECS, LEFT_OUT)
Model = tuple[Path, Lowering, StreamedStore]


def quantized(folder: Path, work: Path) -> Model:
    """A model and its units in every format on disk, as a sweep leaves them."""
    lowering = lower(open_checkpoint(str(folder)))
    dense = plain_plan(lowering.model, lowering.spec_16bit, "rtn").dense
    texts = [[5, 6, 200, 7], [1, 2, 3]]
    inputs = SweepInputs(texts, AnswerTexts(texts, [2, 1], []), {}, SPECS, dense, "rtn", 0)
    return folder, lowering, Sweep(lowering, inputs, Journal(work, "sweep", Disk()), 2).run(silent).store


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("gradients")
    if request.param == "mixtral":
        return quantized(save_tiny_mixtral(root / "tiny", TinyMixtral(width=64)), root / "s.work")
    return quantized(save_tiny_family(root / "tiny", TINY_FAMILIES[request.param]), root / "s.work")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("gradients")
    return quantized(save_tiny_mixtral(root / "tiny", TinyMixtral(width=64, layers=3)), root / "s.work")


def predicted(model: Model, work: Path, threads: int = 2) -> np.ndarray:
    _, lowering, store = model
    return LayerGradients(lowering, store, ASKED, Journal(work, "x", Disk()), threads).run(pairs(24), 0, silent)


def test_predictions_are_those_of_the_whole_model(model: Model, tmp_path: Path) -> None:
    folder, _, store = model
    whole = FisherProxy(ReferenceModel(folder), store, ASKED).run(pairs(24), 0, 2, silent)
    found = predicted(model, tmp_path / "g.work")
    known = ~np.isnan(found)
    assert not np.isnan(whole[known]).any(), "a format that does not fit, or leaves a projection out"
    assert known[:, 0].any() and known[:, -1].any()
    unknown = np.isnan(found) & ~np.isnan(whole)
    assert (whole[unknown & (np.arange(len(ASKED)) < len(SPECS))] == 0).all(), "experts that no token asked for"
    assert known.any() and whole[known].max() > 0
    assert np.allclose(found[known], whole[known], rtol=2e-3, atol=1e-5 * whole[known].max())


def test_the_same_bits_for_any_number_of_threads(mixtral: Model, tmp_path: Path) -> None:
    one, three = (predicted(mixtral, tmp_path / f"{threads}.work", threads) for threads in (1, 3))
    assert np.array_equal(one, three, equal_nan=True)


class _Killed(Exception):
    """The error that ends a killed run in these tests."""


@pytest.mark.parametrize("stage", ["before-1", "before-3", "upstream-2", "gradients-2", "upstream-0", "gradients-0"])
def test_a_killed_run_goes_on(stage: str, mixtral: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed as soon as a stage is written, then run again: the same numbers, and finished layers are not passed."""
    expected = predicted(mixtral, tmp_path / "alone.work")

    class Killing(Disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name.startswith(f"{stage}-"):
                raise _Killed

    _, lowering, store = mixtral
    work = tmp_path / "killed.work"
    with pytest.raises(_Killed):
        LayerGradients(lowering, store, ASKED, Journal(work, "x", Killing()), 1).run(pairs(24), 0, silent)
    passed: list[int] = []
    load = gradients.LayerSlot.load
    monkeypatch.setattr(
        gradients.LayerSlot, "load", lambda self, layer, *rest: (passed.append(layer), load(self, layer, *rest))[1]
    )
    found = LayerGradients(lowering, store, ASKED, Journal(work, "x", Disk()), 1).run(pairs(24), 0, silent)
    assert np.array_equal(found, expected, equal_nan=True)
    back = [2, 1, 0]
    resumed = {"before-1": [1, 2, *back], "gradients-2": [1, 0], "upstream-0": [0], "gradients-0": []}
    assert passed == resumed.get(stage, back)


def test_a_damaged_stream_is_made_again(mixtral: Model, tmp_path: Path) -> None:
    expected, work = predicted(mixtral, tmp_path / "alone.work"), tmp_path / "damaged.work"

    class Ending(Journal):
        def put(self, stage: str, data: bytes) -> None:
            raise _Killed  # when all streams are there and the first layer's gradients are done

    _, lowering, store = mixtral
    with pytest.raises(_Killed):
        LayerGradients(lowering, store, ASKED, Ending(work, "x", Disk()), 1).run(pairs(24), 0, silent)
    (stream,) = work.glob("before-2-*")
    raw = bytearray(stream.read_bytes())
    raw[100] ^= 1
    stream.write_bytes(raw)
    assert np.array_equal(predicted(mixtral, work), expected, equal_nan=True)


def test_prices_by_gradients_are_on_the_scale_of_what_was_measured(mixtral: Model) -> None:
    _, lowering, store = mixtral
    count, units = store.model.num_layers, plain_plan(store.model, lowering.spec_16bit, "rtn").units
    table = SensitivityTable(np.full((count, 3), 2.0), {}, np.ones((count, store.model.layers[0].experts.count)))
    predicted = {(unit, spec): float(at + 1) for at, unit in enumerate(units) for spec in ASKED}
    found = with_gradients(table, store, predicted)
    probe = SPECS[1]  # as near to 3 bits as 2 are, and of 64 columns
    assert sum(found.unit_loss(store, unit, probe) for unit in units) == pytest.approx(
        sum(table.unit_loss(store, unit, probe) for unit in units)
    )
    first, *_, last = units
    unknown = {key: kl for key, kl in predicted.items() if key[0] != last}
    kept = with_gradients(table, store, unknown)
    assert kept.unit_loss(store, last, probe) == table.unit_loss(store, last, probe), (
        "no gradients, the price of errors"
    )
    assert kept.predicted is not None and (last, LEFT_OUT) not in kept.predicted
    assert found.unit_loss(store, last, LEFT_OUT) == pytest.approx(len(units) * found.unit_loss(store, first, LEFT_OUT))


def test_texts_are_taken_as_far_as_they_are_held(
    mixtral: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lowering, store = mixtral

    def run(count: int, name: str) -> np.ndarray:
        work = Journal(tmp_path / name, "x", Disk())
        return LayerGradients(lowering, store, ASKED, work, 1).run(pairs(count), 0, silent)

    alone = run(3, "three.work")
    monkeypatch.setattr(gradients, "GRADIENT_TOKENS", sum(len(a) + len(b) for a, b in pairs(3)) + 3)
    assert np.array_equal(run(24, "room.work"), alone, equal_nan=True)


def test_memory_grows_with_one_layer(mixtral: Model) -> None:

    shape = mixtral[1].model
    deep = replace(shape, layers=shape.layers * 4)
    assert gradients_bytes(deep, 0, SPECS, 2) == gradients_bytes(shape, 0, SPECS, 2)
    wide = replace(shape, hidden_size=8 * shape.hidden_size)
    assert gradients_bytes(wide, 0, SPECS, 2) > gradients_bytes(shape, 99, SPECS, 2)
