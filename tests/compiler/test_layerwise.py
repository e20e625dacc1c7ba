"""A compile one layer at a time: the same model, the same measurements, and a killed one that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from moec.compiler.calibration import calibrate
from moec.compiler.checkpoint import open_checkpoint
from moec.compiler.durable import Disk
from moec.compiler.families import Lowering, lower
from moec.compiler.journal import Journal
from moec.compiler.layerwise.memory import streamed_bytes, whole_bytes
from moec.compiler.layerwise.slot import LayerSlot, OutputHead, TextStates, divergences
from moec.compiler.layerwise.store import layer_units
from moec.compiler.layerwise.sweep import AnswerTexts, Sweep, SweepInputs, SweepResult
from moec.compiler.layerwise.trials import StreamedTrials
from moec.compiler.parallel import workers
from moec.compiler.reference import ReferenceModel
from moec.compiler.sensitivity import plain_plan
from moec.compiler.targets import TargetKind
from moec.compiler.uniform import dense_spec, uniform_plan
from moec.compiler.unit_store import UnitStore
from moec.evaluation.data import load_splits
from moec.evaluation.divergence import divergence, log_softmax
from moec.evaluation.run import evaluate
from moec.manifests.errors import OptionError
from moec.manifests.model import PROJECTIONS
from moec.manifests.quant import QuantSpec
from tests.manifests.examples import layer_spec, model_spec
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.tiny_compile import check_bundle, compile_tiny, contents, save_model, save_texts
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral, save_tiny_olmoe, save_tiny_qwen3_moe

SPECS = (QuantSpec(3, 32), QuantSpec(4, 32))
TEXTS = [[5, 6, 200, 7, 90, 33, 8], [1, 2, 3], [250, 9, 8, 7, 6, 5, 4, 3, 2, 1], [17, 17, 40]]


def nothing(done: int, total: int) -> None:
    """No progress."""


# Those with plain layers, corrections, latent attention, windows and scales among them.
OTHERS = (
    "qwen2-plain-between", "qwen2-window-no-bias", "deepseek-v3", "ernie-no-shared", "granite-scaled", "gpt-oss",
    "phimoe",
)  # fmt: skip
OWN = ("deepseek-every-other", "minicpm")
EVERY_FAMILY = pytest.mark.parametrize("folder", ["mixtral", "olmoe", "qwen3", *OTHERS, *OWN], indirect=True)


@pytest.fixture(scope="module", params=["olmoe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of four experts, one of which few tokens reach; or another family."""
    if request.param in OWN:
        return save_own_family(tmp_path_factory.mktemp(request.param) / "tiny", OWN_FAMILIES[request.param])
    if request.param in OTHERS:
        return save_tiny_family(tmp_path_factory.mktemp(request.param) / "tiny", TINY_FAMILIES[request.param])
    save = {"mixtral": save_tiny_mixtral, "olmoe": save_tiny_olmoe, "qwen3": save_tiny_qwen3_moe}[request.param]
    return save(tmp_path_factory.mktemp(request.param) / "tiny", TinyMixtral(layers=3, width=64, seed=7))


@pytest.fixture(scope="module")
def lowering(folder: Path) -> Lowering:
    return lower(open_checkpoint(str(folder)))


def inputs_of(lowering: Lowering, quantizer: str = "gptq", dense_bits: int = 4) -> SweepInputs:
    shapes = lowering.model.dense_shapes()
    probe = {name: dense_spec(name, shape, dense_bits, 32, lowering.float_type) for name, shape in shapes.items()}
    answers = AnswerTexts(TEXTS[:2], [3, 2], [])
    return SweepInputs(TEXTS, answers, {"text": AnswerTexts(TEXTS[2:], [2, 1], [])}, SPECS, probe, quantizer, 0)


