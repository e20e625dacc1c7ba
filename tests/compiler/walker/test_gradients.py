"""Gradients one layer at a time: what the whole model predicts and measures, and a killed run that goes on."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moec.compiler.families import Lowering
from moec.compiler.quantization.quantized import LEFT_OUT
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.reference.expert_module import SeparateExperts, projection_of
from moec.compiler.request.plan import plain_plan
from moec.compiler.sensitivity import gradients
from moec.compiler.sensitivity.fisher import predictions, ranks_well, sketch
from moec.compiler.sensitivity.gradients import LayerGradients
from moec.compiler.sensitivity.sensitivity import SensitivityTable, with_gradients
from moec.compiler.sensitivity.unit_prices import LEAST_TOKENS
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.memory import gradients_bytes
from moec.compiler.walker.output_head import OutputHead
from moec.compiler.walker.texts import SKETCHES, TOKENS_PER_BACKWARD, AnswerTexts, TokenTexts, text_batches
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.engine import no_progress
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.lowered import lowered, save_family, scored
from tests.compiler.walker.whole_model import answers_of, kl_from, scored_logits
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.transformers_oracle import TransformersOracle

SPECS = (QuantSpec(3, 32), QuantSpec(4, 64))
PRICED = (*SPECS, LEFT_OUT)
DECODERS = (
    "mixtral", "qwen2-plain-between", "qwen3-plain-first", "deepseek-v2-groups-yarn", "deepseek-v3", "ernie",
    "granite-scaled", "gpt-oss", "phimoe",
)  # fmt: skip
FAMILIES = (*DECODERS, "switch", "switch-capacity")
ENCODERS = (
    "switch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("switch-capacity", "switch-all-routed-half"))
)  # fmt: skip
MEASURED_UNITS = 12
"""Of the last layer, and of those before it."""
AT_ONCE = 48
"""Texts that the whole model computes at once."""
Model = tuple[Path, Lowering, UnitStore]


def texts_for(lowering: Lowering, count: int = 48) -> AnswerTexts:
    """Made-up prompts and answers of several lengths."""
    random = np.random.default_rng(7)

    def tokens(size: int) -> list[int]:
        return list(map(int, random.integers(4, 250, size)))

    if lowering.model.encoder is not None:
        return scored(lowering.model, [(tokens(3 + at % 5), tokens(6 + at % 7)) for at in range(count)])
    prompts = [tokens(3 + at % 5) for at in range(count)]
    answers = [tokens(6 + at % 7) for at in range(count)]
    counts = [len(answer) for answer in answers]
    return answers_of(TokenTexts([(p + a)[:-1] for p, a in zip(prompts, answers, strict=True)]), counts)


def opened(folder: Path) -> Model:
    lowering = lowered(folder)
    return folder, lowering, UnitStore(lowering, "rtn")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("gradients") / "tiny"
    if request.param == "mixtral":
        return opened(save_tiny_mixtral(root, TinyMixtral(width=64)))
    return opened(save_family(request.param, root))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return opened(save_tiny_mixtral(tmp_path_factory.mktemp("gradients") / "tiny", TinyMixtral(width=64, layers=3)))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Four layers of an encoder, four of a decoder."""
    return opened(save_family("switch", tmp_path_factory.mktemp("gradients") / "tiny"))


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Model:
    """The model of the fixture `mixtral` or `encoder`."""
    found: Model = request.getfixturevalue(request.param)
    return found


EITHER = pytest.mark.parametrize("small", ["mixtral", "encoder"], indirect=True)


def run(model: Model, journal: Journal, threads: int = 2, count: int = 48, seed: int = 0) -> np.ndarray:
    _, lowering, store = model
    passes = LayerGradients(LoadedLayer(lowering), store, texts_for(lowering, count), PRICED, journal)
    return passes.run(seed, threads, no_progress)


def predicted(model: Model, work: Path, threads: int = 2, count: int = 48) -> np.ndarray:
    return run(model, Journal(work, "x", Disk()), threads, count)


def own_projection(experts: SeparateExperts, expert: int, projection: str) -> torch.Tensor:
    """As SeparateExperts.projection, with gradients."""
    layer = {"up": "wi", "down": "wo"}[projection]
    return experts.get_parameter(f"expert_{expert}.{layer}.weight")


