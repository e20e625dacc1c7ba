"""`moec lm-eval`: the harness gets the scores of `moec eval`, inside the budget and without a network.

All command lines run in one process, because lm_eval takes seconds to import.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.cli.measuring.text_engines import BundleEngine
from moec.evaluation.engine import GenerationRequest, in_order
from moec.manifests.bundle import MANIFEST_NAME, TOKENIZER_NAME
from moec.runtime import Engine, load
from tests.cli.conftest import Invoke
from tests.listed_file import add_listed
from tests.serving.clients.client_runs import ROOT, run_with_lm_eval

EXAMPLE = ROOT / "examples" / "bundle"
ITEMS, BUDGET, WINDOW = 6, 320 << 20, 14
TEMPLATE = b"{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}!"
DATA = "dataset_path: json\ndataset_kwargs: {data_files: {test: %s}}\ntest_split: test\n"
QUESTION = 'doc_to_text: "Question: {{question}}\\nAnswer:"\n'
ANSWER = (
    f'output_type: generate_until\n{QUESTION}doc_to_target: "{{{{answer}}}}"\nmetric_list: [{{metric: exact_match}}]\n'
)
CHOICES = f'{QUESTION}output_type: multiple_choice\ndoc_to_choice: "{{{{choices}}}}"\ndoc_to_target: "{{{{right}}}}"\n'
TASKS = {
    "choices": f"{DATA}{CHOICES}metric_list: [{{metric: acc}}]\n",
    "answers": f'{DATA}{ANSWER}generation_kwargs: {{until: ["Question:", "ros"], max_gen_toks: 24, temperature: 0}}\n',
    "texts": f'{DATA}output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{{{text}}}}"\n'
    "metric_list: [{metric: word_perplexity}]\n",
    "long": f"{DATA}{ANSWER}generation_kwargs: {{max_gen_toks: 4000}}\n",
    "beams": f"{DATA}{ANSWER}generation_kwargs: {{num_beams: 4}}\n",
    "undefined": f"{DATA}{CHOICES.replace('question', 'nothing.at.all')}metric_list: [{{metric: acc}}]\n",
    "ending": f"{DATA}{CHOICES}process_results: !function ending.end\n",
    "remote": f"dataset_path: nobody/nothing\ntest_split: test\n{CHOICES}metric_list: [{{metric: acc}}]\n",
}


def items() -> list[dict[str, Any]]:
    """Questions of the example with its answer and three wrong ones, of one and several tokens."""
    lines = (ROOT / "examples" / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()[:ITEMS]
    found = []
    for line in lines:
        item = json.loads(line)
        wrong = [item["answer"].rpartition(" ")[0] + " 77", "9", "9 roses"]
        text = f"{item['question']} {item['answer']}"
        found.append({**item, "choices": [*wrong, item["answer"]], "right": 3, "text": text})
    return found


def with_start_token(folder: Path) -> Path:
    """Copy the example, with a tokenizer that begins every text, and with a chat template."""
    bundle = Path(shutil.copytree(EXAMPLE, folder / "started"))
    settings = json.loads((bundle / TOKENIZER_NAME).read_bytes())
    piece = {"id": "<unk>", "type_id": 0}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": piece}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<unk>": {"id": "<unk>", "ids": [0], "tokens": ["<unk>"]}},
    }
    add_listed(bundle, TOKENIZER_NAME, json.dumps(settings).encode())
    return add_listed(bundle, "chat_template.jinja", TEMPLATE)


def harness_line(folder: Path, bundle: Path, task: str, *more: object) -> list[object]:
    return ["lm-eval", bundle, "--tasks", task, "--include-path", folder / "tasks", *more]


def command_lines(folder: Path, started: Path) -> dict[str, list[object]]:
    """Name and words of each command line. The first one is the only one whose peak of memory counts."""
    line, sampled = partial(harness_line, folder), ("--gen-kwargs", "temperature=1.5,do_sample=True")

    def per_item(name: str) -> tuple[object, ...]:
        return ("--per-item", folder / name)

    return {
        "scores": line(
            EXAMPLE, "choices,answers", "--slots", 2, "--memory", "320MiB", "-o", folder / "scores.json",
            *per_item("scores.jsonl"), "--json",
        ),
        "table": line(EXAMPLE, "choices", "--limit", 2, "--num-fewshot", 0),
        "lossy": line(EXAMPLE, "choices", "--lossy", "cache-routing margin=0.5", "--expert-cache", "40%", "--json"),
        "texts": line(started, "texts", *per_item("texts.jsonl")),
        "eval": ["eval", started, "--data", folder / "texts-of-eval.jsonl", "--task", "perplexity", "--json"],
        "windows": line(started, "texts", "--context", WINDOW, *per_item("windows.jsonl")),
        "chat": line(
            started, "choices", "--apply-chat-template", "--system", "kind", *per_item("chat.jsonl"), "--json"
        ),
        "sampled": line(EXAMPLE, "answers", *sampled, *per_item("a")),
        "sampled again": line(EXAMPLE, "answers", *sampled, "--slots", 1, *per_item("b")),
        "by path": ["lm-eval", EXAMPLE, "--tasks", folder / "tasks" / "choices.yaml", "--limit", 1],
        **refused_lines(folder),
    }  # fmt: skip


def refused_lines(folder: Path) -> dict[str, list[object]]:
    """Command lines that end with an error."""
    line = partial(harness_line, folder, EXAMPLE)
    return {
        "long": line("long"),
        "beams": line("beams"),
        "undefined": line("undefined", "-o", folder / "never.json"),
        "remote": line("remote"),
        "unknown": line("choises"),
        "ending": line("ending"),
        "no template": line("choices", "--apply-chat-template"),
        "budget": line("choices", "--memory", "100MiB"),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files and their data."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "tasks").mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items()))
    (folder / "texts-of-eval.jsonl").write_text("".join(json.dumps({"text": each["text"]}) + "\n" for each in items()))
    (folder / "tasks" / "ending.py").write_text("def end(row, results):\n    raise SystemExit(0)\n")
    for name, text in TASKS.items():
        own = text % (folder / "items.jsonl") if "%s" in text else text
        (folder / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{own}")
    return folder


@pytest.fixture(scope="module")
def started(folder: Path) -> Path:
    return with_start_token(folder)


@pytest.fixture(scope="module")
def process(folder: Path, started: Path) -> dict[str, Any]:
    """What the process of all command lines printed, by name, and the packages that it loaded."""
    lines = command_lines(folder, started)
    found = run_with_lm_eval(list(lines.values()), HF_HOME=str(folder / "hub"))
    return {"runs": dict(zip(lines, found["runs"], strict=True)), "loaded": found["loaded"]}


@pytest.fixture(scope="module")
def runs(process: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(process["runs"])


def succeeded(runs: dict[str, dict[str, Any]], name: str) -> str:
    """Return what a run that must succeed wrote to stdout."""
    assert runs[name]["code"] == 0, runs[name]["err"]
    return str(runs[name]["out"])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def log_prob(engine: Engine, context: Sequence[int], continuation: Sequence[int]) -> float:
    logits = engine.logits([*context, *continuation][:-1])[len(context) - 1 :].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    rows = np.arange(len(continuation))
    return float((logits[rows, continuation] - np.log(np.exp(logits).sum(axis=1))).sum())


def test_scores_and_answers_are_those_of_an_evaluation(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    """Both come from the engine of `moec eval`, for the same prompts."""
    results = json.loads(succeeded(runs, "scores"))
    rows, asked = rows_of(folder / "scores.jsonl"), items()
    with load(EXAMPLE, slots=3) as opened:
        engine, right = BundleEngine(opened), 0
        for item, row in zip(asked, rows[:ITEMS], strict=True):
            prompt = f"Question: {item['question']}\nAnswer:"
            scores = in_order(engine.answer_log_probs, [(prompt, f" {each}") for each in item["choices"]])
            assert [each[0][0] for each in row["resps"]] == pytest.approx([-each.nll for each in scores], rel=1e-6)
            right += int(np.argmin([each.nll for each in scores])) == item["right"]
            requests = [GenerationRequest(prompt, f" {each}", 40) for each in item["choices"]]
            starts = [answer.text for answer in in_order(engine.generate, requests)]
            greedy = [start.startswith(f" {each}") for start, each in zip(starts, item["choices"], strict=True)]
            assert [each[0][1] for each in row["resps"]] == greedy
        prompts = [f"Question: {item['question']}\nAnswer:" for item in asked]
        answers = in_order(engine.generate, [GenerationRequest(each, None, 24) for each in prompts])
    expected = [answer.text.partition("Question:")[0].partition("ros")[0] for answer in answers]
    assert [row["resps"] for row in rows[ITEMS:]] == [[[text]] for text in expected]
    assert any(text != answer.text for text, answer in zip(expected, answers, strict=True))
    assert results["results"]["choices"]["acc,none"] == pytest.approx(right / ITEMS)


def test_the_results_say_what_ran(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    results = json.loads(succeeded(runs, "scores"))
    assert json.loads((folder / "scores.json").read_text()) == results
    config = results["config"]
    assert config["manifest_sha256"] == hashlib.sha256((EXAMPLE / MANIFEST_NAME).read_bytes()).hexdigest()
    assert config["memory"]["budget_bytes"] == BUDGET and "exact" in config["mode"]
    assert config["slots"] == 2 and 0 < config["requests"]["continuations"]["hit_rate"] <= 1
    assert f"mode: {config['mode']}" in runs["scores"]["err"]
    table = succeeded(runs, "table").splitlines()
    assert table[0].split()[:2] == ["task", "filter"] and table[2].split()[:4] == ["choices", "none", "0", "acc"]
    succeeded(runs, "by path")


def test_the_budget_counts_the_harness(runs: dict[str, dict[str, Any]]) -> None:
    config = json.loads(succeeded(runs, "scores"))["config"]
    assert 120 << 20 < config["memory"]["process_bytes"] < config["peak_memory_bytes"] + (32 << 20)
    assert config["peak_memory_bytes"] <= BUDGET
    assert runs["budget"]["code"] == 1
    assert "`--memory 100MiB` is under the floor of" in runs["budget"]["err"]
    assert "mode:" not in runs["budget"]["err"]


def test_a_lossy_mode_is_named(runs: dict[str, dict[str, Any]]) -> None:
    results = json.loads(succeeded(runs, "lossy"))
    assert "LOSSY (cache-routing" in results["config"]["mode"]
    assert results["config"]["hit_rate"] < 1 and results["config"]["decisions"]


def test_a_rolling_perplexity_is_that_of_an_evaluation(
    runs: dict[str, dict[str, Any]], folder: Path, started: Path
) -> None:
    succeeded(runs, "texts")
    found = [row["resps"][0][0] for row in rows_of(folder / "texts.jsonl")]
    with load(started) as engine:
        tokens = [len(engine.encode(item["text"])) - 1 for item in items()]
    assert json.loads(succeeded(runs, "eval"))["value"] == pytest.approx(float(np.exp(-sum(found) / sum(tokens))))


def test_long_texts_are_scored_in_windows(runs: dict[str, dict[str, Any]], folder: Path, started: Path) -> None:
    """Each token is predicted once. The first window follows the start token, the last one has a full context."""
    succeeded(runs, "windows")
    for item, row in zip(items(), rows_of(folder / "windows.jsonl"), strict=True):
        total = 0.0
        with load(started, context=WINDOW) as engine:
            text = engine.encode(item["text"])
            assert len(text) > 2 * WINDOW
            for start in range(1, len(text), WINDOW):
                end = min(start + WINDOW, len(text))
                total += log_prob(engine, text[max(0, end - WINDOW - 1) : start], text[start:end])
        assert row["resps"][0][0] == pytest.approx(total, rel=1e-6)


def test_a_chat_has_the_tokens_of_its_template(runs: dict[str, dict[str, Any]], folder: Path, started: Path) -> None:
    config = json.loads(succeeded(runs, "chat"))["config"]
    assert config["apply_chat_template"] and config["system_instruction"] == "kind"
    with load(started) as engine:
        for item, row in zip(items(), rows_of(folder / "chat.jsonl"), strict=True):
            context, answer = row["arguments"][0]
            assert context == f"[system] kind[user] Question: {item['question']}\nAnswer:!"
            prompt, both = (engine.encode(text, adds_special_tokens=False) for text in (context, context + answer))
            expected = log_prob(engine, prompt, both[len(prompt) :])
            assert row["resps"][0][0][0] == pytest.approx(expected, rel=1e-6)


def test_sampled_answers_repeat(runs: dict[str, dict[str, Any]], folder: Path) -> None:
    succeeded(runs, "sampled")
    succeeded(runs, "sampled again")
    first, second = (rows_of(folder / name) for name in ("a", "b"))
    assert [row["resps"] for row in first] == [row["resps"] for row in second]
    assert [row["resps"] for row in first] != [row["resps"] for row in rows_of(folder / "scores.jsonl")[ITEMS:]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("long", "a task asks for 4000 new tokens, expected 1 to 511 in a context of 512"),
        ("beams", "a task asks for the generation setting `num_beams: 4`"),
        ("undefined", "the task `undefined` could not be loaded: 'nothing' is undefined"),
        ("remote", "the task `remote` could not be loaded: Couldn't reach 'nobody/nothing' on the Hub"),
        ("unknown", "there is no task `choises`"),
        ("ending", "the items of ending could not be evaluated: SystemExit"),
        ("no template", "has no chat template"),
    ],
)
def test_what_cannot_run_ends_with_one_sentence(
    runs: dict[str, dict[str, Any]], folder: Path, name: str, message: str
) -> None:
    assert runs[name]["code"] == 1 and runs[name]["out"] == ""
    assert message in runs[name]["err"] and runs[name]["err"].count("error: ") == 1
    assert "Traceback" not in runs[name]["err"]
    assert not (folder / "never.json").exists()


def test_local_tasks_ask_no_address_and_load_no_torch(process: dict[str, Any]) -> None:
    asked = {name: run["asked"] for name, run in process["runs"].items() if run["asked"]}
    assert list(asked) == ["remote"]
    assert {"torch", "transformers"}.isdisjoint(process["loaded"])


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="NOT RUN: lm_eval is installed here")
def test_without_the_extra_it_is_named(invoke: Invoke) -> None:
    done = invoke("lm-eval", EXAMPLE, "--tasks", "choices")
    assert done.exit_code == 1
    assert "lm-evaluation-harness needs the package `lm_eval`" in done.stderr and "moec[lm-eval]" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", " , "), "`--tasks` names no task"),
        (("--tasks", "choices", "--limit", "0"), "`--limit` must be at least 1"),
        (("--tasks", "choices", "--num-fewshot", "-1"), "`--num-fewshot` must be 0 or more"),
        (("--tasks", "choices", "--system", "kind"), "`--system` has no effect without `--apply-chat-template`"),
        (("--tasks", "choices", "-o", "/"), "names a folder"),
    ],
)
def test_options_are_checked_first(invoke: Invoke, words: Sequence[str], message: str) -> None:
    done = invoke("lm-eval", EXAMPLE, *words)
    assert done.exit_code in (1, 2) and message in done.stderr


def test_a_checkpoint_scores_as_its_16_bit_bundle(folder: Path, checkpoint: Path, bundle: Path) -> None:
    """A model folder is the baseline of its bundles."""
    lines = [harness_line(folder, model, "choices", "--limit", 3, "--json") for model in (checkpoint, bundle)]
    found = run_with_lm_eval(lines, HF_HOME=str(folder / "hub"))["runs"]
    assert [run["code"] for run in found] == [0, 0], [run["err"][-1000:] for run in found]
    baseline, own = (json.loads(run["out"]) for run in found)
    assert baseline["results"]["choices"] == own["results"]["choices"]
    assert baseline["config"]["checkpoint"] == checkpoint.name and "manifest_sha256" not in baseline["config"]


def test_a_folder_that_is_no_model(invoke: Invoke, tmp_path: Path) -> None:
    done = invoke("lm-eval", tmp_path, "--tasks", "choices")
    assert done.exit_code == 1 and "holds neither a bundle nor a model" in done.stderr
    done = invoke("lm-eval", tmp_path / "none", "--tasks", "choices")
    assert done.exit_code == 1 and "does not exist" in done.stderr
