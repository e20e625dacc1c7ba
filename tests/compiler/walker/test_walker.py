"""A compile layer by layer: the same model, the same measurements, and the same results after a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from moec.compiler.calibration.collect import calibrate
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import Lowering, lower
from moec.compiler.quantization.quantized import LEFT_OUT
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.request.uniform import dense_spec, uniform_plan
from moec.compiler.sensitivity.sensitivity import plain_plan
from moec.compiler.walker.memory import streamed_bytes, whole_bytes
from moec.compiler.walker.slot import LayerSlot, OutputHead, TextStates, divergences
from moec.compiler.walker.store import layer_units
from moec.compiler.walker.sweep import AnswerTexts, Sweep, SweepInputs, SweepResult
from moec.compiler.walker.trials import StreamedTrials
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.compiler.workspace.parallel import workers
from moec.evaluation.divergence import divergence, log_softmax
from moec.manifests.model import PROJECTIONS, ExpertKey, UnitKey
from moec.manifests.quant import QuantSpec
from tests.manifests.examples import layer_spec, model_spec
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral, save_tiny_olmoe, save_tiny_qwen3_moe

SPECS = (QuantSpec(3, 32), QuantSpec(4, 32))
TEXTS = [[5, 6, 200, 7, 90, 33, 8], [1, 2, 3], [250, 9, 8, 7, 6, 5, 4, 3, 2, 1], [17, 17, 40]]


def nothing(done: int, total: int) -> None:
    """Ignore the progress."""


# Families with plain layers, corrections, latent attention, windows and scales.
OTHERS = (
    "qwen2-plain-between", "qwen2-window-no-bias", "deepseek-v3", "ernie-no-shared", "granite-scaled", "gpt-oss",
    "phimoe",
)  # fmt: skip
OWN = ("deepseek-every-other", "minicpm")
EVERY_FAMILY = pytest.mark.parametrize("folder", ["mixtral", "olmoe", "qwen3", *OTHERS, *OWN], indirect=True)


@pytest.fixture(scope="module", params=["olmoe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with three layers of four experts, one of which few tokens reach, or one of another family."""
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
    """An uninterrupted sweep."""
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
    assert found.lower_half == pytest.approx(expected.lower_half, abs=1e-5)
    assert (found.unimportance.sum(axis=1) == expected.unimportance.sum(axis=1)).all()
    moved = np.abs(found.unimportance - expected.unimportance).sum()
    assert moved <= 0.02 * expected.unimportance.sum(), "a last bit may move one over the edge of a bin"
    assert found.unseen_experts == expected.unseen_experts


def test_units_on_disk_are_those_that_memory_would_hold(folder: Path, lowering: Lowering, whole: SweepResult) -> None:
    """Equal second moments give equal codes, except for ties of rounding."""
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
    plan = uniform_plan(lowering.model, QuantSpec(3, 32), QuantSpec(4, 32), lowering.float_type, "gptq")
    measured = trials.kl(plan, "3 bits")
    weights = {unit: whole.store.weight(unit, spec) for unit, spec in plan.units.items()}
    weights |= {n: whole.store.dense_weight(n, s) for n, s in plan.dense.items() if s.bitwidth < 16}  # type: ignore[misc]
    assert measured.mean == pytest.approx(_divergence(folder, inputs, weights), rel=1e-3) and measured.mean > 0


@EVERY_FAMILY
def test_leaving_experts_out_measures_as_in_the_whole_model(
    folder: Path, lowering: Lowering, whole: SweepResult, tmp_path: Path
) -> None:
    """Routers choose among the other experts, and among all again for the next plan."""
    model = lowering.model
    gone = {ExpertKey(at, at % 3) for at, layer in enumerate(model.layers) if layer.experts.can_lose_experts}
    if not gone:
        pytest.skip("its routers need all of their experts")
    inputs, journal = inputs_of(lowering), Journal(tmp_path / "w.work", "x", Disk())
    trials = StreamedTrials(lowering, inputs, whole, nothing, journal, 2, (), cast(Any, None))
    plain = plain_plan(model, lowering.spec_16bit, "gptq")
    left_out = {unit: LEFT_OUT for key in sorted(gone) for unit in model.units_of(key)}
    measured = trials.kl(replace(plain, units={**plain.units, **left_out}), "some left out")
    nothing_left = {unit: whole.store.weight(unit, spec) for unit, spec in left_out.items()}
    assert measured.mean == pytest.approx(_divergence(folder, inputs, nothing_left), rel=1e-2) and measured.mean > 0
    assert trials.kl(plain, "nothing changed").mean == pytest.approx(0, abs=1e-9)
    assert all(whole.store.for_bundle(unit, LEFT_OUT).nbytes == 0 for unit in left_out)


def test_an_expert_left_out_costs_what_its_output_was(folder: Path, lowering: Lowering, whole: SweepResult) -> None:
    """The cost follows from the second moments of the whole model. All tokens are in the sample, so it is exact."""
    calibrated = calibrate(ReferenceModel(folder), [(text, []) for text in TEXTS], seed=0)
    held, seen = UnitStore(lowering, calibrated.second_moments, "gptq"), 0
    for key in lowering.model.expert_keys():
        if calibrated.popularity[key.layer, key.expert]:
            unit, seen = UnitKey(*key, "down"), seen + 1
            assert whole.store.error(unit, LEFT_OUT) == pytest.approx(held.error(unit, LEFT_OUT), rel=1e-4)
    assert seen > 6


def _divergence(folder: Path, inputs: SweepInputs, weights: Any) -> float:
    """Return the mean KL of the whole model with these weights."""
    reference, texts = ReferenceModel(folder), list(zip(inputs.answers.rows, inputs.answers.counts, strict=True))
    rows = [_scored(reference, text, count) for text, count in texts]
    with reference.weights(weights):
        others = [_scored(reference, text, count) for text, count in texts]
    parts = [divergence(log_softmax(own), other)[0] for own, other in zip(rows, others, strict=True)]
    return float(np.concatenate(parts).mean())


def _scored(reference: ReferenceModel, text: list[int], count: int) -> np.ndarray:
    with torch.inference_mode():
        hidden = reference.network.hidden([text])[0, len(text) - count :]
        return reference.network.logits(hidden).numpy()


class Killed(BaseException):
    """The end of a process."""


@contextmanager
def killed_after(layers: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a sweep that ends when it loads that layer."""
    own = LayerSlot.load

    def load(self: LayerSlot, layer: int, *rest: Any) -> None:
        if layer == layers:
            raise Killed
        own(self, layer, *rest)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(LayerSlot, "load", load)
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
    """`whole` uses two threads."""
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


def test_memory_grows_with_a_layer_not_with_the_model() -> None:
    deep, flat = (model_spec([layer_spec(width=512)] * count) for count in (40, 4))
    specs = (QuantSpec(2, 32), QuantSpec(4, 32))
    assert (
        streamed_bytes(deep, 1000, specs, 2) - streamed_bytes(flat, 1000, specs, 2)
        < 40 * 2 * 512 * 4 * deep.hidden_size
    )
    assert whole_bytes(deep, specs, 1) > whole_bytes(flat, specs, 1) + 30 * 4 * 512 * deep.hidden_size