def sweep(lowering: Lowering, work: Path, **options: object) -> SweepResult:
    return Sweep(lowering, inputs_of(lowering, **options), Journal(work, "x", Disk()), 2).run(nothing)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(lowering: Lowering, tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    """One sweep that nothing stopped."""
    return sweep(lowering, tmp_path_factory.mktemp("whole") / "w.work")


@EVERY_FAMILY
def test_layers_in_turn_compute_what_the_whole_model_does(folder: Path, lowering: Lowering) -> None:
    slot, reference = LayerSlot(lowering), ReferenceModel(folder)
    texts = TextStates.begin(TEXTS, slot.embed)
    with workers(1) as pool:
        for layer in range(lowering.model.num_layers):
            slot.load(layer)
            slot.run([texts], pool, lambda: None)
    for batch, states in zip(texts.batches, texts.states, strict=True):
        with torch.inference_mode():
            expected = reference.network.hidden([TEXTS[index] for index in batch]) * lowering.model.logits_scale
        found = slot.normed(states.reshape(-1, states.shape[-1])).view_as(states)
        for at, index in enumerate(batch):
            assert torch.allclose(found[at, : len(TEXTS[index])], expected[at, : len(TEXTS[index])], atol=1e-5)


@EVERY_FAMILY
def test_the_sweep_counts_what_calibration_counts(folder: Path, whole: SweepResult) -> None:
    found = whole.statistics
    expected = calibrate(ReferenceModel(folder), [(text, []) for text in TEXTS], seed=0)
    assert found.num_tokens == expected.num_tokens == sum(map(len, TEXTS))
    assert np.array_equal(found.popularity, expected.popularity)
    assert np.array_equal(found.transitions, expected.transitions)
    assert np.array_equal(found.path_counts, expected.path_counts)
    assert found.router_quantiles == pytest.approx(expected.router_quantiles, abs=1e-5)
    assert found.unseen_experts == expected.unseen_experts


def test_units_on_disk_are_those_that_memory_would_hold(folder: Path, lowering: Lowering, whole: SweepResult) -> None:
    """Quantized against the same second moments: the same codes, up to a rounding that falls the other way."""
    moments = calibrate(ReferenceModel(folder), [(text, []) for text in TEXTS], seed=0).second_moments
    held = UnitStore(lowering, moments, "gptq")
    same = total = 0
    for unit in (unit for layer in range(lowering.model.num_layers) for unit in layer_units(lowering.model, layer)):
        for spec in SPECS:
            mine, theirs = whole.store.matrix(unit, spec), held.matrix(unit, spec)
            same += int((mine.codes == theirs.codes).sum())
            total += mine.codes.numel()
            assert whole.store.error(unit, spec) >= 0
    assert same >= 0.99 * total


def test_more_bits_cost_less_and_every_layer_has_a_gain(lowering: Lowering, whole: SweepResult) -> None:
    for layer in range(lowering.model.num_layers):
        units = layer_units(lowering.model, layer)
        assert (
            sum(whole.store.error(u, SPECS[0]) for u in units) > sum(whole.store.error(u, SPECS[1]) for u in units) > 0
        )
    assert whole.sensitivity.gains.shape == (lowering.model.num_layers, len(PROJECTIONS))
    assert (whole.sensitivity.gains > 0).all() and all(gain > 0 for gain in whole.sensitivity.dense_gains.values())


@EVERY_FAMILY
def test_a_plan_measures_as_the_whole_model_does(
    folder: Path, lowering: Lowering, whole: SweepResult, tmp_path: Path
) -> None:
    inputs, journal = inputs_of(lowering), Journal(tmp_path / "w.work", "x", Disk())
    trials = StreamedTrials(lowering, inputs, whole, nothing, journal, 2, (), cast(Any, None))
    plain = plain_plan(lowering.model, lowering.spec_16bit, "gptq")
    assert trials.kl(plain, "nothing changed").mean == pytest.approx(0, abs=1e-9)
    plan = uniform_plan(lowering.model, 3, 32, 4, lowering.float_type, "gptq")
    measured = trials.kl(plan, "3 bits")
    reference = ReferenceModel(folder)
    texts = list(zip(inputs.answers.rows, inputs.answers.counts, strict=True))
    rows = [_scored(reference, text, count) for text, count in texts]
    weights = {unit: whole.store.weight(unit, spec) for unit, spec in plan.units.items()}
    weights |= {n: whole.store.dense_weight(n, s) for n, s in plan.dense.items() if s.bitwidth < 16}  # type: ignore[misc]
    with reference.weights(weights):  # type: ignore[arg-type]
        others = [_scored(reference, text, count) for text, count in texts]
    expected = np.concatenate([divergence(log_softmax(own), other)[0] for own, other in zip(rows, others, strict=True)])
    assert measured.mean == pytest.approx(float(expected.mean()), rel=1e-3)
    assert measured.mean > 0


def _scored(reference: ReferenceModel, text: list[int], count: int) -> np.ndarray:
    with torch.inference_mode():
        hidden = reference.network.hidden([text])[0, len(text) - count :]
        return reference.network.logits(hidden).numpy()


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def killed_after(layers: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sweep ends before it begins that layer."""
    own = Sweep._layer

    def layer(self: Sweep, index: int, *rest: object) -> object:
        if index == layers:
            raise Killed
        return own(self, index, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Sweep, "_layer", layer)
        yield


@pytest.mark.gate("G5")
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_killed_sweep_goes_on_and_ends_alike(
    lowering: Lowering, whole: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    with killed_after(layers, monkeypatch):
        sweep(lowering, tmp_path / "cut.work")
    seen: list[int] = []
    resumed = Sweep(lowering, inputs_of(lowering), Journal(tmp_path / "cut.work", "x", Disk()), 2).run(
        lambda done, total: seen.append(done)
    )
    assert seen[0] == layers
    assert np.array_equal(resumed.sensitivity.gains, whole.sensitivity.gains)
    assert resumed.sensitivity.dense_gains == whole.sensitivity.dense_gains
    assert torch.equal(resumed.answers, whole.answers)
    for unit in layer_units(lowering.model, lowering.model.num_layers - 1):
        assert np.array_equal(resumed.store.for_bundle(unit, SPECS[0]), whole.store.for_bundle(unit, SPECS[0]))
    assert np.array_equal(resumed.statistics.popularity, whole.statistics.popularity)


@pytest.mark.gate("G5")
def test_a_damaged_layer_is_done_again(
    lowering: Lowering, whole: SweepResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed_after(2, monkeypatch):
        sweep(lowering, tmp_path / "cut.work")
    (file,) = (path for path in (tmp_path / "cut.work").iterdir() if path.name.startswith("units-1-q3"))
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    resumed = sweep(lowering, tmp_path / "cut.work")
    assert np.array_equal(resumed.sensitivity.gains, whole.sensitivity.gains)


def test_without_moments_tokens_are_counted_all_the_same(
    lowering: Lowering, whole: SweepResult, tmp_path: Path
) -> None:
    nearest = sweep(lowering, tmp_path / "rtn.work", quantizer="rtn")
    assert np.array_equal(nearest.statistics.popularity, whole.statistics.popularity)
    assert nearest.statistics.unseen_experts == whole.statistics.unseen_experts
    units = layer_units(lowering.model, 0)
    assert sum(nearest.store.error(u, SPECS[0]) for u in units) > sum(whole.store.error(u, SPECS[0]) for u in units)


def test_threads_change_nothing(lowering: Lowering, whole: SweepResult, tmp_path: Path) -> None:
    """Two threads in `whole`."""
    for threads in (1, 3):
        journal = Journal(tmp_path / f"{threads}.work", "x", Disk())
        found = Sweep(lowering, inputs_of(lowering), journal, threads).run(nothing)
        assert np.array_equal(found.sensitivity.gains, whole.sensitivity.gains)


def test_divergences_are_those_of_the_plain_formula() -> None:
    generator = torch.Generator().manual_seed(1)
    states, own = (torch.randn(5, 8, generator=generator) for _ in range(2))
    head, other = (torch.randn(40, 8, generator=generator) for _ in range(2))
    kl, agrees = next(divergences(states, own, OutputHead(other), OutputHead(head)))
    expected = divergence(log_softmax((own @ head.T).numpy()), (states @ other.T).numpy())
    assert kl.numpy() == pytest.approx(expected[0], rel=1e-4) and agrees.numpy().tolist() == expected[1].tolist()


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model fits in memory as a whole."""
    monkeypatch.setattr("moec.compiler.layerwise.planning.goes_layer_by_layer", lambda *_: True)


def test_a_whole_compile_layer_by_layer(too_large: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {"data": str(texts), "tasks": ("perplexity",), "bits": (2, 3, 4), "group_sizes": (32,)}
    for name in ("one", "two"):
        result = compile_tiny(model, tmp_path / name, "bits_per_weight", 4.0, quick=False, **options)
    quality = check_bundle(tmp_path / "one")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert result.plan.bits_per_weight <= 4.0 and len(set(result.plan.units.values())) > 1
    assert quality["trials"][-1]["kl"]["mean"] > 0
    held_out = quality["held_out_kl"]["perplexity"]
    assert quality["verdict"] == "measured" and held_out["items"] == 40
    assert 0.2 < held_out["mean"] / quality["trials"][-1]["kl"]["mean"] < 5
    assert not (tmp_path / "one.work").exists()


def test_a_kl_target_layer_by_layer(too_large: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {
        "data": str(texts),
        "tasks": ("perplexity",),
        "bits": (2, 3, 4, 8),
        "group_sizes": (32,),
        "dense_bits": 8,
    }
    result = compile_tiny(model, tmp_path / "out", "kl", 0.05, quick=False, **options)
    measured = [trial["kl"]["mean"] for trial in result.quality["trials"] if trial["purpose"] == "search"]
    assert min(measured) <= 0.05


LOSS: dict[str, Any] = {"tasks": ("perplexity",), "bits": (2, 3, 4, 8), "group_sizes": (32,), "dense_bits": 8}


def test_a_loss_target_layer_by_layer(too_large: None, tmp_path: Path) -> None:
    """Judged by bundles in the runtime; the baseline is that of the whole model in transformers."""
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts", validation=20)
    found = compile_tiny(model, tmp_path / "out", "loss", 0.03, quick=False, data=str(texts), **LOSS)
    quality = check_bundle(tmp_path / "out")
    task = quality["tasks"]["perplexity"]
    assert quality["verdict"] in ("supported", "met") and task["loss"]["loss"] <= 0.03 and task["n"] == 40
    assert task["kl"]["mean"] > 0 and not quality["held_out_kl"]
    judged = [trial for trial in quality["trials"] if trial["accepted"] is not None]
    assert any(trial["accepted"] for trial in judged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "texts"], "no bundle of a trial"
    split = load_splits(str(texts), "perplexity")
    assert task["baseline"] == pytest.approx(
        evaluate(split.task, split.test.items, ReferenceModel(model)).value, rel=1e-3
    )
    assert found.plan.bits_per_weight < 16


def test_what_a_loss_needs_is_known_before_any_work(too_large: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    options = {"data": str(texts), **LOSS}
    with pytest.raises(OptionError, match="there is no folder"):
        compile_tiny(model, tmp_path / "none" / "out", "loss", 0.03, quick=False, plan_only=True, **options)
    with pytest.raises(OptionError, match="EdgeMoE's search holds the whole model"):
        compile_tiny(
            model, tmp_path / "out", "kl", 0.1, quick=False, search="edgemoe", data=str(texts), tasks=("perplexity",)
        )
    left = tmp_path / "out.work-trial.partial"
    left.mkdir()
    (left / "dense.safetensors").write_bytes(b"of a killed compile")
    compile_tiny(model, tmp_path / "out", "uniform", 4, dense_bits=8)
    assert not left.exists()


def test_bundles_of_trials_never_take_the_place_of_anything(too_large: None, tmp_path: Path) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    own = tmp_path / "out.work-unquantized.partial"
    own.mkdir()
    (own / "letter.txt").write_text("mine")
    with pytest.raises(OptionError, match="is in the way and was not left by a compile"):
        compile_tiny(model, tmp_path / "out", "loss", 0.03, quick=False, data=str(texts), **LOSS)
    assert (own / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("kind", "with_data", "memory", "words"),
    [("size", False, 10**12, "--data"), ("kl", True, 10**6, "--memory"), ("loss", True, 10**6, "--memory")],
)
def test_what_cannot_go_layer_by_layer_says_what_would_do(
    too_large: None, tmp_path: Path, kind: TargetKind, with_data: bool, memory: int, words: str
) -> None:
    model, texts = save_model(tmp_path / "model", layers=2, experts=3), save_texts(tmp_path / "texts")
    data = {"data": str(texts), "tasks": ("perplexity",)} if with_data else {}
    with pytest.raises(OptionError) as caught:
        value = 30_000 if kind == "size" else 0.1
        compile_tiny(model, tmp_path / "out", kind, value, quick=False, dense_bits=8, memory_bytes=memory, **data)
    assert words in f"{caught.value} {caught.value.hint}" and not (tmp_path / "out").exists()


def test_memory_grows_with_a_layer_not_with_the_model() -> None:
    deep, flat = (model_spec([layer_spec(width=512)] * count) for count in (40, 4))
    specs = (QuantSpec(2, 32), QuantSpec(4, 32))
    assert (
        streamed_bytes(deep, 1000, specs, 2) - streamed_bytes(flat, 1000, specs, 2)
        < 40 * 2 * 512 * 4 * deep.hidden_size
    )
    assert whole_bytes(deep, specs, 1) > whole_bytes(flat, specs, 1) + 30 * 4 * 512 * deep.hidden_size
