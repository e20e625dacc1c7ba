"""Plans for other engines, read by parsers that follow the rules of each engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.compiler.export.coarse_plan import EnginePlan, coarse_plan, stack_formats
from moec.compiler.export.engine_files import engine_file
from moec.compiler.export.engine_formats import ENGINES, GPTQMODEL, LLAMA_CPP, MLX, gptqmodel_format
from moec.compiler.export.plan_cost import summary
from moec.compiler.families import FAMILIES
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.manifests.errors import OptionError
from moec.manifests.model import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, RouterSpec, UnitKey
from moec.manifests.quant import PRUNED, QuantSpec
from tests.compiler.lowered import lowered, save_family
from tests.tiny_families import CHOSEN
from tests.tiny_models import TinyMixtral, save_tiny_mixtral, save_tiny_olmoe

BF16 = QuantSpec.parse("bf16")
# Source: ggml's block sizes, gguf-py/gguf/constants.py: columns and bytes of a block.
BLOCKS = {
    "iq1_s": (256, 50), "iq1_m": (256, 56), "iq2_xxs": (256, 66), "iq2_xs": (256, 74), "iq2_s": (256, 82),
    "iq3_xxs": (256, 98), "iq3_s": (256, 110), "iq4_xs": (256, 136), "q4_k": (256, 144), "iq4_nl": (32, 18),
    "q5_k": (256, 176), "q5_0": (32, 22), "q6_k": (256, 210), "q8_0": (32, 34), "mxfp4": (32, 17), "bf16": (1, 2),
    "f16": (1, 2),
}  # fmt: skip
# One configuration of each family, as its tests save it.
SAVED: dict[str, Callable[[Path], Path]] = {
    "mixtral": lambda folder: save_tiny_mixtral(folder, TinyMixtral(layers=2, experts=4)),
    "olmoe": save_tiny_olmoe,
    "switch_transformers": partial(save_family, "switch"),
    **{family: partial(save_family, name) for family, name in CHOSEN.items()},
}
EVERYWHERE = {
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "mixtral", "olmoe", "phimoe",
    "qwen2_moe", "qwen3_moe",
}  # fmt: skip
IN_LLAMA_CPP = {*EVERYWHERE, "deepseek", "dots1", "glm4_moe_lite", "minimax_m2"}
UNKNOWN = {
    LLAMA_CPP: FAMILIES.keys() - IN_LLAMA_CPP,
    MLX: FAMILIES.keys() - IN_LLAMA_CPP - {"afmoe", "exaone_moe"},
    GPTQMODEL: FAMILIES.keys() - EVERYWHERE,
}


def llama_type(text: str, tensor: str) -> str | None:
    """The rules of llama-quantize: parts of white space, lower-case expressions, the first that occurs in a name."""
    found = []
    for part in text.split():
        pattern, separator, kind = part.partition("=")
        assert pattern and separator and kind in BLOCKS, part
        if re.search(pattern.lower(), tensor):
            found.append(kind)
    assert len(found) <= 1, "two rules match"
    return found[0] if found else None


def mlx_settings(text: str, path: str, columns: int) -> dict[str, Any] | bool:
    """What `quantize_model` of mlx-lm does with the file: the module's last dimension, then the predicate."""
    held: dict[str, Any] = {"__name__": "plan"}
    exec(compile(text, "plan.py", "exec"), held)
    module = SimpleNamespace(weight=SimpleNamespace(shape=(4, columns)))
    return False if columns % 32 else held["quant_predicate"](path, module)  # type: ignore[no-any-return]


def dynamic_settings(text: str, module: str) -> dict[str, Any] | bool | None:
    """The rules of GPTQModel: rules of `-:` first, the first that matches the start of a name; None: the base's."""
    rules: dict[str, dict[str, Any]] = json.loads(text)
    found = [
        False if key.startswith("-:") else value
        for key, value in sorted(rules.items(), key=lambda item: not item[0].startswith("-:"))
        if re.match(key[2:], module)
    ]
    assert len(found) <= 1, "two rules match"
    return found[0] if found else None


def llama_tensor(unit: UnitKey) -> str:
    return f"blk.{unit.layer}.ffn_{unit.projection}_exps.weight"


