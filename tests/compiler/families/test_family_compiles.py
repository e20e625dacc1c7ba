"""Every family through the whole compile: mixed formats, experts left out, and experts partly in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moec.compiler.families import FAMILIES
from moec.compiler.quantization.quantized import left_out
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.manifests.model import ExpertKey
from moec.runtime import load
from tests.compiler.lowered import lowered, save_family, walked_logits
from tests.exact_runs import check_exact
from tests.gates.bundles import emit_bundle
from tests.tiny_compile import compile_tiny, save_texts
from tests.tiny_families import CHOSEN
from tests.tiny_models import VOCABULARY

pytestmark = pytest.mark.oracle

BITS = (3, 4, 16)  # 2 bits take four fifths of a tiny compile, because their scales are fitted several times
TOKENS = np.random.default_rng(4).integers(4, 260, 40).tolist()


def test_every_family_is_compiled() -> None:
    elsewhere = {"mixtral", "olmoe", "switch_transformers"}  # test_pipeline.py, test_switch_compiles.py
    assert {*CHOSEN, *elsewhere} == set(FAMILIES)


@pytest.fixture(scope="module", params=sorted(CHOSEN))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    found = save_family(CHOSEN[request.param], root / "model")
    assert json.loads((found / "config.json").read_text())["model_type"] == request.param
    return found


def test_routers_choose_among_the_experts_that_are_kept(folder: Path, tmp_path: Path) -> None:
    """This holds in the layers, with transformers' router, and in the runtime."""
    lowering, chosen = lowered(folder), dict[int, np.ndarray]()
    spec = lowering.model
    losing = [at for at, layer in enumerate(spec.layers) if layer.experts.count and layer.experts.can_lose_experts]
    if not losing:
        return  # corrections or groups decide too, so no expert may be left out
    left = [ExpertKey(layer, expert) for layer in losing for expert in range(spec.layers[layer].experts.count // 3)]
    units = [unit for key in left for unit in spec.units_of(key)]
    nothing = {unit: left_out(spec.unit_shape(unit.layer, unit.projection)[0]).dequantize() for unit in units}
    slot = LoadedLayer(lowering)
    modules = list[Any]()  # one for each kind of layer
    for layer in losing:
        slot.load(layer)
        modules += [slot.experts] if slot.experts not in modules else []
    for module in modules:
        module.register_forward_pre_hook(lambda _, given: chosen.update({slot.layer: given[1].numpy()}))
    expected = walked_logits(lowering, [TOKENS], weights=nothing, slot=slot)[0].numpy()
    assert set(losing) <= set(chosen)
    for layer, found in chosen.items():
        assert not set(found.ravel().tolist()) & {key.expert for key in left if key.layer == layer}
    bundle = emit_bundle(folder, tmp_path / "bundle", pruned=left)
    with load(bundle, expert_cache="100%", context=128) as engine:
        logits = engine.logits(TOKENS)
    assert np.abs(logits - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.gate("G9")
@pytest.mark.parametrize("folder", sorted(set(CHOSEN) - {"deepseek", "minicpm"}), indirect=True)
def test_greedy_continuations_equal_transformers(folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = TOKENS[:7]
    expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=32, pad_token_id=0)[0, 7:]
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=128) as engine:
        assert engine.code_path.to_text().endswith("layers in one call")
        found = [step.token_id for step in engine.generate(prompt, max_new_tokens=32)]
    assert found == expected.tolist()


@pytest.mark.gate("G1")
@pytest.mark.gate("G2")
@pytest.mark.gate("G3")
def test_a_searched_bundle_runs_with_a_fraction_of_its_experts(folder: Path, tmp_path: Path) -> None:
    data = save_texts(tmp_path / "texts", test=8)
    result = compile_tiny(folder, tmp_path / "out", "bits_per_weight", 4.5, data=data, tasks=("perplexity",), bits=BITS)
    assert len({spec.bitwidth for spec in result.plan.units.values()}) > 1
    assert check_exact(tmp_path / "out", TOKENS).shape == (len(TOKENS), VOCABULARY)
