"""`moec eval`: bundle and checkpoint alike, prompts and metrics of tasks, and what a temporary bundle leaves behind."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from moec.cli.measuring.text_engines import bundle_engine, checkpoint_engine
from moec.evaluation.data import load_items
from moec.evaluation.engine import Generation, GenerationRequest, in_order
from moec.evaluation.run import evaluate as evaluation
from moec.manifests.codec import decode_manifest, encode_manifest
from moec.manifests.errors import OptionError
from moec.runtime.options.runtime import RuntimeOptions
from tests.tiny_compile import save_model
from tests.transformers_oracle import TransformersOracle

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
    reference = evaluate(invoke, checkpoint, "--data", texts, "--expert-cache", "50%")
    for name in ("task", "metric", "n", "data_sha256"):
        assert compiled[name] == reference[name]
    assert compiled["task"] == "perplexity" and compiled["n"] == 3
    assert compiled["value"] == reference["value"] and reference["mode"] == compiled["mode"]
    assert {"value", "interval95", "seconds", "tokens_per_s"} <= set(compiled) & set(reference)


def test_both_write_the_same_answers(invoke: Invoke, bundle: Path, checkpoint: Path, tmp_path: Path) -> None:
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
    assert len(found["bundle"]) == 2 and set(found["bundle"][0]) == {
        "prediction",
        "reference",
        "score",
        "tokens",
        "is_cut",
    }
    assert all(row["tokens"] > 0 for row in found["bundle"])
    assert found["bundle"] == found["checkpoint"]


def test_a_checkpoint_scores_what_transformers_scores(checkpoint: Path, texts: Path) -> None:
    items = load_items(str(texts))[0]
    expected = evaluation(items.task, items.items, TransformersOracle(checkpoint))
    with checkpoint_engine(checkpoint, RuntimeOptions(slots=2)) as engine:
        found = evaluation(items.task, items.items, engine)
    assert found.value == pytest.approx(expected.value, rel=1e-4) and found.n == expected.n == 3


def test_a_stop_text_ends_the_answers(checkpoint: Path) -> None:
    """A first run gives the text. The second run, with a stop text, ends early."""
    prompts = ["a lamp", "Question: how many?"]
    with checkpoint_engine(checkpoint, RuntimeOptions(slots=2)) as engine:
        whole = in_order(engine.generate, [GenerationRequest(prompt, None, 40) for prompt in prompts])
        stops = [found.text[3:6] for found in whole]
        requests = [GenerationRequest(p, None, 40, (stop,)) for p, stop in zip(prompts, stops, strict=True)]
        for found, before, stop in zip(in_order(engine.generate, requests), whole, stops, strict=True):
            assert found.tokens < before.tokens and before.text.startswith(found.text) and stop in found.text


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_the_temporary_bundle_of_a_checkpoint_is_removed(
    invoke: Invoke, checkpoint: Path, texts: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run, an error while it is open, and an interrupt while it is written or open."""
    seen = []

    def opened(path: Path, *_: object, **__: object) -> None:
        seen.append([entry.name for entry in temporary.iterdir()])
        raise raised

    evaluate(invoke, checkpoint, "--data", texts)
    assert not list(temporary.iterdir())
    for raised in (OptionError("no"), KeyboardInterrupt()):
        for place in ("moec.cli.measuring.text_engines.open_engine", "moec.compiler.bundle.emit._manifest"):
            with monkeypatch.context() as patched:
                patched.setattr(place, opened)
                result = invoke("eval", checkpoint, "--data", texts)
            assert result.exit_code == (1 if isinstance(raised, OptionError) else 130), result.stderr
            assert not list(temporary.iterdir())
    assert len(seen) == 4 and all(len(names) == 1 and names[0].startswith("moec-eval-") for names in seen)


def test_a_full_disk_is_told_before_any_work(
    invoke: Invoke, checkpoint: Path, texts: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(temporary)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr("moec.compiler.bundle.emit._Emitter.write_dense", lambda _: pytest.fail("work was done"))
    result = invoke("eval", checkpoint, "--data", texts)
    assert result.exit_code == 1 and not list(temporary.iterdir())
    assert f"the disk of `{temporary}" in result.stderr and "has 1000 B free, " in result.stderr
    assert "TMPDIR" in result.stderr


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
    from moec.runtime.bundle.open_bundle import open_bundle
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


def test_options_of_the_runtime_work_for_a_checkpoint(invoke: Invoke, checkpoint: Path, texts: Path) -> None:
    options = ("--memory", "4GiB", "--slots", 3, "--threads", 1, "--set", "kernels=scalar", "--context", 64)
    values = evaluate(invoke, checkpoint, "--data", texts, *options)
    assert values["slots"] == 3 and "kernels scalar, threads 1" in values["mode"]
    result = invoke("eval", checkpoint, "--data", texts, "--memory", "1MiB")
    assert result.exit_code == 1 and "under the floor" in result.stderr


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (("--lossy", "auto"), "`--lossy auto` takes thresholds from the records of a bundle, and here is none"),
        (("--lossy", "published"), "records of a bundle, and here is none\nhint: write them"),
        (("--lossy", "dynamic-precision 0.5,0.9"), "asks for low versions"),
        (("--modes", "sweep"), "holds no bundle"),
    ],
)
def test_what_a_checkpoint_cannot_have_is_refused(
    invoke: Invoke, checkpoint: Path, texts: Path, option: tuple[str, str], sentence: str
) -> None:
    result = invoke("eval", checkpoint, "--data", texts, *option)
    assert result.exit_code == 1 and sentence in result.stderr and "hint: " in result.stderr
    assert "temporary bundle" not in result.stderr


