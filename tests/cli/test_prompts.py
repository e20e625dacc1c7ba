"""Prompts that do not fit are refused before they become tokens, and `moec generate` continues a file of prompts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers

from moec.cli.commands.running.generate import CODE_STOPS
from moec.cli.options.prompts import prompt_limit_bytes
from moec.manifests.errors import ContextOverflow, InputError
from moec.manifests.files.limits import ENCODING_BYTES_PER_BYTE, MAX_PROMPT_BYTES
from moec.runtime import load
from moec.runtime.memory.budget import MemoryPlan
from moec.runtime.text.tokenizer import BundleTokenizer, parse_tokenizer

from .conftest import Invoke


class Counting(io.BytesIO):
    """Standard input without end that counts the bytes read."""

    given = 0

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None and size >= 0, "everything was asked for"
        self.given += size
        return b"a" * size


def test_standard_input_is_read_up_to_a_bound(invoke: Invoke, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.cli.options import prompts

    endless = Counting()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(endless))
    with pytest.raises(ContextOverflow, match="more than 1000 bytes"):
        prompts.standard_input(1000)
    assert endless.given == 1001
    assert prompt_limit_bytes(512) == 131_072 and prompt_limit_bytes(10**7) == MAX_PROMPT_BYTES


@pytest.mark.parametrize("given", ["a b\n", "a b\r\n", "a b"])
def test_line_ends(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.cli.options import prompts

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert prompts.standard_input(100) == "a b"


def test_what_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from moec.cli.options import prompts

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    with pytest.raises(InputError, match="not UTF-8 at byte 2"):
        prompts.standard_input(100)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match="is closed"):
        prompts.standard_input(100)


@pytest.mark.parametrize("options", [(), ("--chat",)])
def test_a_long_prompt_is_an_error_of_the_user(invoke: Invoke, bundle: Path, options: tuple[str, ...]) -> None:
    result = invoke("run", bundle, "--prompt", "-", *options, stdin="how many? " * 200_000)
    assert result.exit_code == 1 and "the prompt has more than" in result.stderr


def test_nothing_is_encoded_that_has_no_memory(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle) as engine:
        plan = engine.memory
        limit = (plan.kv_bytes + plan.scratch_bytes + (8 << 20)) // ENCODING_BYTES_PER_BYTE
        assert limit >= 16 * plan.context
        engine.encode("a" * 100)
        monkeypatch.setattr(BundleTokenizer, "encode_batch", None)
        with pytest.raises(ContextOverflow, match=f"has {limit + 1} bytes"):
            engine.encode("a" * (limit + 1))
        with pytest.raises(InputError, match="not UTF-8 at character 1"):
            engine.encode("a\udcff")


def test_prompts_of_a_file(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "' + "how many? " * 100_000 + '"}\n')
    result = invoke("generate", bundle, "--prompts", tmp_path / "p.jsonl", "--out", tmp_path / "o.jsonl", "--slots", 1)
    assert result.exit_code == 1 and "the prompt has 1000000 bytes" in result.stderr
    assert not (tmp_path / "o.jsonl").exists()


def test_what_the_normalizer_makes_of_a_text_counts(tmp_path: Path) -> None:
    """The growth of a text is measured, and not taken to be the largest possible growth."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.normalizer = normalizers.Replace("a", "a" * 1000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer.json"
    loaded = parse_tokenizer(path.read_bytes(), path)
    sizes = dict.fromkeys(("process_bytes", "dense_bytes", "kv_bytes", "scratch_bytes", "minimum_expert_bytes"), 0)
    plan = MemoryPlan(**sizes, tables_bytes=0, cache_bytes=0, budget_bytes=None, context=512)
    loaded.check_size("b" * 16_000, plan)
    loaded.check_size("a" * 10 + "b" * 10_000, plan)
    with pytest.raises(ContextOverflow):
        loaded.check_size("a" * 1000, plan)
    with pytest.raises(ContextOverflow):
        loaded.check_size("b" * 17_000, plan)


PROMPTS = ["A first text, rather short.", "x", "Another text that is a little longer, with more words in it."]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"task_id": f"T/{at}", "prompt": text, "entry_point": "f"} for at, text in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompts_of_unequal_length_are_continued_as_alone(
    invoke: Invoke, bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    result = invoke("generate", bundle, "--prompts", prompts, "-o", out, "--max-new-tokens", 8, "--slots", 2)
    assert result.exit_code == 0, result.stderr
    found = lines(out)
    assert [set(line) for line in found] == [{"task_id", "completion"}] * 3
    assert [line["task_id"] for line in found] == ["T/0", "T/1", "T/2"]
    with load(bundle, context=128) as engine:
        for line, prompt in zip(found, PROMPTS, strict=True):
            steps = list(engine.generate(prompt, max_new_tokens=8))
            ends = engine.bundle.manifest.model.eos_token_ids
            assert line["completion"] == engine.tokenizer.decode([s.token_id for s in steps if s.token_id not in ends])


def test_a_stop_text_ends_a_continuation_and_is_left_out(
    invoke: Invoke, bundle: Path, prompts: Path, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    common = ("generate", bundle, "--prompts", prompts, "--max-new-tokens", 8)
    assert invoke(*common, "-o", whole).exit_code == 0
    text = lines(whole)[0]["completion"]
    stop = text[len(text) // 2 :][:2]
    assert invoke(*common, "-o", cut, "--stop", stop, "--code").exit_code == 0
    expected = text[: text.index(stop)]
    for code in CODE_STOPS:
        expected = expected.split(code)[0]
    assert lines(cut)[0]["completion"] == expected != text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"text": "a"}\n', ":1`: expected a text in the field `prompt`, found the fields `text`"),
        ('{"prompt": "a"}\n{"prompt": 5}\n', ":2`: expected a text"),
        ('{"prompt": "a"}\n{"prompt": ""}\n', ":2`: expected a text"),
        ("", "found an empty file"),
    ],
)
def test_prompts_that_are_none_are_named_and_nothing_is_written(
    invoke: Invoke, bundle: Path, tmp_path: Path, content: str, told: str
) -> None:
    path, out = tmp_path / "bad.jsonl", tmp_path / "out.jsonl"
    path.write_text(content)
    out.write_text("kept")
    result = invoke("generate", bundle, "--prompts", path, "-o", out)
    assert result.exit_code == 1 and told in result.stderr
    assert out.read_text() == "kept" and sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "out.jsonl"]


@pytest.mark.gate("G10")
@pytest.mark.parametrize("name", ["NaN", "-Infinity", "[1, Infinity]", r'"\ud800"', r'{"a": "\udfff"}', "1e999"])
def test_a_task_id_that_json_does_not_have_is_refused(name: str, invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{{"prompt": "a", "task_id": {name}}}\n')
    result = invoke("generate", bundle, "--prompts", path, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 1 and not (tmp_path / "out.jsonl").exists()
    assert f"`{path}:2`: `task_id` holds NaN, an infinity or half a surrogate pair" in result.stderr


def test_a_task_id_of_any_other_kind_is_copied(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    ids = [7, 0.5, None, ["x", "é"], {"a": "\U0001f600"}]
    path.write_text("".join(json.dumps({"prompt": "a", "task_id": name}) + "\n" for name in ids))
    assert invoke("generate", bundle, "--prompts", path, "-o", out, "--max-new-tokens", 1).exit_code == 0
    assert [line["task_id"] for line in lines(out)] == ids
