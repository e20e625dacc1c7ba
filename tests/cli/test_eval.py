"""`moec eval`: bundle and checkpoint in the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moec.cli.measuring.text_engines import bundle_engine, checkpoint_engine
from moec.evaluation.engine import GenerationRequest, no_progress
from moec.runtime.options.runtime import RuntimeOptions

from .conftest import Invoke


def evaluate(invoke: Invoke, *arguments: object) -> dict[str, Any]:
    result = invoke("eval", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def test_a_16_bit_bundle_scores_what_the_checkpoint_scores(
    invoke: Invoke, bundle: Path, checkpoint: Path, texts: Path
) -> None:
    compiled = evaluate(invoke, bundle, "--data", texts, "--expert-cache", "50%")
    reference = evaluate(invoke, checkpoint, "--data", texts)
    assert (compiled["engine"], reference["engine"]) == ("runtime", "transformers")
    for name in ("task", "metric", "n", "data_sha256"):
        assert compiled[name] == reference[name]
    assert compiled["task"] == "perplexity" and compiled["n"] == 3
    assert compiled["value"] == pytest.approx(reference["value"], rel=1e-4)
    assert {"value", "interval95", "seconds", "tokens_per_s"} <= set(compiled) & set(reference)


def test_both_engines_write_the_same_answers(invoke: Invoke, bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
    # Long prompts in a context of 128 leave room for some 20 tokens of answer.
    problems = tmp_path / "long.jsonl"
    question = "How many pens are in {} boxes of a dozen pens each, if none has been lost so far?"
    rows = [{"question": question.format(n), "answer": f"#### {12 * n}"} for n in (2, 30)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, model in (("bundle", bundle), ("checkpoint", checkpoint)):
        evaluate(invoke, model, "--data", problems, "--per-item", tmp_path / f"{name}.jsonl")
    found = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("bundle", "checkpoint")
    }
    assert len(found["bundle"]) == 2 and set(found["bundle"][0]) == {"prediction", "reference", "score", "tokens"}
    assert all(row["tokens"] > 0 for row in found["bundle"])
    assert found["bundle"] == found["checkpoint"]


def test_a_stop_text_ends_the_answers_of_both_engines(bundle: Path, checkpoint: Path) -> None:
    """A first run gives the text. The second run, with a stop text, ends early and equally in both engines."""
    prompts, tokens = ["a lamp", "Question: how many?"], []
    with bundle_engine(bundle, RuntimeOptions(slots=2)) as runtime:
        for engine in (runtime, checkpoint_engine(checkpoint, 1)):
            whole = engine.generate([GenerationRequest(prompt, None, 40) for prompt in prompts], no_progress)
            stops = [found.text[3:6] for found in whole]
            requests = [GenerationRequest(p, None, 40, (stop,)) for p, stop in zip(prompts, stops, strict=True)]
            ended = engine.generate(requests, no_progress)
            for found, before, stop in zip(ended, whole, stops, strict=True):
                assert found.tokens < before.tokens and before.text.startswith(found.text) and stop in found.text
            tokens.append([found.tokens for found in ended])
    assert tokens[0] == tokens[1]


def test_slots_change_nothing(invoke: Invoke, bundle: Path, problems: Path, tmp_path: Path) -> None:
    answers = []
    for slots in (1, 3):
        path = tmp_path / f"{slots}.jsonl"
        values = evaluate(invoke, bundle, "--data", problems, "--slots", slots, "--per-item", path, "--context", 56)
        assert values["slots"] == slots and values["n"] == 6
        answers.append(path.read_text())
    assert answers[0] == answers[1]


def test_slots_shrink_to_fit_unless_they_are_asked_for(
    invoke: Invoke, bundle: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moec.manifests.bundle import BundleManifest
    from moec.runtime.bundle.opening import open_bundle
    from moec.runtime.memory.budget import plan_memory
    from moec.runtime.options.runtime import RuntimeOptions

    # The memory of this process changes during the test.
    monkeypatch.setattr("moec.runtime.memory.budget.resident_set_bytes", lambda: 100 << 20)
    manifest: BundleManifest = open_bundle(bundle).manifest
    room = plan_memory(manifest, RuntimeOptions(expert_cache="100%", slots=8)).floor_bytes + (1 << 20)
    values = evaluate(invoke, bundle, "--data", texts, "--memory", room)
    assert 1 <= values["slots"] <= 16
    result = invoke("eval", bundle, "--data", texts, "--memory", room, "--slots", 64)
    assert result.exit_code == 1 and "under the floor" in result.stderr


def test_people_get_a_table(invoke: Invoke, bundle: Path, problems: Path) -> None:
    result = invoke("eval", bundle, "--data", problems, "--limit", 2)
    assert result.exit_code == 0 and result.stdout.startswith("exact_match")
    assert "2 items of gsm8k" in result.stdout and result.stderr.startswith("mode: ")


def test_shots_come_from_the_data(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    for split, count in (("train", 3), ("validation", 2), ("test", 2)):
        rows = [{"question": f"{split} {n}?", "answer": f"#### {n}"} for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate(invoke, bundle, "--data", tmp_path)["n"] == 2
    assert evaluate(invoke, bundle, "--data", tmp_path, "--split", "train", "--shots", 1)["shots"] == 1


def test_options_of_the_runtime_have_no_effect_on_a_checkpoint(invoke: Invoke, checkpoint: Path, texts: Path) -> None:
    result = invoke("eval", checkpoint, "--data", texts, "--memory", "2GiB")
    assert result.exit_code == 1 and "`--memory` has no effect" in result.stderr


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "expected JSON lines, found an empty file"),
        ('{"question": "a", "answer": "#### 1"}\n{"question": ', "bad.jsonl:2`: malformed JSON"),
        ('{"title": "a"}\n', "expected the fields of a known task, found `title`"),
    ],
)
def test_bad_data_names_file_and_line(
    invoke: Invoke, bundle: Path, tmp_path: Path, content: str, sentence: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    result = invoke("eval", bundle, "--data", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert sentence in result.stderr and "hint: " in result.stderr


def test_a_prompt_longer_than_the_context(invoke: Invoke, bundle: Path, problems: Path) -> None:
    result = invoke("eval", bundle, "--data", problems, "--context", 8)
    assert result.exit_code == 1 and "expected 1 to 7" in result.stderr and "--context" in result.stderr


def test_models_that_are_none(invoke: Invoke, own_bundle: Path, texts: Path, tmp_path: Path) -> None:
    missing = invoke("eval", tmp_path / "nowhere", "--data", texts)
    assert missing.exit_code == 1 and "is not a folder" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = invoke("eval", tmp_path / "empty", "--data", texts)
    assert empty.exit_code == 1 and "config.json" in empty.stderr
    (own_bundle / "moec.json").unlink()
    beheaded = invoke("eval", own_bundle, "--data", texts)
    assert beheaded.exit_code == 3 and "moec.json" in beheaded.stderr


def test_items_that_cannot_be_written(invoke: Invoke, bundle: Path, texts: Path) -> None:
    result = invoke("eval", bundle, "--data", texts, "--per-item", texts / "items.jsonl")
    assert result.exit_code == 1 and "cannot be written" in result.stderr and result.stdout == ""
