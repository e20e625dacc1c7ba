"""Real clients over a real connection: openai, litellm, LangChain, lm-evaluation-harness, curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import Engine
from tests.serving.clients.client_runs import ROOT, run_client, run_with_lm_eval
from tests.serving.live_server import LiveServer

QUESTION = "How many roses?"
USER = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def expected(answering: LiveServer) -> str:
    body = {"messages": [USER], "temperature": 0, "max_tokens": 24}
    return str(answering.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def expected_text(answering: LiveServer) -> str:
    body = {"prompt": "1 + 1", "temperature": 0, "max_tokens": 4}
    return str(answering.post("/v1/completions", body).json["choices"][0]["text"])


@pytest.fixture(scope="module")
def by_openai(answering: LiveServer) -> dict[str, Any]:
    """Answers that `openai` gets by `chat` and by `responses`."""
    pytest.importorskip("llguidance")
    return run_client("with_openai", answering)


def test_openai(answering: LiveServer, expected: str, by_openai: dict[str, Any]) -> None:
    found = by_openai["chat"]
    assert (found["whole"], found["streamed"], found["response"]) == (expected, expected, expected)
    assert (found["model"], found["parsed"]) == ("bundle", "int") and 1 <= found["usage"] <= 24
    assert found["scored"] == len(answering.service.engine.encode("1 + 1")) + 1
    reason, name, arguments = found["call"]
    assert (reason, name) == ("tool_calls", "weather") and arguments["city"] in ("Rome", "Oslo")
    assert found["streamed_call"] == arguments and found["after"] in ("stop", "length")
    assert found["error"] == ["unknown_field", "mirostat"]


def test_openai_responses_with_tools(by_openai: dict[str, Any]) -> None:
    found = by_openai["responses"]
    kind, name, arguments, status = found["call"]
    assert (kind, name, status, found["status"]) == ("function_call", "weather", "completed", "completed")
    assert arguments["city"] in ("Rome", "Oslo") and len(set(found["ids"])) == 2
    assert found["parsed"] == json.loads(found["streamed"]) == arguments
    assert found["kinds"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    tool, choice, is_parallel = found["echo"]
    assert (tool["name"], tool["strict"], choice, is_parallel) == ("weather", True, "required", True)
    assert found["named"] == {"type": "function", "name": "weather"} and found["after"]
    assert found["built_in"] == ["unsupported_value", "tools[0].type"]
    assert found["no_result"] == ["invalid_value", "input[1].call_id"]


@pytest.mark.gate("G16")
@pytest.mark.slow
def test_litellm(answering: LiveServer, expected: str, expected_text: str) -> None:
    found = run_client("with_litellm", answering)
    assert (found["whole"], found["streamed"], found["messages"]) == (expected, expected, expected)
    assert found["text"] == expected_text


@pytest.mark.slow
def test_langchain(answering: LiveServer, expected: str, expected_text: str) -> None:
    pytest.importorskip("llguidance")
    found = run_client("with_langchain", answering)
    assert (found["whole"], found["streamed"], found["text"]) == (expected, expected, expected_text)
    assert found["call"]["city"] in ("Rome", "Oslo") and found["structured"] in ("Rome", "Oslo")
    assert found["item"] == found["call"] and found["after"]


def test_curl(answering: LiveServer, expected: str) -> None:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("NOT RUN: curl is not installed")
    body = json.dumps({"messages": [USER], "temperature": 0, "max_tokens": 24})
    address = f"http://127.0.0.1:{answering.port}/v1/chat/completions"
    done = subprocess.run([program, "-sS", address, "-d", body], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == expected


ITEMS = 12
CHOICES = """
task: rose_choices
dataset_path: json
dataset_kwargs: {data_files: {test: %(items)s}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}]
"""
ANSWERS = """
task: rose_answers
dataset_path: json
dataset_kwargs: {data_files: {test: %(items)s}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["Question:"], max_gen_toks: 48, temperature: 0}
metric_list: [{metric: exact_match}]
"""


def items() -> list[dict[str, Any]]:
    """Return questions of the example with its answer and two wrong ones."""
    lines = (ROOT / "examples" / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()[:ITEMS]
    found = []
    for at, line in enumerate(lines):
        item = json.loads(line)
        wrong = [item["answer"].rpartition(" ")[0] + f" {number}" for number in (3 + at, 77)]
        choices = [*wrong, item["answer"]]
        found.append({**item, "choices": choices, "right": 2})
    return found


def log_likelihood(engine: Engine, context: str, answer: str) -> float:
    """Return the log probability of an answer after a context, from the logits of one pass."""
    start = len(engine.encode(context, adds_special_tokens=False))
    tokens = engine.encode(context + answer, adds_special_tokens=False)
    logits = engine.logits(tokens[:-1]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(sum(log_probs[at - 1, tokens[at]] for at in range(start, len(tokens))))


@pytest.mark.gate("G16")
@pytest.mark.slow
def test_the_harness_measures_the_engine(answering: LiveServer, tmp_path: Path) -> None:
    """Log-likelihoods and answers through a server are those of the engine, and those of `moec lm-eval`."""
    engine, asked = answering.service.engine, items()
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in asked))
    (tmp_path / "rose_choices.yaml").write_text(CHOICES % {"items": data})
    (tmp_path / "rose_answers.yaml").write_text(ANSWERS % {"items": data})
    found = run_client("with_lm_eval", answering, str(tmp_path), HF_HOME=str(tmp_path / "hub"))
    right = 0
    for sample in found["samples"]["rose_choices"]:
        item = asked[sample["doc"]]
        context = f"Question: {item['question']}\nAnswer:"
        expected = [log_likelihood(engine, context, f" {choice}") for choice in item["choices"]]
        measured = [float(each[0][0]) for each in sample["answers"]]
        assert measured == pytest.approx(expected, abs=1e-3)
        right += int(np.argmax(expected)) == item["right"]
    assert found["results"]["rose_choices"]["acc,none"] == pytest.approx(right / ITEMS)
    for sample in found["samples"]["rose_answers"]:
        item = asked[sample["doc"]]
        steps = engine.generate(f"Question: {item['question']}\nAnswer:", 48, stop=["Question:", "</s>"])
        assert sample["answers"][0][0] == "".join(step.text for step in steps)
    assert len(found["samples"]["rose_answers"]) == len(found["samples"]["rose_choices"]) == ITEMS
    compare_with_the_command(engine.bundle.path, tmp_path, found)


def compare_with_the_command(bundle: Path, folder: Path, through_server: dict[str, Any]) -> None:
    """Compare scores, log-likelihoods and answers of `moec lm-eval` with those of `local-completions`."""
    rows, tasks = folder / "rows.jsonl", "rose_choices,rose_answers"
    line = ["lm-eval", bundle, "--tasks", tasks, "--include-path", folder, "--per-item", rows, "--json"]
    (done,) = run_with_lm_eval([line], HF_HOME=str(folder / "hub"))["runs"]
    assert done["code"] == 0, done["err"]
    results = json.loads(done["out"])["results"]
    for task, metric in (("rose_choices", "acc,none"), ("rose_answers", "exact_match,none")):
        assert results[task][metric] == through_server["results"][task][metric]
    own = [json.loads(text) for text in rows.read_text().splitlines()]
    for task, samples in through_server["samples"].items():
        answers = {row["doc_id"]: row["resps"] for row in own if row["task"] == task}
        assert len(answers) == len(samples) == ITEMS
        for sample in samples:
            if task == "rose_answers":
                assert answers[sample["doc"]] == sample["answers"]
                continue
            for (ours,), (theirs,) in zip(answers[sample["doc"]], sample["answers"], strict=True):
                assert ours[0] == pytest.approx(float(theirs[0]), abs=1e-3)
                assert str(ours[1]) == str(theirs[1])
