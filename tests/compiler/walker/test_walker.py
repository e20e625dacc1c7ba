"""The layers one at a time: the same model, the same counts and measurements, and a killed sweep that goes on."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moec.compiler.calibration.layer_inputs import calibrate_layer
from moec.compiler.families import Lowering
from moec.compiler.quantization.quantized import LEFT_OUT
from moec.compiler.quantization.quantizers.gptq import quantize_gptq
from moec.compiler.quantization.swept_store import SweptStore
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.request.uniform import dense_spec
from moec.compiler.sensitivity.answer_walk import AnswerWalk, planned_weights
from moec.compiler.stages.encode_texts import CompileTexts
from moec.compiler.stages.sweep import Sweep, Swept
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.memory import sweep_bytes
from moec.compiler.walker.output_head import OutputHead
from moec.compiler.walker.texts import AnswerTexts, Embed, TextStates, TokenTexts
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.compiler.workspace.parallel import workers
from moec.evaluation.engine import no_progress
from moec.manifests.model import PROJECTIONS, ExpertKey, ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.lowered import lowered, save_family, walked_logits
from tests.compiler.walker.whole_model import answers_of, measured_kl, recorded, texts_of
from tests.manifests.examples import layer_spec, model_spec
from tests.tiny_families import CHOSEN
from tests.tiny_models import TinyMixtral, save_tiny_mixtral, save_tiny_olmoe, save_tiny_qwen3_moe
from tests.transformers_oracle import TransformersOracle

SPECS = (QuantSpec(3, 32), QuantSpec(4, 32))
TEXTS = [[5, 6, 200, 7, 90, 33, 8], [1, 2, 3], [250, 9, 8, 7, 6, 5, 4, 3, 2, 1], [17, 17, 40]]
ENCODERS = ("switch", "switch-capacity", "switch-all-routed-half")
SAVED = {"mixtral": save_tiny_mixtral, "olmoe": save_tiny_olmoe, "qwen3": save_tiny_qwen3_moe}
DECODERS = (*SAVED, *CHOSEN.values(), "qwen2-window-no-bias", "ernie-no-shared")
EVERY_FAMILY = pytest.mark.parametrize("folder", [*DECODERS, *ENCODERS], indirect=True)


@pytest.fixture(scope="module", params=["olmoe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of four experts, one of which few tokens reach; or another family."""
    name, root = request.param, tmp_path_factory.mktemp(request.param) / "tiny"
    if name in SAVED:
        return SAVED[name](root, TinyMixtral(layers=3, width=64, seed=7))
    return save_family(name, root)


@pytest.fixture(scope="module")
def lowering(folder: Path) -> Lowering:
    return lowered(folder)


def token_texts(lowering: Lowering) -> TokenTexts:
    return texts_of(TEXTS, lowering.model.encoder is not None)


def answer_texts(lowering: Lowering) -> AnswerTexts:
    texts = token_texts(lowering)
    return answers_of(TokenTexts(texts.rows[:2], texts.prompts[:2]), [2, 1])


def compile_texts_of(lowering: Lowering) -> CompileTexts:
    texts, answers = token_texts(lowering), answer_texts(lowering)
    held_out = answers_of(TokenTexts(texts.rows[2:], texts.prompts[2:]), [2, 1])
    return CompileTexts(texts, texts, answers, answers, {"text": held_out})


def sweep(
    lowering: Lowering, work: Path, quantizer: str = "gptq", threads: int = 2, resident_layers: int = 0
) -> tuple[Swept, SweptStore]:
    shapes, journal = lowering.model.dense_shapes(), Journal(work, "x", Disk())
    probe = {name: dense_spec(name, shape, 4, 32, lowering.float_type) for name, shape in shapes.items()}
    store = SweptStore(lowering, quantizer, SPECS, journal)
    swept = Sweep(LoadedLayer(lowering, resident_layers), store, journal, probe, 0)
    return swept.run(compile_texts_of(lowering), threads, no_progress), store


