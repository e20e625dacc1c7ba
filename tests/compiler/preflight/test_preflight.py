"""Preflight: one report with every problem, from headers only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from moec.cli.commands.compiling.compile import companion_problems
from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME, Checkpoint
from moec.compiler.preflight.preflight import preflight, reachable_bytes
from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import CheckpointError, PlanError, TargetUnreachable
from moec.manifests.quant import QuantSpec
from tests.compiler.lowered import lowered
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

OFFERED = tuple(QuantSpec.parse(text) for text in ("q2g32", "q4g32", "q4g64", "q8"))


def test_a_good_checkpoint_has_no_problems(folder: Path) -> None:
    report = preflight(lowered(folder), required=OFFERED[:2], offered=OFFERED, bits_per_weight=3.5, size_bytes=60_000)
    assert report == ()


def test_no_weight_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = lowered(folder)

    def refuse(*arguments: object) -> torch.Tensor:
        raise AssertionError("preflight reads shapes alone")

    monkeypatch.setattr(Checkpoint, "tensor", refuse)
    preflight(opened, offered=OFFERED, bits_per_weight=4)


def test_notes_say_what_is_rounded_and_what_is_left_out(tmp_path: Path) -> None:
    path = save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(dtype="float32"))
    tensors = load_file(path / WEIGHTS_NAME)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, path / WEIGHTS_NAME)
    notes = preflight(lowered(path))
    assert "rounded to bfloat16" in notes[0]
    assert notes[1] == "1 tensors play no part: `model.layers.0.self_attn.rotary_emb.inv_freq`"


def test_all_problems_come_in_one_report(copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS_NAME)
    for expert in range(4):
        del tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"]
    tensors["model.norm.weight"] = torch.ones(65).bfloat16()
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64).bfloat16()
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64).bfloat16()
    save_file(tensors, copy / WEIGHTS_NAME)
    (copy / TOKENIZER_NAME).unlink()
    with pytest.raises(CheckpointError) as caught:
        preflight(lowered(copy), required=[QuantSpec(4, 64), QuantSpec(3, 128), QuantSpec(2, 32)])
    lines = str(caught.value).splitlines()
    assert "has 6 problems:" in lines[0]
    assert lines[1:] == [
        "- missing tensor `model.layers.*.block_sparse_moe.experts.*.w1.weight` (4 times, first "
        "`model.layers.0.block_sparse_moe.experts.0.w1.weight`)",
        "- misshapen tensor `model.norm.weight`: expected shape [64], found [65]",
        "- unexpected tensor `model.layers.*.self_attn.q_proj.bias` (2 times, first "
        "`model.layers.0.self_attn.q_proj.bias`), which this family does not have",
        "- no `tokenizer.json`, expected a fast tokenizer next to the weights",
        "- q3g128: the group size (at least 32) does not divide the 64 columns of gate, up; "
        "group sizes that do: 64, 32",
        "- q4g64, q3g128: the group size (at least 32) does not divide the 96 columns of down; group sizes that do: 32",
    ]


def test_widths_that_only_sixteen_bits_fit(tmp_path: Path) -> None:
    path = save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(width=40))
    with pytest.raises(PlanError, match="does not divide the 40 columns of down; only 16 bits fit"):
        preflight(lowered(path), required=[QuantSpec(4)])
    with pytest.raises(PlanError, match=r"none of the offered formats \(q2g32, .*\) holds the 40 columns of down"):
        preflight(lowered(path), offered=OFFERED)
    preflight(lowered(path), required=[QuantSpec(16, float_type="bfloat16")], bits_per_weight=16)


@pytest.mark.parametrize("bits", [2.0, 2.66, 16.01])
def test_unreachable_bits_print_the_range(folder: Path, bits: float) -> None:
    # gate and up, 64 columns: 2.5 bits in q2g64; down, 96 columns: 3 bits in q2g32, which 64 does not divide
    opened, offered = lowered(folder), [QuantSpec.parse(text) for text in ("q2g32", "q2g64", "q4g64")]
    assert reachable_bytes(opened.model, offered)[0] == 8 * 96 * 64 * (2.5 + 2.5 + 3) / 8
    with pytest.raises(TargetUnreachable, match=r"bits per weight cannot be had, 2\.667 to 16 can"):
        preflight(opened, offered=offered, bits_per_weight=bits)
    model = opened.model
    kept = model.layers[0].experts.top_k / model.layers[0].experts.count
    assert reachable_bytes(model, offered, prunes=True)[0] == kept * reachable_bytes(model, offered)[0]
    for reachable in (2.667, 16.0):
        preflight(opened, offered=offered, bits_per_weight=reachable)


@pytest.mark.parametrize(("below", "names_pruning"), [(1, True), (10**9, False)])
def test_a_size_that_needs_pruning_names_it(folder: Path, below: int, names_pruning: bool) -> None:
    opened = lowered(folder)
    size = max(reachable_bytes(opened.model, OFFERED)[0] - below, 1)
    with pytest.raises(TargetUnreachable) as caught:
        preflight(opened, offered=OFFERED, size_bytes=size)
    assert ("`--prune-experts` with `--data` goes down to" in caught.value.message) == names_pruning
    least = reachable_bytes(opened.model, OFFERED, prunes=True)[0]
    bits = 8 * least / (reachable_bytes(opened.model, OFFERED)[1] // 2) + 0.01
    with pytest.raises(TargetUnreachable, match="`--prune-experts` with `--data` goes down to"):
        preflight(opened, offered=OFFERED, bits_per_weight=bits)
    with pytest.raises(TargetUnreachable) as pruned:
        preflight(opened, offered=OFFERED, size_bytes=1, prunes=True)
    assert "--prune-experts" not in pruned.value.message


@pytest.mark.parametrize("size", [1, 10**9])
def test_unreachable_sizes_print_the_range(folder: Path, size: int) -> None:
    least, greatest = reachable_bytes(lowered(folder).model, OFFERED)
    with pytest.raises(TargetUnreachable, match=f"{size} bytes of routed experts cannot be had, {least} to {greatest}"):
        preflight(lowered(folder), offered=OFFERED, size_bytes=size)
    for reachable in (least, greatest):
        preflight(lowered(folder), offered=OFFERED, size_bytes=reachable)


def test_group_sizes_that_fit_nothing_are_refused_and_widths_that_stay_at_16_bits_are_named(tmp_path: Path) -> None:
    plain = QuantSpec(16, float_type="bfloat16")
    opened = lowered(save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(hidden_size=64, width=96)))
    with pytest.raises(TargetUnreachable, match="group size 128 divides the columns of no routed projection"):
        preflight(opened, offered=[QuantSpec(4, 128), plain], group_sizes=[128])
    assert preflight(opened, offered=[QuantSpec(4, 32), plain], group_sizes=[32, 64, 0]) == ()
    notes = preflight(opened, offered=[QuantSpec(4, 64), plain], group_sizes=[64])
    assert notes == ("down stay at 16 bits: no format below on offer holds their 96 columns",)


def test_bits_that_fit_no_projection_are_named(tmp_path: Path) -> None:
    opened = lowered(save_tiny_mixtral(tmp_path / "tiny", TinyMixtral(hidden_size=64, width=96)))
    offered = [QuantSpec.parse(text) for text in ("q4g32", "q6g128", "q8g96", "q8g128", "bf16")]
    notes = preflight(opened, offered=offered)
    assert notes == ("6 bits are not used: q6g128 cannot hold rows of 64 or 96 weights",)


def _with_added_tokens(folder: Path, count: int) -> None:
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    tokenizer.add_special_tokens([f"<|extra_{at}|>" for at in range(count)])
    tokenizer.save(str(folder / TOKENIZER_NAME))


def test_added_tokens_without_a_row_are_named(copy: Path) -> None:
    _with_added_tokens(copy, 400)
    (note,) = preflight(lowered(copy))
    assert "added tokens have no row in the embedding" in note and "`<|extra_399|>`" in note


def test_a_sentencepiece_model_alone_has_its_remedy(copy: Path) -> None:
    (copy / TOKENIZER_NAME).rename(copy / "tokenizer.model")
    with pytest.raises(CheckpointError, match=r"only a SentencePiece model `tokenizer.model`") as caught:
        preflight(lowered(copy))
    assert "save_pretrained" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("generation_config.json", '{"do_sample": true, "top_p": 0.0}'),
        ("generation_config.json", '{"temperature": "0.7"}'),
        ("chat_template.jinja", "{% for m in messages %}{{ m }"),
        ("chat_template.jinja", b"{{ messages[0]['content'] }} \xe9t\xe9"),
        ("tokenizer_config.json", b'{"eos_token": "\xe9"}'),
        ("tokenizer_config.json", '{"eos_token": "</s>",}'),
    ],
)
def test_files_that_the_runtime_refuses_are_named(copy: Path, file: str, content: str | bytes) -> None:
    (copy / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=file):
        preflight(lowered(copy), check_companions=companion_problems)


def test_a_template_for_other_messages_is_accepted(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ raise_exception('a system message comes first') }}")
    notes = preflight(lowered(copy), check_companions=companion_problems)
    assert not any("template" in note for note in notes)


@pytest.mark.parametrize(
    ("file", "content"),
    [("generation_config.json", {"eos_token_id": [2, 9999]}), ("config.json", {"eos_token_id": 9999})],
)
def test_an_end_token_beyond_the_vocabulary_names_its_file(copy: Path, file: str, content: dict[str, object]) -> None:
    (copy / "generation_config.json").unlink(missing_ok=True)
    plain = json.loads((copy / file).read_text()) if (copy / file).is_file() else {}
    (copy / file).write_text(json.dumps({**plain, **content}))
    with pytest.raises(CheckpointError, match=f"`[^`]*/{file}`: key `eos_token_id`: eos token 9999 outside"):
        lowered(copy)