def directional(model: Model, units: list[UnitKey], count: int) -> np.ndarray:
    """The predictions of a few units, [units, 1 format], from gradients at their weights in the whole model.

    Of each text and sketch v, the square of the derivative of v . logits in the direction of the rounding.
    """
    folder, lowering, store = model
    reference, texts = TransformersOracle(folder), texts_for(lowering, count)
    totals = np.zeros(len(units))
    if lowering.model.encoder is None:
        reference.network.set_experts_implementation("eager")
    parameters = [parameter for module in reference.experts.values() for parameter in module.parameters()]
    twins = {layer: copy.deepcopy(module) for layer, module in reference.experts.items()}  # hold gradients as weights
    twins_parameters = [parameter for twin in twins.values() for parameter in twin.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    changes = {unit: store.weight(unit, SPECS[0]) - lowering.unit(unit).float() for unit in units}
    for batch in text_batches(texts.texts, TOKENS_PER_BACKWARD):
        rows = []
        for text in batch:
            row, prompt = texts.texts.rows[text], texts.texts.prompts[text] if texts.texts.prompts else ()
            rows.append(reference.logits(row, prompt)[len(row) - texts.counts[text] :])
        for number in range(SKETCHES):
            drawn = sketch(torch.cat(rows).detach(), np.random.default_rng([0, batch[0], number]))
            vectors = drawn.split([len(part) for part in rows])
            for logits, vector in zip(rows, vectors, strict=True):
                slopes = torch.autograd.grad((logits * vector).sum(), parameters, retain_graph=True, allow_unused=True)
                for parameter, slope in zip(twins_parameters, slopes, strict=True):
                    parameter.data = torch.zeros_like(parameter) if slope is None else slope
                totals += [
                    float((projection_of(twins[unit.layer], unit.expert, unit.projection) * change).sum()) ** 2
                    for unit, change in changes.items()
                ]
    return totals / (2 * SKETCHES * sum(texts.counts))


def chosen_units(lowering: Lowering, known: np.ndarray) -> list[int]:
    """Places of a few units of every layer that have a prediction."""
    units, found = lowering.model.unit_keys(), []
    for layer in lowering.model.expert_layers:
        own = [at for at, unit in enumerate(units) if unit.layer == layer and known[at]]
        found += own[:: max(1, len(own) // 4)]
    return found


def test_predictions_are_those_of_gradients_at_the_weights(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lowering, _ = model
    found = predicted(model, tmp_path / "g.work", count=24)[:, 0]
    places = chosen_units(lowering, ~np.isnan(found))
    with monkeypatch.context() as patched:
        patched.setattr(SeparateExperts, "projection", own_projection)
        expected = directional(model, [lowering.model.unit_keys()[at] for at in places], 24)
    assert len(places) >= 4 and expected.max() > 0
    assert found[places] == pytest.approx(expected, rel=5e-3, abs=1e-5 * expected.max())


@pytest.mark.parametrize("model", DECODERS, indirect=True)
def test_predictions_are_what_is_measured(model: Model, tmp_path: Path) -> None:
    folder, lowering, store = model
    texts, units = texts_for(lowering), lowering.model.unit_keys()
    found = predicted(model, tmp_path / "g.work")[:, 0]
    reference = TransformersOracle(folder)
    own = scored_logits(reference, texts, AT_ONCE)
    layers, last = np.array([unit.layer for unit in units]), lowering.model.expert_layers[-1]

    def ratios(places: np.ndarray) -> np.ndarray:
        """Predicted over measured KL of some of these units."""
        measured = []
        for at in places[:: max(1, len(places) // MEASURED_UNITS)]:
            with reference.weights({units[at]: store.weight(units[at], SPECS[0])}):
                kl = kl_from(own, scored_logits(reference, texts, AT_ONCE))
            measured += [found[at] / kl] if kl else []
        return np.array(measured)

    known = np.isfinite(found)
    # After the last layer no router can choose otherwise. The effect of later routers is not predicted.
    after = ratios(np.flatnonzero(known & (layers == last)))
    assert 0.75 < np.median(after) < 1.33
    assert np.abs(np.log(after)).mean() < 0.45
    if (known & (layers < last)).any():
        before = np.median(ratios(np.flatnonzero(known & (layers < last))))
        assert 0.3 < before < 1.2 if ranks_well(lowering.model) else 0.1 < before < 0.4


class Nudged(UnitStore):
    """Units that are moved by 4 % of what rounding moves them, which sends few tokens to other experts."""

    def weight(self, unit: UnitKey, spec: QuantSpec) -> torch.Tensor:
        own = self.lowering.unit(unit).float()
        return own + 0.04 * (super().weight(unit, spec) - own)


@pytest.mark.oracle
@pytest.mark.parametrize("model", ENCODERS, indirect=True)
def test_predictions_of_an_encoder_are_what_is_measured(model: Model, tmp_path: Path) -> None:
    folder, lowering, rounding = model
    reference, texts = TransformersOracle(folder), texts_for(lowering)
    own = scored_logits(reference, texts, AT_ONCE)

    def ratios(store: UnitStore) -> dict[int, np.ndarray]:
        """Predicted over measured KL of the units of each layer."""
        prices = predicted((folder, lowering, store), tmp_path / f"{type(store).__name__}.work")[:, 0]
        found = {layer: list[float]() for layer in lowering.model.expert_layers}
        for unit, price in zip(lowering.model.unit_keys(), prices.tolist(), strict=True):
            with reference.weights({unit: store.weight(unit, SPECS[0])}):
                found[unit.layer].append(price / kl_from(own, scored_logits(reference, texts, AT_ONCE)))
        return {layer: np.array(values) for layer, values in found.items()}

    *earlier, last = lowering.model.expert_layers
    for layer, values in ratios(Nudged(lowering, "rtn")).items():
        # Where a token goes to another expert after all, the KL is many times what is predicted.
        followed = values[values > 0.3]
        assert len(followed) >= 4 and 0.7 < np.median(followed) < 1.5, layer
    rounded = ratios(rounding)
    # After the last layer no router can choose otherwise. What its choice costs before is not predicted.
    assert 0.75 < np.median(rounded[last]) < 1.33 and np.abs(np.log(rounded[last])).mean() < 0.45
    assert all(0.2 < np.median(rounded[layer]) < 1.2 for layer in earlier)


@EITHER
def test_the_same_bits_for_any_number_of_threads(small: Model, tmp_path: Path) -> None:
    one, three = (predicted(small, tmp_path / f"{threads}.work", threads) for threads in (1, 3))
    assert np.array_equal(one, three, equal_nan=True)
    other = run(small, Journal(tmp_path / "seed.work", "x", Disk()), seed=3)
    assert not np.array_equal(one, other, equal_nan=True)


def test_logits_of_a_part_of_the_tokens_are_held(
    mixtral: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large vocabulary bounds the tokens whose logits are held at once. It changes no random vector."""
    whole = predicted(mixtral, tmp_path / "whole.work")
    held, logits = list[int](), OutputHead.logits

    def counted(head: OutputHead, states: torch.Tensor) -> torch.Tensor:
        held.append(len(states))
        return logits(head, states)

    monkeypatch.setattr("moec.compiler.walker.output_head.LOGITS_PER_CHUNK", 3 * mixtral[1].model.vocab_size)
    monkeypatch.setattr(OutputHead, "logits", counted)
    parts = predicted(mixtral, tmp_path / "parts.work")
    assert max(held) == 3 and sum(held) == sum(texts_for(mixtral[1]).counts)
    assert np.allclose(parts, whole, rtol=1e-4, equal_nan=True)


def test_formats_that_do_not_fit_have_no_price(tmp_path: Path) -> None:
    model = opened(save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(width=96)))
    found = predictions(predicted(model, tmp_path / "g.work"), model[1].model, PRICED)
    by_projection = {name: {spec for unit, spec in found if unit.projection == name} for name in PROJECTIONS}
    assert by_projection == {"gate": set(SPECS), "up": set(SPECS), "down": {SPECS[0], LEFT_OUT}}
    few = predictions(predicted(model, tmp_path / "few.work", count=2), model[1].model, PRICED)
    assert sum(texts_for(model[1], 2).counts) < LEAST_TOKENS and LEFT_OUT not in {spec for _, spec in few}


class _Killed(Exception):
    """What a killed run ends with here."""


def _killed_at(stage: str) -> Disk:
    class Killing(Disk):
        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            if target.name.startswith(f"{stage}-"):
                raise _Killed

    return Killing()


BACK = [7, 6, 5, 4, 3, 2, 1, 0]
RESUMED = {
    "mixtral": {
        "before-1": [1, 2, 2, 1, 0], "before-3": [2, 1, 0], "upstream-2": [2, 1, 0], "gradients-2": [1, 0],
        "upstream-0": [0], "gradients-0": [],
    },
    "encoder": {
        "before-2": [2, 3, 4, 5, 6, 7, *BACK], "encoded": [3, 4, 5, 6, 7, *BACK], "before-4": [4, 5, 6, 7, *BACK],
        "before-6": [6, 7, *BACK], "gradients-6": BACK[2:], "upstream-4": BACK[3:], "gradients-4": BACK[4:],
        "gradients-2": BACK[6:],
    },
}  # fmt: skip
"""Layers that a run passes which continues after the stage."""


@pytest.mark.gate("G5")
@pytest.mark.parametrize(
    ("small", "stage", "remaining"),
    [(name, stage, layers) for name, stages in RESUMED.items() for stage, layers in stages.items()],
    indirect=["small"],
)
def test_a_killed_run_goes_on(
    small: Model, stage: str, remaining: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as soon as a stage is written, then run again: the same numbers, and finished layers are not passed."""
    expected = predicted(small, tmp_path / "alone.work", count=12)
    work = tmp_path / "killed.work"
    with pytest.raises(_Killed):
        run(small, Journal(work, "x", _killed_at(stage)), threads=1, count=12)
    passed: list[int] = []
    load = LoadedLayer.load

    def loaded(slot: LoadedLayer, layer: int, *rest: Any) -> None:
        passed.append(layer)
        load(slot, layer, *rest)

    monkeypatch.setattr(gradients.LoadedLayer, "load", loaded)
    found = run(small, Journal(work, "x", Disk()), threads=1, count=12)
    assert np.array_equal(found, expected, equal_nan=True)
    assert passed == remaining


def test_a_damaged_stream_is_made_again(mixtral: Model, tmp_path: Path) -> None:
    expected, work = predicted(mixtral, tmp_path / "alone.work"), tmp_path / "damaged.work"

    class Ending(Journal):
        def put(self, stage: str, data: bytes) -> None:
            raise _Killed  # when all streams are there and the first layer's gradients are done

    with pytest.raises(_Killed):
        run(mixtral, Ending(work, "x", Disk()))
    (stream,) = work.glob("before-2-*")
    raw = bytearray(stream.read_bytes())
    raw[100] ^= 1
    stream.write_bytes(raw)
    assert np.array_equal(predicted(mixtral, work), expected, equal_nan=True)


@EITHER
def test_nothing_of_the_layers_is_changed(small: Model, tmp_path: Path) -> None:
    _, lowering, store = small
    slot = LoadedLayer(lowering)
    network = slot.single.model
    before = network.get_experts_implementation()
    journal = Journal(tmp_path / "g.work", "x", Disk())
    LayerGradients(slot, store, texts_for(lowering, 4), PRICED, journal).run(0, 2, no_progress)
    assert network.get_experts_implementation() == before
    assert not any(module._forward_hooks for module in network.modules())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert torch.is_grad_enabled()


def test_prices_by_gradients_are_on_the_scale_of_what_was_measured(mixtral: Model) -> None:
    _, lowering, store = mixtral
    count, units = store.model.num_layers, plain_plan(store.model, lowering.spec_16bit, "rtn").units
    table = SensitivityTable(np.full((count, 3), 2.0), {}, np.ones((count, store.model.layers[0].experts.count)))
    predicted = {(unit, spec): float(at + 1) for at, unit in enumerate(units) for spec in PRICED}
    found = with_gradients(table, store, SPECS, predicted)
    probe = SPECS[0]  # the format nearest to 3 bits
    assert sum(found.unit_loss(store, unit, probe) for unit in units) == pytest.approx(
        sum(table.unit_loss(store, unit, probe) for unit in units)
    )
    first, *_, last = units
    unknown = {key: kl for key, kl in predicted.items() if key[0] != last}
    kept = with_gradients(table, store, SPECS, unknown)
    assert kept.unit_loss(store, last, probe) == table.unit_loss(store, last, probe), (
        "no gradients, the price of errors"
    )
    assert kept.predicted is not None and (last, LEFT_OUT) not in kept.predicted
    assert found.unit_loss(store, last, LEFT_OUT) == pytest.approx(len(units) * found.unit_loss(store, first, LEFT_OUT))


def test_memory_grows_with_one_layer(mixtral: Model) -> None:
    shape = mixtral[1].model
    deep = replace(shape, layers=shape.layers * 4)
    assert gradients_bytes(deep, 900, 0, SPECS, 2) == gradients_bytes(shape, 900, 0, SPECS, 2)
    large = replace(shape, vocab_size=150_000)
    assert gradients_bytes(large, 900, 0, SPECS, 2) - gradients_bytes(shape, 900, 0, SPECS, 2) < 384 << 20
    wide = replace(shape, hidden_size=8 * shape.hidden_size)
    assert gradients_bytes(wide, 900, 0, SPECS, 2) > gradients_bytes(shape, 900, 99, SPECS, 2)
