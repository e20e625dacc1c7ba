"""lm-evaluation-harness through the server, offline: its log-likelihoods and answers are those of the engine.

`moec lm-eval` gives the same without a server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.runtime import Engine
from tests.serving.clients.client_runs import ROOT, run_client, run_with_lm_eval
from tests.serving.live_server import LiveServer

pytestmark = [pytest.mark.gate("G16"), pytest.mark.slow]

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


def test_the_harness_measures_the_engine(answering: LiveServer, tmp_path: Path) -> None:
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
