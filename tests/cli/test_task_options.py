"""Prompts by a chat template or a user's template, task files and metrics, in `moec eval` and `moec compile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_compile import save_model

from .conftest import Invoke

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
TASK = 'prompt = "{q}"\nanswer = "a"\nfilter = "[a-z]+"\nmax_new_tokens = 3\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a chat template."""
    folder = save_model(tmp_path_factory.mktemp("chat") / "tiny", layers=1, experts=4)
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "validation", "test"):
        rows = [{"q": f"{split} {at}", "a": f"word {at}"} for at in range(6)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "words.toml"
    path.write_text(TASK)
    return path


def evaluate(invoke: Invoke, *arguments: object) -> dict[str, Any]:
    result = invoke("eval", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_a_bundle_is_certified_and_evaluated_with_the_same_prompts(
    invoke: Invoke, model: Path, data: Path, task: Path, tmp_path: Path
) -> None:
    """quality.json names the prompts. `moec eval` with the same options has the same data and scores the same."""
    template = tmp_path / "message.jinja"
    template.write_text("Q: {{ q }}")
    prompts = ("--task", task, "--data", data, "--chat", "--system", "Be kind.", "--prompt-template", template)
    out = tmp_path / "out"
    result = invoke(
        "compile", model, "--bits-per-weight", 9, "--group-size", 32, "--device", "raspberry-pi-4b-sd",
        "--no-comparisons", "--shots", 1, *prompts, "-o", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    certified = json.loads((out / "quality.json").read_text())["tasks"]["words"]
    found = evaluate(invoke, out, *prompts, "--shots", 1)
    assert (found["data_sha256"], found["value"]) == (certified["data_sha256"], certified["value"])
    assert found["settings"] == certified["settings"] and set(found["settings"]) == {
        "task_file_sha256", "chat_template_sha256", "prompt_template_sha256", "system",
    }  # fmt: skip
    without = evaluate(invoke, out, "--task", task, "--data", data, "--shots", 1)
    assert without["data_sha256"] != found["data_sha256"] and set(without["settings"]) == {"task_file_sha256"}
    options = json.loads((out / "moec.json").read_text())["options"]
    assert (options["chat"], options["system"], options["prompt_template"]) == ("true", "Be kind.", "message.jinja")
    assert options["tasks"] == "words"


def test_a_chat_needs_a_template_and_a_prompt(
    invoke: Invoke, bundle: Path, texts: Path, data: Path, task: Path
) -> None:
    missing = invoke("eval", bundle, "--data", data, "--task", task, "--chat")
    assert missing.exit_code == 1 and "has no chat template" in missing.stderr
    plain = invoke("eval", bundle, "--data", texts, "--chat")
    assert plain.exit_code == 1 and "has no prompt" in plain.stderr
    alone = invoke("eval", bundle, "--data", data, "--task", task, "--system", "a")
    assert alone.exit_code == 1 and "no effect without `--chat`" in alone.stderr


def test_a_template_with_an_unknown_field(invoke: Invoke, bundle: Path, data: Path, task: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ question }}")
    result = invoke("eval", bundle, "--data", data, "--task", task, "--prompt-template", template)
    assert result.exit_code == 1 and result.stdout == ""
    assert "'question' is undefined" in result.stderr and "the fields are `q`, `a`, `shots`" in result.stderr


def test_a_bad_template_leaves_no_bundle(invoke: Invoke, model: Path, data: Path, task: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for %}")
    before = sorted(tmp_path.iterdir())
    result = invoke(
        "compile", model, "--kl", 0.1, "--data", data, "--task", task, "--prompt-template", template,
        "--device", "raspberry-pi-4b-sd", "-o", tmp_path / "out",
    )  # fmt: skip
    assert result.exit_code == 1 and "t.jinja` is no Jinja template" in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_another_metric(invoke: Invoke, bundle: Path, data: Path, task: Path) -> None:
    found = evaluate(invoke, bundle, "--data", data, "--task", task, "--metric", "rouge1")
    assert found["metric"] == "rouge1" and set(found["other_metrics"]) == {"rouge2", "rougeL"}
    unknown = invoke("eval", bundle, "--data", data, "--task", task, "--metric", "bleu")
    assert unknown.exit_code == 1 and "--trust-metric-code" in unknown.stderr