@pytest.fixture(scope="module")
def whole(lowering: Lowering, tmp_path_factory: pytest.TempPathFactory) -> tuple[Swept, SweptStore]:
    """One sweep that nothing stopped."""
    return sweep(lowering, tmp_path_factory.mktemp("whole") / "w.work")


def walk_of(lowering: Lowering, swept: Swept | None = None) -> AnswerWalk:
    states = None if swept is None else swept.answers
    return AnswerWalk(lambda: LoadedLayer(lowering), answer_texts(lowering), 2, no_progress, states)


def kl_of(walk: AnswerWalk, plan: CompilePlan, store: SweptStore) -> float:
    return float(walk.measure(planned_weights(plan, store)).kl.mean())


@EVERY_FAMILY
def test_layers_in_turn_compute_what_the_whole_model_does(folder: Path, lowering: Lowering) -> None:
    reference, texts = TransformersOracle(folder), token_texts(lowering)
    for at, found in enumerate(walked_logits(lowering, texts.rows, texts.prompts)):
        expected = reference.logits(texts.rows[at], texts.prompts[at] if texts.prompts else ())
        # Either is up to 1e-5 away from float64, so they may be twice as far apart.
        assert torch.allclose(found, expected, atol=3e-5 * max(1.0, float(expected.abs().max())))


def _following(model: ModelSpec, layer: int) -> int:
    """Return the next layer with experts in the same stack, or 0."""
    is_decoder = layer >= model.first_decoder_layer
    later = (at for at in model.expert_layers if at > layer and (at >= model.first_decoder_layer) == is_decoder)
    return next(later, 0)


@pytest.mark.oracle
@EVERY_FAMILY
def test_every_weight_is_exchanged_under_its_own_name(folder: Path, lowering: Lowering) -> None:
    """Another weight changes the layers and the whole model in the same way."""
    reference, slot, texts = TransformersOracle(folder), LoadedLayer(lowering), token_texts(lowering)
    row, prompts = texts.rows[2], texts.prompts[2:3]
    before = reference.batch_logits([row], prompts)[0]

    def check(weights: dict[Any, torch.Tensor]) -> None:
        with reference.weights(weights):
            expected = reference.batch_logits([row], prompts)[0]
        assert not torch.equal(expected, before), list(weights)
        if weights.keys().isdisjoint({"final_norm", "final_norm_bias", "encoder_norm", "lm_head_bias"}):
            (found,) = walked_logits(lowering, [row], prompts, weights, slot)
            assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max())), list(weights)

    for name in lowering.model.dense_shapes():
        own = lowering.dense_weight(name).float()
        assert torch.equal(reference.weight(name), own), name
        check({name: own * 1.5 + 0.01})  # a constant added to all biases does not change a softmax: stretched too
    for layer in lowering.model.expert_layers:
        for projection in PROJECTIONS:
            units = [unit for unit in lowering.model.units_of_layer(layer) if unit.projection == projection]
            assert all(torch.equal(reference.weight(unit), lowering.unit(unit).float()) for unit in units)
            if units:
                check({unit: lowering.unit(unit).float() * 2 for unit in units})
    assert torch.equal(reference.batch_logits([row], prompts)[0], before)


@pytest.mark.oracle
@EVERY_FAMILY
def test_the_sweep_counts_what_the_whole_model_routes(
    folder: Path, lowering: Lowering, whole: tuple[Swept, SweptStore]
) -> None:
    statistics, records = whole[0].statistics, recorded(TransformersOracle(folder), token_texts(lowering))
    assert statistics is not None
    for layer, record in records.items():
        count = lowering.model.layers[layer].experts.count
        counted = np.bincount(record.routes.ravel(), minlength=count)
        assert statistics.popularity[layer, :count].tolist() == counted.tolist()
        following = _following(lowering.model, layer)
        transitions = np.zeros(statistics.transitions.shape[1:], int)
        for before, after in zip(record.routes, records[following].routes if following else (), strict=following > 0):
            np.add.at(transitions, np.ix_(before, after), 1)
        if layer < len(statistics.transitions):
            assert np.array_equal(statistics.transitions[layer], transitions)
        assert statistics.unimportance[layer].sum() == record.routes.size - len(record.routes)
        largest = np.quantile(record.weights.max(axis=1), [0, 0.5, 1])
        assert statistics.router_quantiles[layer, [0, 50, 100]] == pytest.approx(largest, abs=1e-5)
    unseen = [ExpertKey(at, expert) for at, record in records.items() for expert in np.flatnonzero(record.tokens == 0)]
    assert list(statistics.unseen_experts) == sorted(unseen)