def test_a_checkpoint_without_a_weight_is_refused(
    invoke: Invoke, checkpoint: Path, texts: Path, tmp_path: Path
) -> None:
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    result = invoke("eval", broken, "--data", texts)
    assert result.exit_code == 1 and "missing tensor `model.norm.weight`" in result.stderr


def test_long_items_do_not_end_an_evaluation(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    """The text of 300 words exceeds the context, and keeps its start."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * size}) + "\n" for size in (2, 300, 3)))
    found = {}
    for policy in ("truncate", "skip", "refuse"):
        result = invoke("eval", bundle, "--data", path, "--context", 64, "--long-items", policy, "--json")
        found[policy] = result
    assert json.loads(found["truncate"].stdout)["long_items"] == {"shortened": 1, "left_out": 0}
    assert "1 items lose the end of their text: item 1 has" in found["truncate"].stderr
    skipped = json.loads(found["skip"].stdout)
    assert skipped["n"] == 2 and skipped["long_items"] == {"shortened": 0, "left_out": 1}
    assert found["refuse"].exit_code == 1 and "item 1 has" in found["refuse"].stderr


def test_models_that_are_none(invoke: Invoke, own_bundle: Path, texts: Path, tmp_path: Path) -> None:
    missing = invoke("eval", tmp_path / "nowhere", "--data", texts)
    assert missing.exit_code == 1 and "is not a folder" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = invoke("eval", tmp_path / "empty", "--data", texts)
    assert empty.exit_code == 1 and "config.json" in empty.stderr
    (own_bundle / "moec.json").unlink()
    beheaded = invoke("eval", own_bundle, "--data", texts)
    assert beheaded.exit_code == 3 and "moec.json" in beheaded.stderr


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


SWITCH = CHAT + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_a_task_states_thinking(
    invoke: Invoke, model: Path, bundle: Path, data: Path, task: Path, tmp_path: Path
) -> None:
    """Certificate and `moec eval` name thinking, the limit, and the answers that it cut. Both count the same."""
    folder = shutil.copytree(model, tmp_path / "thinker")
    (folder / "chat_template.jinja").write_text(SWITCH)
    prompts, out = ("--task", task, "--data", data, "--chat"), tmp_path / "out"
    results = {}
    for state, name in (("true", "on"), ("false", "off")):
        task.write_text(f"{TASK}thinking = {state}\n")
        results[name] = evaluate(invoke, folder, *prompts)
        assert results[name]["settings"]["thinking"] == name
    assert results["on"]["data_sha256"] != results["off"]["data_sha256"]
    result = invoke(
        "compile", folder, "--bits-per-weight", 9, "--group-size", 32, "--device", "raspberry-pi-4b-sd",
        "--no-comparisons", *prompts, "-o", out,
    )  # fmt: skip
    assert result.exit_code == 0 and "thinking is off, an answer has at most 3 tokens" in result.stderr, result.stderr
    certified = json.loads((out / "quality.json").read_text())["tasks"]["words"]
    ours = evaluate(invoke, out, *prompts)
    assert certified["settings"]["thinking"] == "off" and certified["max_new_tokens"] == ours["max_new_tokens"] == 3
    assert certified["cut"] == {"baseline": results["off"]["cut"], "value": ours["cut"]} and ours["cut"] > 0
    shown = invoke("eval", out, *prompts).stdout
    assert f"{ours['cut']} of {ours['n']} were cut at 3 tokens, thinking off" in shown
    for chosen in (model, bundle):  # a template without the switch, no template
        refused = invoke("eval", chosen, *prompts)
        assert refused.exit_code == 1 and refused.stdout == ""


def test_an_answer_that_ends_by_itself_is_not_cut(own_bundle: Path) -> None:
    """The last token before the limit may be the end token or complete a stop text."""

    def generation(*stop: str) -> tuple[Generation, int]:
        """Return an answer of at most 6 tokens, and the token that follows the prompt."""
        with bundle_engine(own_bundle, RuntimeOptions()) as engine:
            request = GenerationRequest("ab", None, 6, stop)
            first = int(engine.forced_logits(engine.encode_pairs([("ab", "c")]))[0][0].argmax())
            return in_order(engine.generate, [request])[0], first

    cut, first = generation()
    assert cut.is_cut and cut.tokens == 6
    assert not generation(cut.text)[0].is_cut
    path = own_bundle / "moec.json"
    manifest = decode_manifest(path.read_bytes(), "moec.json")
    path.write_bytes(encode_manifest(replace(manifest, model=replace(manifest.model, eos_token_ids=(first,)))))
    ended, _ = generation()
    assert not ended.is_cut and ended.tokens == 0


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
