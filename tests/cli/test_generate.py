"""`moec generate`: from a file of prompts to a file of continuations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moec.cli.commands.running.generate import CODE_STOPS
from moec.runtime import load

from .conftest import Invoke

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


def test_a_file_that_cannot_be_written(invoke: Invoke, bundle: Path, prompts: Path, tmp_path: Path) -> None:
    result = invoke("generate", bundle, "--prompts", prompts, "-o", prompts / "out", "--max-new-tokens", 1)
    assert result.exit_code == 1 and "cannot be written" in result.stderr and "mode:" not in result.stderr
    result = invoke("generate", bundle, "--prompts", prompts, "-o", tmp_path / "out", "--max-new-tokens", 0)
    assert result.exit_code == 1 and "--max-new-tokens" in result.stderr


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