def mlx_module(family: str, unit: UnitKey) -> str:
    own = dict.fromkeys(("gpt_oss", "dots1", "afmoe"), "mlp.experts")
    own |= dict.fromkeys(("mixtral", "phimoe", "granitemoe", "minimax_m2"), "block_sparse_moe.switch_mlp")
    return f"model.layers.{unit.layer}.{own.get(family, 'mlp.switch_mlp')}.{unit.projection}_proj"


def gptqmodel_modules(family: str, unit: UnitKey) -> list[str]:
    prefix = f"model.layers.{unit.layer}"
    names = [f"{prefix}.mlp.experts.{unit.expert}.{unit.projection}_proj"]
    if family in ("mixtral", "phimoe"):
        own = {"gate": "w1", "up": "w3", "down": "w2"}[unit.projection]
        names.append(f"{prefix}.block_sparse_moe.experts.{unit.expert}.{own}")
    if family == "granitemoe":
        own = "output_linear" if unit.projection == "down" else "input_linear"
        names = [f"{prefix}.block_sparse_moe.{own}.{unit.expert}.linear"]
    return names


def check_units(plan: EnginePlan) -> None:
    """Every unit is named by exactly one rule, and by that of its format."""
    model, text = plan.plan.model, engine_file(plan, "plan.py")
    for unit, each in plan.units.items():
        columns = model.unit_shape(unit.layer, unit.projection)[1]
        assert each.fits(columns)
        expected = dict(each.settings) if each.is_quantized else False
        if plan.engine == LLAMA_CPP:
            assert llama_type(text, llama_tensor(unit)) == each.name
        elif plan.engine == MLX:
            assert mlx_settings(text, mlx_module(model.family, unit), columns) == expected
        else:
            for module in gptqmodel_modules(model.family, unit):
                assert dynamic_settings(text, module) == expected, module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    """The ModelSpec of a tiny checkpoint of each family."""
    root = tmp_path_factory.mktemp("engines")
    return {family: lowered(save(root / family)).model for family, save in SAVED.items()}


def mixed_plan(model: ModelSpec, specs: list[str], pruned: tuple[int, ...] = ()) -> CompilePlan:
    """A plan whose units take these formats in turn. pruned: experts of the first routed layer that are left out."""
    plan, first = plain_plan(model, BF16, "gptq"), model.expert_layers[0]
    parsed = [QuantSpec.parse(text) for text in specs]
    units = {
        unit: QuantSpec(PRUNED) if unit.layer == first and unit.expert in pruned else parsed[at % len(parsed)]
        for at, unit in enumerate(plan.units)
    }
    return replace(plan, units=units)


def test_every_family_is_saved_here() -> None:
    assert SAVED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_unit_of_every_family_is_named_once(models: dict[str, ModelSpec], engine: str) -> None:
    known = [model for family, model in models.items() if family not in UNKNOWN[engine]]
    assert len(known) >= 11
    for model in known:
        plan = coarse_plan(engine, mixed_plan(model, ["q2g32b", "q4g32b", "q3g32", "q8", "bf16"]))
        check_units(plan)
        assert ("lm_head" in plan.dense) is not model.tie_embeddings


@pytest.mark.parametrize(
    ("engine", "family"), [(engine, name) for engine in ENGINES for name in sorted(UNKNOWN[engine])]
)
def test_an_unknown_family_is_refused(models: dict[str, ModelSpec], engine: str, family: str) -> None:
    with pytest.raises(OptionError, match=f"no plan for {engine} covers the family `{family}`") as found:
        coarse_plan(engine, mixed_plan(models[family], ["q4g32"]))
    knows = [name for name in ENGINES if family not in UNKNOWN[name]]
    assert found.value.hint == (f"take `--for {' or '.join(knows)}`" if knows else "export the weights: `moec export`")


