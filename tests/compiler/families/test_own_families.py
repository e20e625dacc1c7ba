"""DeepSeekMoE and MiniCPM-MoE, which transformers lacks: names, settings, and the whole compile."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME, Checkpoint
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.families import lower
from moec.compiler.preflight.preflight import preflight
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.errors import CheckpointError
from moec.manifests.model import PROJECTIONS
from moec.runtime.text.template_process import render_chat
from tests.compiler.lowered import configured, lowered, swept, walked_logits
from tests.exact_runs import check_exact
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.oracles.models import load_oracle
from tests.tiny_compile import compile_tiny, contents, save_texts
from tests.tiny_models import VOCABULARY

pytestmark = pytest.mark.oracle

TEXTS = [("a lamp near a ", "box"), ("seven green pens and ", "two red ones"), ("tall", " of the box under")]
TOKENS = np.random.default_rng(4).integers(4, 260, 40).tolist()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ eos_token }}"
CHOSEN = ("deepseek-every-other", "minicpm")
ROUTED_LAYERS = {"deepseek-every-other": (2, 4), "minicpm": (0, 1, 2)}


@pytest.fixture(scope="module", params=CHOSEN)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_own_family(tmp_path_factory.mktemp("own") / request.param, OWN_FAMILIES[request.param])


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_own_family(tmp_path / "copy", OWN_FAMILIES[request.param])


# -- names and settings ----------------------------------------------------------------------------------------------


def test_every_tensor_is_read_under_its_name(folder: Path) -> None:
    lowering, on_disk = lowered(folder), load_file(folder / WEIGHTS_NAME)
    assert lowering.model.expert_layers == ROUTED_LAYERS[folder.name]
    is_minicpm = folder.name == "minicpm"
    names = ("w1", "w3", "w2") if is_minicpm else ("gate_proj", "up_proj", "down_proj")
    of = dict(zip(("gate", "up", "down"), names, strict=True))
    for key in lowering.units:
        name = f"model.layers.{key.layer}.mlp.experts.{key.expert}.{of[key.projection]}.weight"
        assert torch.equal(lowering.unit(key), on_disk[name]), key
    dense = {"layers.2.router": "model.layers.2.mlp.gate.weight", "embedding": "model.embed_tokens.weight"}
    if not is_minicpm:
        dense |= {"layers.2.shared_up": "model.layers.2.mlp.shared_experts.up_proj.weight"}
        dense |= {"layers.1.shared_down": "model.layers.1.mlp.down_proj.weight"}
    for name, own in dense.items():
        assert torch.equal(lowering.dense_weight(name), on_disk[own]), name
    read = {source.name for source in (*lowering.dense.values(), *lowering.units.values())}
    assert read == set(on_disk)


def test_deepseek_is_what_its_configuration_says(tmp_path: Path) -> None:
    model = lowered(save_own_family(tmp_path / "one", OWN_FAMILIES["deepseek"])).model
    plain, routed = model.layers[:2]
    assert (model.family, model.expert_layers, model.tie_embeddings) == ("deepseek", (1, 2), False)
    assert (routed.experts.count, routed.experts.top_k, routed.experts.width) == (8, 4, 64)
    assert routed.shared is not None and (routed.shared.width, routed.shared.has_gate) == (128, False)
    assert plain.shared is not None and plain.shared.width == 96
    assert (routed.experts.router.scoring, routed.experts.router.renormalize) == ("softmax", False)
    one = lowered(save_own_family(tmp_path / "two", OWN_FAMILIES["deepseek-top1-half"])).model
    # The published code divides by the sum only if it chooses more than one expert.
    assert not one.layers[0].experts.router.renormalize and one.layers[0].shared is None
    assert one.layers[0].attention.rope == model.layers[0].attention.rope, "10,000 is the base that is not said"


def test_minicpm_is_what_its_configuration_says(tmp_path: Path) -> None:
    model = lowered(save_own_family(tmp_path / "one", OWN_FAMILIES["minicpm"])).model
    assert (model.family, model.tie_embeddings, model.embedding_scale) == ("minicpm", True, 12)
    assert (model.residual_scale, model.logits_scale) == (pytest.approx(1.4 / math.sqrt(3)), 16 / 64)
    experts = model.layers[0].experts
    assert (experts.count, experts.top_k, experts.width, experts.router.renormalize) == (6, 2, 96, True)


# config.json of deepseek-moe-16b-chat, and that of MiniCPM-2B with eight experts, the origin of MiniCPM-MoE-8x2B.
PUBLISHED = {
    "deepseek": {
        "architectures": ["DeepseekForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 4096,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
        "num_key_value_heads": 16, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 10000, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.2", "use_cache": True, "vocab_size": 102400,
    },
    "minicpm": {
        "architectures": ["MiniCPMForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}, "hidden_size": 2304,
        "initializer_range": 0.1, "intermediate_size": 5760, "max_position_embeddings": 4096, "num_attention_heads": 36,
        "num_hidden_layers": 40, "num_key_value_heads": 36, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True, "vocab_size": 122753,
        "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "num_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "billions", "gigabytes"), [("deepseek", 16.4, (32.7, 32.8)), ("minicpm", 13.9, (27.65, 27.75))]
)
def test_published_models_have_the_sizes_of_their_files(
    family: str, billions: float, gigabytes: tuple[float, float]
) -> None:
    """At 16 bits per weight: six files of 5 GB and one of 2.77 GB, and one of 27.7 GB with one matrix of embeddings."""
    config = {**PUBLISHED[family], "model_type": family}
    model = lower(Checkpoint(Path("none"), "none", config, {}, {})).model
    weights = sum(math.prod(shape) for shape in model.dense_shapes().values())
    for layer in model.expert_layers:
        each = sum(math.prod(model.unit_shape(layer, projection)) for projection in PROJECTIONS)
        weights += model.layers[layer].experts.count * each
    assert round(weights / 1e9, 1) == billions
    assert gigabytes[0] <= 2 * weights / 1e9 <= gigabytes[1]


@pytest.mark.parametrize(
    ("copy", "changes", "message"),
    [
        ("deepseek", {"scoring_func": "sigmoid"}, "key `scoring_func`: expected `softmax`"),
        ("deepseek", {"first_k_dense_replace": 3}, "key `first_k_dense_replace`: expected fewer layers than the 3"),
        ("deepseek", {"first_k_dense_replace": False}, "key `first_k_dense_replace`: expected fewer layers than the 3"),
        ("deepseek", {"moe_layer_freq": 0}, "key `moe_layer_freq`: expected a whole number"),
        ("deepseek", {"norm_topk_prob": 1}, "key `norm_topk_prob`: expected true or false"),
        ("deepseek", {"n_routed_experts": ...}, "key `n_routed_experts`: expected a whole number"),
        ("deepseek", {"num_experts_per_tok": 9}, "contradicts itself: top_k must be 1 to 8, found 9"),
        ("deepseek", {"n_shared_experts": -1}, "key `n_shared_experts`: expected a whole number"),
        ("deepseek", {"attention_bias": True}, "key `attention_bias`: expected `False`"),
        ("deepseek", {"hidden_act": "gelu"}, "key `hidden_act`: expected one of `silu`"),
        ("deepseek", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "key `rope_scaling`: expected rope type"),
        (
            "deepseek",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
            "key `rope_scaling`: expected rope type `linear` or null",
        ),
        ("deepseek", {"rope_scaling": {"type": "linear"}}, "key `rope_scaling`: expected parameters that transformers"),
        ("deepseek", {"head_dim": 32}, "key `head_dim`: expected hidden_size divided by"),
        ("deepseek", {"partial_rotary_factor": 0.5}, "key `partial_rotary_factor`: expected 1"),
        ("deepseek", {"q_lora_rank": 8}, "unknown: q_lora_rank"),
        ("minicpm", {"num_experts": ...}, "key `num_experts`: expected a whole number"),
        ("minicpm", {"num_experts": 0}, "key `num_experts`: expected a whole number"),
        ("minicpm", {"scale_emb": ...}, "key `scale_emb`: expected a positive number, found nothing"),
        ("minicpm", {"scale_depth": ...}, "key `scale_depth`: expected a positive number, found nothing"),
        ("minicpm", {"dim_model_base": 0}, "key `dim_model_base`: expected a positive number"),
        ("minicpm", {"hidden_act": "relu"}, "key `hidden_act`: expected one of `silu`"),
        ("minicpm", {"use_mup": False}, "unknown: use_mup"),
    ],
    indirect=["copy"],
)
def test_settings_that_cannot_be_expressed_are_named(copy: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        lowered(configured(copy, **changes))


@pytest.mark.parametrize("copy", ["minicpm"], indirect=True)
def test_a_tied_checkpoint_with_an_output_matrix(copy: Path) -> None:
    """The published code ties every output matrix. An equal one is left out, a different one is an error."""
    tensors = load_file(copy / WEIGHTS_NAME)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, copy / WEIGHTS_NAME)
    assert lowered(copy).model.tie_embeddings and "lm_head.weight" in lowered(copy).ignored
    save_file(tensors | {"lm_head.weight": embedding * 2}, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=r"key `tie_word_embeddings`: expected false, because `lm_head\.weight`"):
        lowered(copy)


# -- the layers ------------------------------------------------------------------------------------------------------


def test_statistics_are_those_of_the_oracle(folder: Path, tmp_path: Path) -> None:
    oracle, seen = load_oracle(folder), dict[int, list[np.ndarray]]()
    oracle.watch(lambda layer, chosen: seen.setdefault(layer, []).append(chosen.sort(-1).values.numpy()))
    lowering, pairs = lowered(folder), encode_pairs(load_tokenizer(folder), TEXTS)
    for prompt, answer in pairs:
        oracle(torch.tensor([prompt + answer]))
    found, spec = swept(lowering, pairs, tmp_path / "out.work")[0].statistics, lowering.model
    assert found is not None
    assert tuple(sorted(seen)) == spec.expert_layers
    chosen = {layer: np.concatenate(parts) for layer, parts in seen.items()}
    for layer in range(spec.num_layers):
        counts = np.bincount(chosen[layer].ravel(), minlength=found.popularity.shape[1]) if layer in chosen else 0
        assert np.array_equal(found.popularity[layer], np.broadcast_to(counts, found.popularity.shape[1:]))
    for layer, following in zip(spec.expert_layers, spec.expert_layers[1:], strict=False):
        expected = np.zeros(found.transitions.shape[1:], np.int64)
        for before, after in zip(chosen[layer], chosen[following], strict=True):
            np.add.at(expected, np.ix_(before, after), 1)
        assert np.array_equal(found.transitions[layer], expected)


def test_every_weight_is_exchanged_under_its_own_name(folder: Path) -> None:
    """With another weight the oracle computes the same as the layers."""
    lowering, oracle = lowered(folder), load_oracle(folder)
    slot, parameters = LoadedLayer(lowering), dict(oracle.named_parameters())
    names = [*lowering.dense, *list(lowering.units)[::5]]
    for name in names:
        if name == "final_norm":
            continue  # always the checkpoint's own
        own = parameters[(lowering.dense.get(name) or lowering.units[name]).name].data
        before, changed = own.clone(), own * 1.25 + 0.01
        own.copy_(changed)
        expected = oracle(torch.tensor([TOKENS]))[0]
        (found,) = walked_logits(lowering, [TOKENS], weights={name: changed}, slot=slot)
        assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max())), name
        own.copy_(before)


@pytest.mark.parametrize("copy", CHOSEN, indirect=True)
@pytest.mark.parametrize("is_missing", [True, False])
def test_a_weight_that_is_missing_or_has_another_shape_is_named(copy: Path, is_missing: bool) -> None:
    tensors, name = load_file(copy / WEIGHTS_NAME), "model.layers.2.mlp.gate.weight"
    other = tensors.pop(name)
    save_file(tensors if is_missing else tensors | {name: other[:-1].clone()}, copy / WEIGHTS_NAME)
    with pytest.raises(CheckpointError, match=f"{'missing' if is_missing else 'misshapen'} tensor `{name}`"):
        preflight(lowered(copy))


def test_code_of_a_checkpoint_is_never_run(folder: Path, tmp_path: Path) -> None:
    """config.json names Python files that are next to it on the hub."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    named = set(json.loads((copy / "config.json").read_text())["auto_map"].values())
    for place in named:
        (copy / f"{place.partition('.')[0]}.py").write_text("raise SystemExit('code of the checkpoint was run')\n")
    assert named and LoadedLayer(lowered(copy)).single.model.__module__.startswith("transformers.")


# -- the whole compile -----------------------------------------------------------------------------------------------


@pytest.mark.gate("G1")
@pytest.mark.gate("G2")
@pytest.mark.gate("G3")
def test_a_searched_bundle_runs_with_a_fraction_of_its_experts(folder: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(folder, tmp_path / "model"))
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    data = save_texts(tmp_path / "texts", test=8)
    result = compile_tiny(
        checkpoint, tmp_path / "out", "bits_per_weight", 4.5, data=data, tasks=("perplexity",), bits=(3, 4, 16)
    )
    assert len({spec.bitwidth for spec in result.plan.units.values()}) > 1
    kept = contents(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert kept[name] == (checkpoint / name).read_bytes(), name
    assert render_chat(tmp_path / "out", [{"role": "user", "content": "a lamp"}]) == "<user>a lamp</s>"
    assert check_exact(tmp_path / "out", TOKENS).shape == (len(TOKENS), VOCABULARY)