@EVERY_FAMILY
def test_second_moments_are_those_of_the_whole_model(folder: Path, lowering: Lowering) -> None:
    records, slot = recorded(TransformersOracle(folder), token_texts(lowering)), LoadedLayer(lowering)
    texts = TextStates.begin(token_texts(lowering), slot.embed)
    with workers(2) as pool:
        for layer in range(lowering.model.num_layers):
            slot.load(layer)
            if layer not in records:
                slot.run([texts], pool)
                continue
            inputs, counted = calibrate_layer(slot, texts, pool, has_moments=True)
            assert inputs.tokens.tolist() == counted["tokens"].tolist() == records[layer].tokens.tolist()
            for found, expected in (
                (inputs.input_moments, records[layer].input_moments),
                (inputs.middle_moments, records[layer].middle_moments),
            ):
                assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_units_are_quantized_against_these_moments(
    folder: Path, lowering: Lowering, whole: tuple[Swept, SweptStore]
) -> None:
    """The same codes as of each projection alone, up to a rounding that falls the other way."""
    records, store = recorded(TransformersOracle(folder), token_texts(lowering)), whole[1]
    same = total = 0
    for layer, record in records.items():
        for projection in PROJECTIONS:
            units = [unit for unit in lowering.model.units_of_layer(layer) if unit.projection == projection]
            moments = record.middle_moments if projection == "down" else record.input_moments
            for spec in SPECS:
                for unit in units:
                    seen = moments[unit.expert], int(record.tokens[unit.expert])
                    expected = quantize_gptq(lowering.unit(unit).float(), spec, *seen)
                    same += int((store.matrix(unit, spec).codes == expected.codes).sum())
                    total += expected.codes.numel()
                    assert store.error(unit, spec) >= 0
    assert same >= 0.99 * total


def test_more_bits_cost_less_and_every_layer_has_a_gain(lowering: Lowering, whole: tuple[Swept, SweptStore]) -> None:
    swept, store = whole
    for layer in range(lowering.model.num_layers):
        low, high = (sum(store.error(u, spec) for u in lowering.model.units_of_layer(layer)) for spec in SPECS)
        assert low > high > 0
    assert swept.sensitivity.gains.shape == (lowering.model.num_layers, len(PROJECTIONS))
    assert (swept.sensitivity.gains > 0).all() and all(gain > 0 for gain in swept.sensitivity.dense_gains.values())


@EVERY_FAMILY
def test_a_plan_measures_as_the_whole_model_does(
    folder: Path, lowering: Lowering, whole: tuple[Swept, SweptStore]
) -> None:
    swept, store = whole
    walk, plain = walk_of(lowering, swept), plain_plan(lowering.model, lowering.spec_16bit, "gptq")
    assert kl_of(walk, plain, store) == pytest.approx(0, abs=1e-9)
    shapes = lowering.model.dense_shapes()
    dense = {name: dense_spec(name, shape, 4, 32, lowering.float_type) for name, shape in shapes.items()}
    fitting = {unit: spec for unit, spec in dict.fromkeys(plain.units, SPECS[0]).items() if _fits(lowering, unit, spec)}
    plan = replace(plain, units={**plain.units, **fitting}, dense=dense)
    weights: dict[Any, torch.Tensor] = {unit: store.weight(unit, spec) for unit, spec in fitting.items()}
    weights |= {name: store.dense_weight(name, spec) for name, spec in dense.items() if spec.bitwidth < 16}
    expected = measured_kl(TransformersOracle(folder), walk.answers, weights)
    assert kl_of(walk, plan, store) == pytest.approx(expected, rel=1e-3) and expected > 0
    assert kl_of(walk_of(lowering), plan, store) == pytest.approx(expected, rel=1e-3), "own states made by the walk"


