"""`--torch-device`: layers, moments, quantization, gradients and the KL of plans on another device than the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from moec.compiler.cluster.session import check_cluster
from moec.compiler.families import Lowering
from moec.compiler.forecast import forecast
from moec.compiler.preflight import preparation
from moec.compiler.preflight.prepared import Prepared
from moec.compiler.quantization.quantizers import column_steps, rtn
from moec.compiler.quantization.swept_store import SweptStore
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.plan import plain_plan
from moec.compiler.request.targets import Target
from moec.compiler.sensitivity.answer_walk import AnswerWalk, planned_weights
from moec.compiler.sensitivity.gradients import LayerGradients
from moec.compiler.stages.sweep import Sweep
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.torch_device import CPU, find_device
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.engine import no_progress
from moec.manifests.errors import DoesNotFit, OptionError
from moec.manifests.quant import QuantSpec
from tests.accelerator.conftest import NO_GPU
from tests.compiler.lowered import compile_texts_of, lowered, save_family, walked_logits
from tests.compiler.other_device import OTHER, OtherMode, other_device
from tests.tiny_compile import check_bundle, compile_tiny, contents, little_memory, make_request, names, save_texts
from tests.tiny_switch import TINY_SWITCHES, TinySwitch, save_tiny_switch

pytestmark = pytest.mark.usefixtures("one_thread")
SPECS = (QuantSpec(3, 32),)
PAIRS = [([7 + at, 20, 31 + 2 * at], [40 + at, 41, 5 * at + 9]) for at in range(4)]
TOKENS = np.random.default_rng(4).integers(4, 260, 24).tolist()


@pytest.fixture(autouse=True)
def plain_attention() -> Iterator[None]:
    """Torch chooses the operations of attention by device. These are the same on each."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def compiling_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[OtherMode]]:
    """Let a compile for `cuda` use the other device."""
    with monkeypatch.context() as patch, other_device() as counts:
        patch.setattr(preparation, "find_device", lambda name: OTHER)
        patch.setattr(Prepared, "torch_device", OTHER)
        yield counts


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_texts(tmp_path_factory.mktemp("texts") / "texts", train=12, validation=6, test=6))