@pytest.mark.parametrize("engine", ENGINES)
def test_dense_weights_are_named_too(models: dict[str, ModelSpec], engine: str) -> None:
    """Attention, shared experts and plain layers as in the bundle; routers, which the engines keep, have no rule."""
    model = models["qwen2_moe"]
    plain = mixed_plan(model, ["q4g32"])
    dense = {
        name: QuantSpec.parse("q8g32") if len(shape) == 2 and not name.endswith("router") else BF16
        for name, shape in model.dense_shapes().items()
    }
    plan = coarse_plan(engine, replace(plain, dense=dense))
    text = engine_file(plan, "plan.py")
    routed, flat = model.expert_layers[0], min(set(range(model.num_layers)) - set(model.expert_layers))
    if engine == LLAMA_CPP:
        for name in (f"blk.{flat}.attn_q", f"blk.{flat}.ffn_up", f"blk.{routed}.ffn_up_shexp", "token_embd"):
            assert llama_type(text, f"{name}.weight") == "q8_0"
        assert llama_type(text, f"blk.{routed}.ffn_gate_inp.weight") is None
    elif engine == MLX:
        assert mlx_settings(text, f"model.layers.{flat}.self_attn.q_proj", 64) == {"group_size": 64, "bits": 8}
        assert mlx_settings(text, f"model.layers.{flat}.self_attn.q_proj", 96) is False
        for kept in ("mlp.gate", "mlp.shared_expert_gate"):
            assert mlx_settings(text, f"model.layers.{routed}.{kept}", 64) is False
    else:
        expected = {"bits": 8, "group_size": 32, "sym": True}
        for name in (f"{flat}.self_attn.q_proj", f"{flat}.mlp.up_proj", f"{routed}.mlp.shared_expert.up_proj"):
            assert dynamic_settings(text, f"model.layers.{name}") == expected
        assert dynamic_settings(text, f"model.layers.{routed}.mlp.gate") is None
        assert plan.dense["embedding"].name == "bf16"


def sized(model: ModelSpec, hidden: int, width: int) -> ModelSpec:
    layers = tuple(replace(layer, experts=replace(layer.experts, width=width)) for layer in model.layers)
    return replace(model, hidden_size=hidden, layers=layers)


def sized_mixtral(columns: int) -> ModelSpec:
    """A model without a checkpoint whose experts have so many columns."""
    experts = ExpertsSpec(4, 2, columns, "silu", RouterSpec("softmax", True))
    return ModelSpec("mixtral", columns, 64, 64, 1e-5, False, (LayerSpec(AttentionSpec(4, 4, 64, None), experts),))


SPECS = ["q1g64b", "q1.6g128s", "q2g128b", "q2g32b", "q3g64b", "q4g64b", "q4g128", "q5g64b", "q6g64", "q8g128", "bf16"]


@given(
    draw=st.data(),
    engine=st.sampled_from(ENGINES),
    hidden=st.sampled_from([256, 384, 512]),
    width=st.sampled_from([128, 256, 640]),
)
def test_any_plan_is_named_and_fits_the_bytes(
    models: dict[str, ModelSpec], draw: st.DataObject, engine: str, hidden: int, width: int
) -> None:
    model = sized(models["mixtral"], hidden, width)
    plan = plain_plan(model, BF16, "gptq")
    units = {unit: QuantSpec.parse(draw.draw(st.sampled_from(SPECS))) for unit in plan.units}
    if draw.draw(st.booleans()):
        units |= {unit: QuantSpec(PRUNED) for unit in units if unit.layer == 0 and unit.expert == 1}
    found = coarse_plan(engine, replace(plan, units=units))
    check_units(found)
    ours = found.in_our_formats()
    assert abs(ours.bits_per_weight - found.bits_per_weight) < 0.2
    if engine == GPTQMODEL:
        for unit, spec in units.items():
            own = found.units[unit].settings
            if spec.bitwidth in (2, 3, 4, 8):
                assert (own["bits"], own["group_size"]) == (spec.bitwidth, spec.group_size)
        return
    smallest = [
        min(
            each.bits
            for each in stack_formats(engine, found.plan)
            if each.fits(model.unit_shape(unit.layer, unit.projection)[1])
        )
        for unit in units
    ]
    is_least = [each.bits for each in found.units.values()] == smallest
    assert is_least or found.expert_bytes <= found.plan.expert_packed_bytes


def test_the_bytes_of_llama_cpp_are_those_of_its_blocks(models: dict[str, ModelSpec]) -> None:
    model = sized(models["mixtral"], 512, 256)
    plan = coarse_plan(LLAMA_CPP, mixed_plan(model, SPECS))
    total = 0
    for unit, each in plan.units.items():
        rows, columns = model.unit_shape(unit.layer, unit.projection)
        width, size = BLOCKS[each.name]
        assert columns % width == 0
        total += rows * columns // width * size
    assert plan.expert_bytes == total