def _fits(lowering: Lowering, unit: UnitKey, spec: QuantSpec) -> bool:
    return spec.fits(lowering.model.unit_shape(unit.layer, unit.projection)[1])


def test_the_first_texts_alone_measure_alike(lowering: Lowering, whole: tuple[Swept, SweptStore]) -> None:
    swept, store = whole
    plain = plain_plan(lowering.model, lowering.spec_16bit, "gptq")
    plans = [(replace(plain, units=dict.fromkeys(plain.units, SPECS[0])), store)]
    (every,), (first,) = (list(walk_of(lowering, swept).measure_each(plans, items)) for items in (None, 1))
    count = answer_texts(lowering).counts[0]
    assert len(first.kl) == count < len(every.kl)
    assert first.kl == pytest.approx(every.kl[:count], rel=2e-3)  # other batches: other last bits
    assert first.nll == pytest.approx(every.nll[:count], rel=1e-5) and (first.nll > 0).all()
    with pytest.MonkeyPatch.context() as patched:  # a vocabulary so large that each token is compared alone
        patched.setattr("moec.compiler.sensitivity.answer_walk.tokens_at_once", lambda _: 1)
        (single,) = walk_of(lowering, swept).measure_each(plans)
    assert single.kl == pytest.approx(every.kl, rel=2e-3) and single.agrees.tolist() == every.agrees.tolist()


@EVERY_FAMILY
def test_leaving_experts_out_measures_as_in_the_whole_model(
    folder: Path, lowering: Lowering, whole: tuple[Swept, SweptStore]
) -> None:
    """Routers choose among the others, and among all again for the plan that comes next."""
    model, (swept, store) = lowering.model, whole
    gone = {ExpertKey(at, at % 3) for at, layer in enumerate(model.layers) if layer.experts.can_lose_experts}
    if not gone:
        pytest.skip("its routers need all of their experts")
    walk, plain = walk_of(lowering, swept), plain_plan(model, lowering.spec_16bit, "gptq")
    left_out = {unit: LEFT_OUT for key in sorted(gone) for unit in model.units_of(key)}
    found = kl_of(walk, replace(plain, units={**plain.units, **left_out}), store)
    expected = measured_kl(
        TransformersOracle(folder), walk.answers, {unit: store.weight(unit, LEFT_OUT) for unit in left_out}
    )
    assert found == pytest.approx(expected, rel=1e-2) and found > 0
    assert kl_of(walk, plain, store) == pytest.approx(0, abs=1e-9)
    assert all(store.for_bundle(unit, LEFT_OUT).nbytes == 0 for unit in left_out)