def test_a_compile_on_another_device_writes_the_same_bytes(
    model: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage computes there. No operation takes tensors of two devices. The manifest names the device."""
    for module in (column_steps, rtn):  # the extension rounds sums differently
        monkeypatch.setattr(module, "native_of", lambda tensor: None)
    options: dict[str, Any] = {"data": data, "tasks": ("perplexity",), "prune": False, "dense_bits": None}
    options |= {"swaps": 1, "bits": (3, 16)}
    compile_tiny(model, tmp_path / "cpu", "kl", 0.05, **options)
    with compiling_elsewhere(monkeypatch) as counts:
        compile_tiny(model, tmp_path / "cuda", "kl", 0.05, **options, torch_device="cuda")
    expected, found = contents(tmp_path / "cpu"), contents(tmp_path / "cuda")
    manifests = [json.loads(files.pop("moec.json")) for files in (expected, found)]
    assert expected == found
    assert [manifest["options"].get("torch_device") for manifest in manifests] == [None, "cuda"]
    done = counts.computed
    stages = {
        "layers": "aten._safe_softmax.default",
        "second moments": "aten.addmm_.default",
        "GPTQ": "aten.linalg_cholesky_ex.default",
        "refit": "aten._linalg_solve_ex.default",
        "rounding": "aten.addr_.default",
        "gradients": "aten.silu_backward.default",
        "KL": "aten._log_softmax.default",
    }
    assert [stage for stage, name in stages.items() if not done[name]] == []


def measures(lowering: Lowering, device: torch.device, work: Path) -> dict[str, np.ndarray]:
    """Return everything that a compile measures of a checkpoint: counts, codes, costs, prices, and the KL of a plan."""
    work.mkdir()
    journal, texts = Journal(work / "work", "x", Disk()), compile_texts_of(lowering.model, PAIRS)
    slot, store = LoadedLayer(lowering, device=device), SweptStore(lowering, "rtn", SPECS, journal)
    plain = plain_plan(lowering.model, lowering.spec_16bit, "rtn")
    shapes = lowering.model.dense_shapes()
    is_matrix = {name: len(shape) == 2 and shape[1] % 32 == 0 for name, shape in shapes.items()}
    probe = {name: QuantSpec(8, 32) if is_matrix[name] and "router" not in name else lowering.spec_16bit
             for name in shapes}  # fmt: skip
    swept = Sweep(slot, store, journal, probe, 0).run(texts, 1, no_progress)
    prices = LayerGradients(slot, store, texts.gradients, store.priced_specs, journal).run(0, 1, no_progress)
    units = dict.fromkeys(plain.units, SPECS[0])
    plan = replace(plain, units=units, dense={**plain.dense, **probe})
    walk = AnswerWalk(lambda: slot, texts.validation, 1, no_progress, swept.answers)
    measured = walk.measure(planned_weights(plan, store))
    assert swept.statistics is not None
    return {
        "popularity": swept.statistics.popularity,
        "codes": np.concatenate([store.matrix(unit, spec).codes.numpy().ravel() for unit, spec in units.items()]),
        "costs": np.array([store.error(unit, spec) for unit in units for spec in SPECS]),
        "gains": swept.sensitivity.gains,
        "dense gains": np.array(list(swept.sensitivity.dense_gains.values())),
        "prices": prices,
        "kl": measured.kl,
        "nll": measured.nll,
    }


ENCODING = TinySwitch({"num_layers": 2, "num_decoder_layers": 2, "num_experts": 2})
FAMILIES = (
    "qwen2-plain-between", "qwen3-plain-first", "deepseek-v2-groups-yarn", "deepseek-v3", "glm4", "ernie",
    "granite-scaled", "gpt-oss", "phimoe", "switch-capacity",
)  # fmt: skip


def test_an_encoder_measures_the_same_on_another_device(tmp_path: Path) -> None:
    lowering = lowered(save_tiny_switch(tmp_path / "tiny", ENCODING))
    expected = measures(lowering, CPU, tmp_path / "here")
    with other_device() as counts:
        found = measures(lowering, OTHER, tmp_path / "there")
    for name, values in expected.items():
        assert np.array_equal(values, found[name], equal_nan=True), name
    assert counts.moved["there"] and counts.moved["back"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_on_another_device(family: str, tmp_path: Path) -> None:
    lowering = lowered(save_family(family, tmp_path / "tiny"))
    prompts = [TOKENS[:5]] if family in TINY_SWITCHES else []
    expected = walked_logits(lowering, [TOKENS], prompts)[0]
    with other_device() as counts:
        slot = LoadedLayer(lowering, device=OTHER)
        found = walked_logits(lowering, [TOKENS], prompts, slot=slot)[0].cpu()
    assert torch.equal(found, expected)
    assert counts.computed["aten.mm.default"] + counts.computed["aten.addmm.default"] > lowering.model.num_layers


@pytest.mark.parametrize("name", ["cuda:999", "meta", "tpu", "", "cuda:", "cpu:0", "cuda:1 "])
def test_a_device_that_torch_does_not_have_is_refused_before_any_work(name: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        compile_tiny(model, tmp_path / "out", "bits_per_weight", 4, torch_device=name)
    assert name in caught.value.message and "\n" not in str(caught.value)
    assert names(tmp_path) == set()


def test_the_default_is_the_cpu() -> None:
    target = Target("bits_per_weight", 4)
    assert CompileOptions(target) == CompileOptions(target, torch_device="cpu")
    assert "torch_device" not in CompileOptions(target).to_plain()
    assert CompileOptions(target, torch_device="cuda:1").to_plain()["torch_device"] == "cuda:1"
    assert find_device("cpu") == CPU


def test_options_that_another_device_does_not_serve_are_refused(model: Path, data: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="workers of `--cluster` compute on their CPUs"):
        check_cluster("kl", "cuda")
    request = make_request(model, tmp_path / "out", "kl", 0.1, data=data, torch_device="cuda")
    with pytest.raises(OptionError, match="`--estimate` times work on the CPU"):
        forecast(request)


def test_a_device_without_memory_is_named_and_the_measurements_stay(
    model: Path, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any layer of any stage: of the sweep, of the gradients, and of the KL of plans. A resumed run goes on."""
    little_memory(monkeypatch.setattr)
    loads, load, full_at = list[int](), LoadedLayer.load, -1
    options: dict[str, Any] = {"data": data, "tasks": ("perplexity",)}

    def loading(slot: LoadedLayer, layer: int, *rest: Any) -> None:
        loads.append(layer)
        if len(loads) == full_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        load(slot, layer, *rest)

    monkeypatch.setattr(LoadedLayer, "load", loading)
    compile_tiny(model, tmp_path / "whole", "kl", 0.1, **options)
    count = len(loads)
    for number in (count, count // 2, 2, 1):
        full_at = number
        loads.clear()
        with pytest.raises(DoesNotFit, match="`cpu` has too little memory for a layer") as caught:
            compile_tiny(model, tmp_path / "out", "kl", 0.1, resume=True, **options)
        assert "--resume" in str(caught.value.hint) and caught.value.exit_code == DoesNotFit.exit_code
        assert names(tmp_path) == {"whole", "out.work"}
        full_at = -1
        compile_tiny(model, tmp_path / "out", "kl", 0.1, resume=True, **options)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


def test_a_gpu_measures_what_the_cpu_does(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    lowering = lowered(save_family("gpt-oss", tmp_path / "tiny"))
    expected = measures(lowering, CPU, tmp_path / "here")
    found = measures(lowering, torch.device("cuda"), tmp_path / "there")
    # Sums in another order move a few weights to the next code
    assert np.mean(expected.pop("codes") != found.pop("codes")) < 0.02
    for name, values in expected.items():
        assert np.linalg.norm(values - found[name]) <= 0.03 * np.linalg.norm(values), name


def test_a_gpu_compiles_a_bundle_that_keeps_the_target(model: Path, data: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    options: dict[str, Any] = {"data": data, "tasks": ("perplexity",), "torch_device": "cuda"}
    compile_tiny(model, tmp_path / "out", "kl", 0.05, **options)
    assert check_bundle(tmp_path / "out")["verdict"] in ("supported", "met")
