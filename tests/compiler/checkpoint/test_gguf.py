"""Models in GGUF files: equal to the Hugging Face folder that they came from, and nothing else is believed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from moec.cli.main import cli
from moec.compiler.checkpoint.checkpoint import Checkpoint
from moec.compiler.checkpoint.gguf.blocks import BLOCKS, block_weight
from moec.compiler.checkpoint.gguf.header import GgufHead, read_head
from moec.compiler.checkpoint.gguf.open_gguf import end_tokens, open_gguf
from moec.compiler.checkpoint.integer_codes import IntegerCodes
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import describe, lower
from moec.compiler.families.lowering import Lowering
from moec.compiler.fit.config_file import open_config
from moec.compiler.preflight.preflight import preflight
from moec.compiler.quantization.own_codes import dense_matrices, exact_matrices, hold_codes
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.targets import choose_target
from moec.compiler.request.uniform import requested_plan
from moec.manifests.errors import CheckpointError
from moec.manifests.model import PROJECTIONS
from moec.manifests.quant import QuantSpec
from moec.runtime import load
from tests.tiny_models import save_tiny_mixtral, save_tiny_olmoe, save_tiny_qwen3_moe

Types = gguf.GGMLQuantizationType
TOKENS = list(range(4, 40))
SAVED: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "olmoe": ("olmoe", save_tiny_olmoe),
    "qwen3moe": ("qwen3_moe", partial(save_tiny_qwen3_moe, norm_topk_prob=True)),
    "llama": ("mixtral", save_tiny_mixtral),
}
LAYER = {
    "attention_norm": "attn_norm", "query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output",
    "query_norm": "attn_q_norm", "key_norm": "attn_k_norm", "experts_norm": "ffn_norm", "router": "ffn_gate_inp",
}  # fmt: skip
OUTER = {"embedding": "token_embd", "final_norm": "output_norm", "lm_head": "output"}


def in_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in the order that llama.cpp's converter gives those of Llama."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def write(
    folder: Path, target: Path, architecture: str, kind: Any = Types.F16, dense: Any = Types.F32, **changes: Any
) -> Lowering:
    """Write a checkpoint as llama.cpp's converter does, its experts in a type. Return its translation.

    dense: type of matrices outside the experts.
    """
    lowering = lower(open_checkpoint(str(folder)))
    model, config = lowering.model, json.loads((folder / "config.json").read_text())
    attention, experts = model.attentions[0], model.layers[0].experts
    writer = gguf.GGUFWriter(target, architecture)
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(config.get("intermediate_size") or experts.width)
    writer.add_expert_feed_forward_length(experts.width)
    writer.add_head_count(attention.num_heads)
    writer.add_head_count_kv(attention.num_kv_heads)
    writer.add_key_length(attention.head_size)
    assert attention.rope is not None
    writer.add_rope_freq_base(attention.rope.theta)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_expert_count(experts.count)
    writer.add_expert_used_count(experts.top_k)
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    listed = sorted(tokens, key=lambda token: int(tokens[token]))
    listed += [f"[PAD{number}]" for number in range(len(listed), model.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("pre", "gpt-2"))
    writer.add_token_list(listed)
    writer.add_eos_token_id(2)
    for key, value in changes.items():
        {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}[type(value)](key, value)
    for name in model.dense_shapes():
        weight = lowering.dense_weight(name).float().numpy()
        outer = OUTER.get(name)
        block, last = ("", "") if outer else (name.split(".")[1], name.split(".")[2])
        if architecture == "llama" and last in ("query", "key"):
            weight = in_pairs(weight, attention.num_heads if last == "query" else attention.num_kv_heads)
        form = dense if weight.ndim == 2 and last != "router" else Types.F32
        named = f"{outer or f'blk.{block}.{LAYER[last]}'}.weight"
        writer.add_tensor(named, gguf.quantize(weight, form), raw_dtype=form)
    for layer in range(model.num_layers):
        for projection in PROJECTIONS:
            keys = [unit for unit in model.units_of_layer(layer) if unit.projection == projection]
            stack = np.stack([lowering.unit(unit).float().numpy() for unit in keys])
            writer.add_tensor(f"blk.{layer}.ffn_{projection}_exps.weight", gguf.quantize(stack, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return lowering


@pytest.fixture(scope="module", params=sorted(SAVED))
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, SAVED[request.param][1](tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_olmoe(tmp_path_factory.mktemp("olmoe") / "model")


def opened(path: Path) -> Checkpoint:
    return open_gguf(path, cache=path.parent / "cache")


def test_a_file_is_the_model_that_it_came_from(source: tuple[str, Path], tmp_path: Path) -> None:
    architecture, folder = source
    expected = write(folder, tmp_path / "model.gguf", architecture, Types.F32)
    found = lower(opened(tmp_path / "model.gguf"))
    assert found.model.family == SAVED[architecture][0]
    assert found.model.layers == expected.model.layers
    assert found.model.dense_shapes() == expected.model.dense_shapes()
    for name in expected.dense:
        assert torch.equal(found.dense_weight(name).float(), expected.dense_weight(name).float()), name
    for unit in expected.units:
        assert torch.equal(found.unit(unit).float(), expected.unit(unit).float()), unit


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_are_kept_to_the_last_bit(olmoe: Path, tmp_path: Path, kind: str) -> None:
    write(olmoe, tmp_path / "model.gguf", "olmoe", Types[kind])
    head, lowering = read_head(tmp_path / "model.gguf"), lower(opened(tmp_path / "model.gguf"))
    assert lowering.checkpoint.precision == f"GGUF {kind}"
    needs = lowering.code_needs()
    assert set(needs) == set(lowering.units)
    raw = np.fromfile(tmp_path / "model.gguf", np.uint8)
    for unit in list(lowering.units)[:6]:
        tensor = head.tensors[f"blk.{unit.layer}.ffn_{unit.projection}_exps.weight"]
        blocks = raw[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        one = blocks.reshape(tensor.shape[0], tensor.shape[1], -1)[unit.expert]
        expected = torch.from_numpy(gguf.dequantize(one, Types[kind]))
        spec = needs[unit].least_format()
        assert spec is not None and str(spec).startswith(f"q{kind[1]}g32")
        (held,) = exact_matrices(lowering, unit, [spec]).values()
        assert torch.equal(held.dequantize().float(), expected)
        assert torch.equal(lowering.unit(unit).float(), expected.half().float())
        codes = lowering.unit_codes(unit)
        assert codes is not None and torch.equal(codes.grid.values(codes.codes), expected)
        assert not needs[unit].is_met_by(QuantSpec(3, 32, symmetric=True))


def test_rows_are_decoded_alone(olmoe: Path, tmp_path: Path) -> None:
    write(olmoe, tmp_path / "model.gguf", "olmoe", Types.Q8_0)
    checkpoint = opened(tmp_path / "model.gguf")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert torch.equal(checkpoint.tensor(name, rows=(3, 9)), checkpoint.tensor(name)[3:9])


def test_a_path_that_ends_in_gguf_is_opened_as_such(
    olmoe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(olmoe, tmp_path / "model.gguf", "olmoe")
    checkpoint = open_checkpoint(str(tmp_path / "model.gguf"))
    assert checkpoint.name == "model" and checkpoint.config["eos_token_id"] == [2]
    assert {"config.json", "tokenizer.json"} <= set(checkpoint.companion_files())
    assert "model.gguf" in {entry.name for entry in checkpoint.source_files()}
    (tmp_path / "tokenizer.json").write_bytes((olmoe / "tokenizer.json").read_bytes())
    again = open_checkpoint(str(tmp_path / "model.gguf"))
    assert (again.root / "tokenizer.json").read_bytes() == (olmoe / "tokenizer.json").read_bytes()


def test_a_compile_of_a_file_keeps_its_codes(olmoe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    lowering = write(olmoe, tmp_path / "model.gguf", "olmoe", Types.Q4_0)
    options = ["--keep-codes", "--dense-bits", "16", "--device", "raspberry-pi-4b-sd"]
    result = CliRunner().invoke(cli, ["compile", "model.gguf", *options])
    assert result.exit_code == 0, result.stderr
    quality = json.loads((tmp_path / "model-moec" / "quality.json").read_text())
    assert quality["own_codes"] == {"held": len(lowering.units), "of": len(lowering.units)}
    assert quality["baseline_precision"] == "GGUF Q4_0"
    with load(tmp_path / "model-moec", expert_cache="100%") as engine:
        found = engine.logits(TOKENS)
    model = AutoModelForCausalLM.from_pretrained(olmoe, dtype=torch.float32)
    for block in model.model.layers:
        for stack in (block.mlp.experts.gate_up_proj, block.mlp.experts.down_proj):
            blocks = gguf.quantize(stack.detach().numpy(), Types.Q4_0)
            stack.data = torch.from_numpy(gguf.dequantize(blocks, Types.Q4_0))
    expected = model(torch.tensor([TOKENS])).logits[0].detach().numpy()
    # Activations have 8 bits, which may send a token to other experts: few tokens differ by more.
    errors = np.abs(found - expected).max(1) / np.abs(expected).max()
    assert np.median(errors) <= 0.03


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_codes_of_large_blocks_are_kept_and_their_scales_rounded(kind: str) -> None:
    """gguf cannot write these types, so the blocks are random."""
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (3, 2 * gguf.GGML_QUANT_SIZES[Types[kind]][1]), np.uint8)
    for block in (0, 1):
        halves = blocks.view(np.float16).reshape(3, 2, -1)
        halves[:, block, :2] = draw.uniform(1e-4, 1e-2, (3, 2))
    weight = block_weight("w", (3, 512), kind)
    expected = torch.from_numpy(gguf.dequantize(blocks, Types[kind]))
    parts = {BLOCKS: torch.from_numpy(blocks)}
    assert weight.integers is not None and weight.integers.need is not None
    codes, grid = weight.integers.codes(parts), weight.integers.grid(parts)
    assert torch.equal(grid.values(codes), expected)
    spec = weight.integers.need.least_format()
    assert str(spec) == f"q{kind[1]}g32" and spec is not None and weight.integers.need.rounds_scales
    held = hold_codes(IntegerCodes(codes, grid), spec)
    assert torch.equal(held.codes, codes)
    assert grid.minima is not None
    step, least = (numbers.repeat_interleave(32, 1) for numbers in (grid.scales, grid.minima))
    assert ((held.dequantize().float() - expected).abs() <= 0.02 * step + 2**-11 * least.abs()).all()


def test_every_weight_of_a_file_takes_its_least_format(
    olmoe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense weights too. What no format holds takes 8 bits."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(olmoe, tmp_path / "model.gguf", "olmoe", Types.Q5_1)
    lowering = lower(opened(tmp_path / "model.gguf"))
    options = CompileOptions(target=choose_target(None, None, None, None, None, keep_codes=True))
    plan = requested_plan(options, lowering)
    assert set(map(str, plan.units.values())) == {"q5g32"}
    write(olmoe, tmp_path / "model.gguf", "olmoe", Types.Q8_0, dense=Types.Q4_0)
    lowering = lower(opened(tmp_path / "model.gguf"))
    plan = requested_plan(options, lowering)
    assert set(map(str, plan.units.values())) == {"q8g32s"} and str(plan.dense["embedding"]) == "q4g32s"
    (matrix,) = dense_matrices(lowering, "embedding", plan.dense["embedding"])
    assert torch.equal(matrix.dequantize().half(), lowering.dense_weight("embedding"))
    write(olmoe, tmp_path / "model.gguf", "olmoe", Types.Q4_0)
    data, name = bytearray((tmp_path / "model.gguf").read_bytes()), b"blk.0.ffn_up_exps.weight"
    struct.pack_into("<I", data, data.index(name) + len(name) + 4 + 3 * 8, Types.IQ4_NL)  # as large as Q4_0
    (tmp_path / "model.gguf").write_bytes(data)
    plan = requested_plan(options, lower(opened(tmp_path / "model.gguf")))
    assert {str(spec) for unit, spec in plan.units.items() if unit.layer == 0 and unit.projection == "up"} == {"q8g32s"}


def test_a_file_without_codes_has_none_to_keep(olmoe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    write(olmoe, tmp_path / "model.gguf", "olmoe", Types.F16)
    result = CliRunner().invoke(cli, ["compile", "model.gguf", "--keep-codes", "--device", "raspberry-pi-4b-sd"])
    assert result.exit_code and "no format below 16 bits holds an expert of `model`" in result.stderr
    assert not (tmp_path / "model-moec").exists()


def test_a_dense_model_is_named_as_such(olmoe: Path, tmp_path: Path) -> None:
    write(olmoe, tmp_path / "model.gguf", "olmoe")
    data = (tmp_path / "model.gguf").read_bytes().replace(b"olmoe.expert_count", b"olmoe.expert_c0unt")
    (tmp_path / "model.gguf").write_bytes(data)
    for open_file in (opened, lambda path: open_config(str(path))):
        with pytest.raises(CheckpointError, match="is a dense model"):
            open_file(tmp_path / "model.gguf")


def test_layers_for_drafts_are_left_out(olmoe: Path, tmp_path: Path) -> None:
    expected = write(olmoe, tmp_path / "model.gguf", "olmoe", **{"olmoe.nextn_predict_layers": 1})
    found = lower(opened(tmp_path / "model.gguf"))
    assert found.model.num_layers == expected.model.num_layers - 1
    preflight(found)


def test_two_16_bit_types_become_one(olmoe: Path, tmp_path: Path) -> None:
    expected = write(olmoe, tmp_path / "model.gguf", "olmoe", Types.F16, dense=Types.BF16)
    found = lower(opened(tmp_path / "model.gguf"))
    assert found.float_type == "float16" and not found.checkpoint.precision
    weight = expected.dense_weight("layers.0.query").bfloat16().half()
    assert torch.equal(found.dense_weight("layers.0.query"), weight)


def test_end_tokens_are_those_of_the_keys_and_of_known_texts(tmp_path: Path) -> None:
    keys = {"eos_token_id": 3, "eos_token_ids": [3, 7], "tokens": ["a", "<turn|>", "b", "<eos>"]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert end_tokens(GgufHead(tmp_path, metadata, {})) == {"eos_token_id": [3, 7, 1]}


def test_a_stack_holds_one_matrix_for_each_expert(olmoe: Path, tmp_path: Path) -> None:
    write(olmoe, tmp_path / "model.gguf", "olmoe")
    data, key = bytearray((tmp_path / "model.gguf").read_bytes()), b"olmoe.expert_count"
    (tmp_path / "model.gguf").write_bytes(_put(data, data.index(key) + len(key) + 4, "I", 5))
    with pytest.raises(CheckpointError, match="expected a stack of 5 matrices"):
        opened(tmp_path / "model.gguf")


def test_a_head_alone_describes_the_model(olmoe: Path, tmp_path: Path) -> None:
    expected = write(olmoe, tmp_path / "model.gguf", "olmoe", Types.Q4_0)
    files = open_config(str(tmp_path / "model.gguf"))
    assert describe(files).layers == expected.model.layers
    assert 0 < (files.stored_bytes or 0) < (tmp_path / "model.gguf").stat().st_size


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pre": "unheard-of"}, "splits text as `unheard-of`"),
        ({"olmoe.rope.scaling.type": "longrope"}, "`olmoe.rope.scaling.type` longrope, which is not read yet"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    olmoe: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    write(olmoe, tmp_path / "model.gguf", "olmoe", **changes)
    with pytest.raises(CheckpointError) as refused:
        opened(tmp_path / "model.gguf")
    assert said in refused.value.message and refused.value.hint


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-2", ["a", " 12345", "b", "!", " c"]),
        ("glm4", ["a", " ", "123", "45", "b", "!", " c"]),
        ("deepseek-v3", ["a", " ", "123", "45", "b", "!", " c"]),
        ("refact", ["a", " ", "1", "2", "3", "4", "5", "b", "!", " c"]),
    ],
)
def test_text_is_split_as_the_file_says(olmoe: Path, tmp_path: Path, split: str, pieces: list[str]) -> None:
    write(olmoe, tmp_path / "model.gguf", "olmoe", pre=split)
    tokenizer = Tokenizer.from_file(str(opened(tmp_path / "model.gguf").root / "tokenizer.json"))
    text = "a 12345b! c"
    found = [text[start:stop] for _, (start, stop) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


def _cut(data: bytearray, size: int) -> bytearray:
    return data[:size]


def _put(data: bytearray, at: int, form: str, value: int) -> bytearray:
    struct.pack_into(f"<{form}", data, at, value)
    return data


DAMAGES: dict[str, Callable[[bytearray], bytearray]] = {
    **{f"cut at {size}": (lambda data, size=size: _cut(data, size)) for size in (0, 3, 7, 20, 24, 30, 100, 1000, -1)},
    "magic": lambda data: _put(data, 0, "I", 1),
    "version 1": lambda data: _put(data, 4, "I", 1),
    "other byte order": lambda data: _put(data, 4, "I", 3 << 24),
    "2^63 tensors": lambda data: _put(data, 8, "Q", 1 << 63),
    "no tensors": lambda data: _put(data, 8, "Q", 0),
    "one tensor more": lambda data: _put(data, 8, "Q", struct.unpack_from("<Q", data, 8)[0] + 1),
    "2^63 keys": lambda data: _put(data, 16, "Q", 1 << 63),
    "no keys": lambda data: _put(data, 16, "Q", 0),
    "a key of 2^60 bytes": lambda data: _put(data, 24, "Q", 1 << 60),
    "another architecture": lambda data: data.replace(b"olmoe", b"xlmoe"),
    "no UTF-8": lambda data: data.replace(b"general.architecture", b"general.architectur\xff"),
    "a key twice": lambda data: data.replace(b"olmoe.expert_used_count", b"olmoe.embedding_length\0"[:23]),
    "tensor twice": lambda data: data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"),
    "unknown tensor": lambda data: data.replace(b"blk.0.attn_k.weight", b"blk.9.attn_k.weight"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_ends_with_one_sentence(olmoe: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model.gguf"
    write(olmoe, path, "olmoe", Types.Q4_0)
    path.write_bytes(DAMAGES[damage](bytearray(path.read_bytes())))
    with pytest.raises(CheckpointError) as refused:
        preflight(lower(opened(path)))
    assert refused.value.hint or "missing tensor" in refused.value.message
    assert "Traceback" not in refused.value.message


def test_any_damaged_byte_of_the_head_is_refused_or_read(olmoe: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(olmoe, path, "olmoe", Types.Q4_0)
    whole, generator = path.read_bytes(), np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        for at in generator.integers(0, 4000, 3):
            data[at] = int(generator.integers(256))
        path.write_bytes(data)
        try:
            read_head(path)
        except CheckpointError as error:
            assert error.hint


def test_parts_of_a_set_must_be_there(olmoe: Path, tmp_path: Path) -> None:
    write(olmoe, tmp_path / "model-00001-of-00002.gguf", "olmoe")
    with pytest.raises(CheckpointError, match=r"`model-00002-of-00002\.gguf` is missing"):
        read_head(tmp_path / "model-00001-of-00002.gguf")
    (tmp_path / "model-00002-of-00002.gguf").write_bytes((tmp_path / "model-00001-of-00002.gguf").read_bytes())
    with pytest.raises(CheckpointError, match="which another file holds too"):
        read_head(tmp_path / "model-00001-of-00002.gguf")