def test_an_expert_left_out_costs_what_its_output_was(
    folder: Path, lowering: Lowering, whole: tuple[Swept, SweptStore]
) -> None:
    """By the second moments of the whole model; fewer tokens than a sample holds, so nothing is estimated."""
    records, seen = recorded(TransformersOracle(folder), token_texts(lowering)), 0
    for layer, record in records.items():
        for expert in np.flatnonzero(record.tokens).tolist():
            unit, seen = UnitKey(layer, expert, "down"), seen + 1
            weight = lowering.unit(unit).float()
            output = float(torch.trace(weight @ record.middle_moments[expert] @ weight.T))
            assert whole[1].error(unit, LEFT_OUT) == pytest.approx(output, rel=1e-4)
    assert seen > 6


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_after(layers: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sweep ends where it loads that layer."""
    own = LoadedLayer.load

    def load(self: LoadedLayer, layer: int, *rest: Any) -> None:
        if layer == layers:
            raise Killed
        own(self, layer, *rest)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(LoadedLayer, "load", load)
        yield


@pytest.mark.gate("G5")
@pytest.mark.parametrize(
    ("folder", "layers"),
    [("olmoe", 0), ("olmoe", 1), ("olmoe", 2), ("switch", 2), ("switch", 4), ("switch", 5)],
    indirect=["folder"],
    scope="module",
)
def test_a_killed_sweep_goes_on_and_ends_alike(
    lowering: Lowering,
    whole: tuple[Swept, SweptStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
) -> None:
    with killed_after(layers, monkeypatch):
        sweep(lowering, tmp_path / "cut.work")
    loaded: list[int] = []
    own = LoadedLayer.load
    monkeypatch.setattr(
        LoadedLayer, "load", lambda self, layer, *rest: (loaded.append(layer), own(self, layer, *rest))[1]
    )
    resumed, store = sweep(lowering, tmp_path / "cut.work")
    assert loaded == list(range(layers, lowering.model.num_layers))
    assert np.array_equal(resumed.sensitivity.gains, whole[0].sensitivity.gains)
    assert resumed.sensitivity.dense_gains == whole[0].sensitivity.dense_gains
    assert torch.equal(resumed.answers, whole[0].answers)
    for unit in lowering.model.units_of_layer(lowering.model.expert_layers[-1]):
        assert np.array_equal(store.for_bundle(unit, SPECS[0]), whole[1].for_bundle(unit, SPECS[0]))
    assert resumed.statistics is not None and whole[0].statistics is not None
    assert np.array_equal(resumed.statistics.popularity, whole[0].statistics.popularity)


@pytest.mark.gate("G5")
def test_a_damaged_layer_is_done_again(
    lowering: Lowering, whole: tuple[Swept, SweptStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_after(2, monkeypatch):
        sweep(lowering, tmp_path / "cut.work")
    (file,) = (path for path in (tmp_path / "cut.work").iterdir() if path.name.startswith("units-1-q3"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    resumed, _ = sweep(lowering, tmp_path / "cut.work")
    assert np.array_equal(resumed.sensitivity.gains, whole[0].sensitivity.gains)


def test_without_moments_tokens_are_counted_all_the_same(
    lowering: Lowering, whole: tuple[Swept, SweptStore], tmp_path: Path
) -> None:
    nearest, store = sweep(lowering, tmp_path / "rtn.work", quantizer="rtn")
    assert nearest.statistics is not None and whole[0].statistics is not None
    assert np.array_equal(nearest.statistics.popularity, whole[0].statistics.popularity)
    assert nearest.statistics.unseen_experts == whole[0].statistics.unseen_experts
    units = lowering.model.units_of_layer(0)
    assert sum(store.error(u, SPECS[0]) for u in units) > sum(whole[1].error(u, SPECS[0]) for u in units)


def test_without_texts_costs_are_errors_of_weights(lowering: Lowering, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "w.work", "x", Disk())
    store = SweptStore(lowering, "rtn", SPECS, journal)
    swept = Sweep(LoadedLayer(lowering), store, journal, {}, 0).run(None, 2, no_progress)
    assert swept.statistics is None and (swept.sensitivity.gains == 1).all() and not swept.held_out
    for unit in lowering.model.unit_keys():
        weight = lowering.unit(unit).float()
        for spec in SPECS:
            expected = float((store.weight(unit, spec) - weight).square().sum())
            assert store.error(unit, spec) == pytest.approx(expected, rel=1e-4)
        if unit.projection == "down":
            assert store.error(unit, LEFT_OUT) == pytest.approx(float(weight.square().sum()), rel=1e-4)


@pytest.mark.parametrize(("threads", "resident_layers"), [(1, 0), (3, 0), (2, 1), (2, 3)])
def test_neither_threads_nor_resident_layers_change_a_bit(
    lowering: Lowering, whole: tuple[Swept, SweptStore], tmp_path: Path, threads: int, resident_layers: int
) -> None:
    """Two threads and no resident layer in `whole`."""
    found, store = sweep(lowering, tmp_path / "w.work", "gptq", threads, resident_layers)
    assert np.array_equal(found.sensitivity.gains, whole[0].sensitivity.gains)
    assert torch.equal(found.answers, whole[0].answers)
    for unit in lowering.model.unit_keys():
        assert np.array_equal(store.for_bundle(unit, SPECS[0]), whole[1].for_bundle(unit, SPECS[0]))
        assert store.error(unit, SPECS[0]) == whole[1].error(unit, SPECS[0])


def test_resident_layers_are_read_once(lowering: Lowering, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    own = type(lowering).unit

    def unit(self: Lowering, key: UnitKey) -> torch.Tensor:
        reads.append(key.layer)
        return own(self, key)

    monkeypatch.setattr(type(lowering), "unit", unit)
    slot = LoadedLayer(lowering, resident_layers=2)
    for _ in range(2):
        for layer in range(3):
            slot.load(layer)
    units = len(lowering.model.units_of_layer(0))
    assert [reads.count(layer) for layer in range(3)] == [units, units, 2 * units]


def test_memory_grows_with_a_layer_not_with_the_model() -> None:
    deep, flat = (model_spec([layer_spec(width=512)] * count) for count in (40, 4))
    specs = (QuantSpec(2, 32), QuantSpec(4, 32))
    grown = sweep_bytes(deep, 1000, 512, specs, 2) - sweep_bytes(flat, 1000, 512, specs, 2)
    assert grown < 40 * 2 * 512 * 4 * deep.hidden_size


TOKENS, HIDDEN, VOCABULARY = 23, 16, 50


@pytest.mark.parametrize("tokens", [1, 5, 23, 100])
def test_log_probabilities_do_not_depend_on_how_many_tokens_are_held(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    head = OutputHead(torch.randn(VOCABULARY, HIDDEN).bfloat16(), torch.randn(VOCABULARY))
    states = torch.randn(TOKENS, HIDDEN)
    expected = head.logits(states).double().log_softmax(-1)
    whole = head.log_probs(states)
    monkeypatch.setattr("moec.compiler.walker.output_head.LOGITS_PER_CHUNK", tokens * VOCABULARY)
    found = head.log_probs(states)
    assert torch.equal(found, whole) and found.shape == (TOKENS, VOCABULARY)
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_the_head_goes_back_as_torch_does(softcap: float) -> None:
    torch.manual_seed(1)
    head = OutputHead(torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY), softcap)
    states, gradients = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(TOKENS, VOCABULARY)
    plain = states @ head.matrix.T + head.bias
    expected = softcap * torch.tanh(plain / softcap) if softcap else plain
    logits = head.logits(states.detach())
    assert (logits - expected).abs().max() < 1e-4
    (wanted,) = torch.autograd.grad(expected, states, gradients)
    assert (head.back(gradients, logits) - wanted).abs().max() < 1e-3 * wanted.abs().max()


def embedder() -> tuple[Embed, weakref.ref[Tensor]]:
    """An embedding by a table, and whether the table is still in memory."""
    table = torch.ones(8, 4)
    return (lambda ids: table[ids]), weakref.ref(table)


def test_first_texts_are_those_that_fit() -> None:
    texts = TokenTexts([[1] * 4, [1] * 3, [1] * 5], [[2] * 2, [2], [2]])
    assert [len(texts.first(tokens).rows) for tokens in (0, 6, 9, 10, 15, 16, 99)] == [1, 1, 1, 2, 2, 3, 3]
    assert texts.num_tokens == 16 and texts.first(10).prompts == [[2] * 2, [2]]


def test_texts_of_a_decoder_do_not_keep_the_embedding() -> None:
    embed, table = embedder()
    texts = TextStates.begin(TokenTexts([[1, 2]]), embed)
    del embed
    assert table() is None and texts.copy().tokens().shape == (2, 4)


def test_texts_of_an_encoder_keep_the_embedding_until_the_decoder_begins() -> None:
    embed, table = embedder()
    texts = TextStates.begin(TokenTexts([[1, 2]], [[3, 4, 5]]), embed)
    copy = texts.copy()
    del embed
    for each in (texts, copy):
        assert table() is not None
        each.begin_decoding(lambda states: states)
    assert table() is None and copy.tokens().shape == (2, 4)