@pytest.mark.parametrize("columns", [256, 1024, 4096])
def test_stand_ins_have_about_the_bits_of_the_engine(columns: int) -> None:
    plan = mixed_plan(sized_mixtral(columns), ["mxfp4"])
    formats = [each for engine in (LLAMA_CPP, MLX) for each in stack_formats(engine, plan)]
    texts = ["q2g32b", "q2g64b", "q2g128b", "q3g32b", "q3g64b", "q3g128b", "q4g32b", "q4g64b", "q4g128", "q8g64"]
    formats += [gptqmodel_format(QuantSpec.parse(text), columns, BF16) for text in texts]
    assert len(formats) > 30
    for each in formats:
        assert abs(each.bits - each.stand_in.bits_per_weight(columns)) < 0.13, each


def test_a_stack_with_more_bits_in_the_bundle_has_no_fewer_in_the_engine(models: dict[str, ModelSpec]) -> None:
    model = sized(models["mixtral"], 512, 512)
    plain = plain_plan(model, BF16, "gptq")
    specs = {"gate": "q2g64b", "up": "q3g64b", "down": "q4g64b"}
    plan = replace(plain, units={unit: QuantSpec.parse(specs[unit.projection]) for unit in plain.units})
    for engine in (LLAMA_CPP, MLX):
        bits = {unit.projection: each.bits for unit, each in coarse_plan(engine, plan).units.items()}
        assert bits["gate"] < bits["up"] < bits["down"]


def test_predicted_losses_decide_where_they_are_known(models: dict[str, ModelSpec]) -> None:
    """All stacks have equal bits in the bundle, and only one is sensitive."""
    model = sized(models["mixtral"], 512, 512)
    plan = mixed_plan(model, ["q3g64b"])

    def predicted(unit: UnitKey, spec: QuantSpec) -> float:
        weight = 100.0 if (unit.layer, unit.projection) == (0, "down") else 1.0
        return weight * float(4.0**-spec.bitwidth)

    found = coarse_plan(LLAMA_CPP, plan, predicted)
    sensitive = found.units[UnitKey(0, 0, "down")].bits
    others = {each.bits for unit, each in found.units.items() if (unit.layer, unit.projection) != (0, "down")}
    assert sensitive > max(others) and found.expert_bytes <= plan.expert_packed_bytes


def test_mxfp4_experts_stay_mxfp4(models: dict[str, ModelSpec]) -> None:
    plan = mixed_plan(models["gpt_oss"], ["mxfp4"])
    assert {each.name for each in coarse_plan(LLAMA_CPP, plan).units.values()} == {"mxfp4"}
    found = {json.dumps(dict(each.settings)) for each in coarse_plan(MLX, plan).units.values()}
    assert found == {'{"group_size": 32, "bits": 4, "mode": "mxfp4"}'}


def test_what_an_engine_cannot_express_is_said(models: dict[str, ModelSpec]) -> None:
    plan = mixed_plan(sized(models["mixtral"], 256, 256), ["q1.6g128s"], pruned=(1, 2))
    facts = {engine: summary(coarse_plan(engine, plan), None) for engine in ENGINES}
    for engine, found in facts.items():
        assert found["left_out"] == 2 and f"{engine} cannot leave any out" in found["notes"][0]
    assert "smallest format of their layer" in facts[GPTQMODEL]["notes"][0]
    assert "importance data for iq1" in facts[LLAMA_CPP]["notes"][1]
    assert "mlx has no smaller formats" in facts[MLX]["notes"][1]
    assert "next larger bitwidth" in facts[GPTQMODEL]["notes"][1]
    versions = replace(plan, low_units={UnitKey(1, 0, p): QuantSpec.parse("q1g64b") for p in ("gate", "up", "down")})
    assert "second versions of 1 experts" in summary(coarse_plan(MLX, versions), None)["notes"][1]


def test_experts_that_are_left_out_get_the_smallest_format_of_their_layer(models: dict[str, ModelSpec]) -> None:
    plan = mixed_plan(sized(models["mixtral"], 256, 256), ["q4g64b", "q3g64b", "q8g64", "q2g64b"], pruned=(1,))
    found = coarse_plan(GPTQMODEL, plan)
    assert {found.units[UnitKey(0, 1, p)].name for p in ("gate", "up", "down")} == {"2g64"}


def test_the_predicate_names_its_own_file(models: dict[str, ModelSpec]) -> None:
    plan = coarse_plan(MLX, mixed_plan(models["mixtral"], ["q4g32"]))
    assert "from plan import quant_predicate" in engine_file(plan, "plan.py")
    hostile = engine_file(plan, 'x"""; import os #.py')
    assert "import os" not in hostile and mlx_settings(hostile, "lm_head", 64) is False
