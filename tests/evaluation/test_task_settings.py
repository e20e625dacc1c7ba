"""Other prompts and metrics for a task: chats, templates, metrics of `evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from moec.evaluation.data import items_sha256
from moec.evaluation.run import compare, evaluate
from moec.evaluation.tasks import Task, find_task
from moec.evaluation.tasks.answer_metrics import ForeignMetric, foreign_metric
from moec.evaluation.tasks.prompt_forms import ChatForm, RenderedPrompt
from moec.evaluation.tasks.task_settings import TaskSettings
from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.errors import DataError, OptionError
from tests.tiny_models import tiny_tokenizer

GSM8K, XSUM = find_task("gsm8k"), find_task("xsum")
SHOT, ITEM = {"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "#### 4"}


@dataclass
class Fixed:
    """Templates that show what they were given."""

    content: bytes = b"content"

    def chat(self) -> Fixed:
        return self

    def prompt(self, path: Path) -> Fixed:
        return Fixed(path.read_bytes())

    def render(self, given: Any, more: Any = None, /) -> str:
        if isinstance(given, Mapping):
            return f"T({given['question']}|{'+'.join(shot['answer'] for shot in given['shots'])})"
        asked = "".join(f"<{message['role']}>{message['content']}" for message in given) + "<assistant>"
        is_switch = b"</think>" in self.content and more and not more["enable_thinking"]
        return asked + ("<think></think>" if is_switch else "")


class Switch(Fixed):
    """Templates with a switch for thinking."""

    def chat(self) -> Fixed:
        return Fixed(b"<think></think>")


def thinking(is_on: bool | None) -> Task:
    return TaskSettings(chat=True).apply(replace(GSM8K, thinking=is_on), Switch)


def applied(task: Any = GSM8K, **settings: Any) -> Any:
    return TaskSettings(**settings).apply(task, Fixed)


def test_solved_examples_are_turns_of_a_chat() -> None:
    task = applied(chat=True, system="Be brief.")
    assert task.prompt(ITEM, [SHOT]) == (
        "<system>Be brief.<user>Question: 1+1?\nAnswer:<assistant>#### 2<user>Question: 2+2?\nAnswer:<assistant>"
    )
    assert (task.answer(ITEM), task.stop) == ("#### 4", ())  # the end of the turn ends the answer
    assert isinstance(task.prompt(ITEM), RenderedPrompt)
    assert task.settings.keys() == {"chat_template_sha256", "system"}


def test_a_template_makes_the_prompt_or_the_message(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ question }}{{ shots }}")
    task = applied(prompt_template=str(path))
    assert (task.prompt(ITEM, [SHOT]), task.answer(ITEM)) == ("T(2+2?|#### 2)", " #### 4")
    assert not isinstance(task.prompt(ITEM), RenderedPrompt) and task.stop == GSM8K.stop
    both = applied(prompt_template=str(path), chat=True)
    assert both.prompt(ITEM, [SHOT]) == "<user>T(1+1?|)<assistant>#### 2<user>T(2+2?|)<assistant>"
    path.write_text("{{ question }}\nAnswer:\n\n")
    assert applied(prompt_template=str(path)).answer(ITEM) == "#### 4"


def test_a_task_switches_thinking() -> None:
    asked = "<user>Question: 2+2?\nAnswer:<assistant>"
    prompts = {True: asked, False: f"{asked}<think></think>", None: asked}
    assert {is_on: thinking(is_on).prompt(ITEM) for is_on in prompts} == prompts
    named = {is_on: thinking(is_on).settings.get("thinking") for is_on in prompts}
    assert named == {True: "on", False: "off", None: None}
    assert len({items_sha256(thinking(is_on), [ITEM]) for is_on in prompts}) == 3


def test_thinking_needs_a_template_that_switches_it() -> None:
    task = replace(GSM8K, thinking=True)
    with pytest.raises(OptionError, match=r"states `thinking`, which only a chat template switches .*`--chat`"):
        applied(task)
    with pytest.raises(OptionError, match="states `thinking`, and the chat template of the model does not switch it"):
        applied(task, chat=True)


@pytest.mark.parametrize(
    ("prompt_end", "text", "score"),
    [
        ("", "<think>5</think> #### 4", 1.0),
        ("", "<think>#### 4</think> 5", 0.0),
        ("", "<think>#### 4", 0.0),
        ("<think>", "#### 4</think>5", 0.0),
        ("", "#### 4", 1.0),
    ],
)
def test_the_score_reads_what_follows_the_thought(prompt_end: str, text: str, score: float, table_engine) -> None:
    task = thinking(True)
    assert isinstance(task.form, ChatForm)
    form = task.form
    task = replace(task, form=replace(form, render=lambda messages: form.render(messages) + prompt_end))
    result = evaluate(task, [ITEM], table_engine({task.prompt(ITEM): text}))
    assert (result.value, result.items[0].prediction) == (score, text), "drafts of the bundle have the thought"


def test_a_template_without_shots_takes_none(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ question }}")
    task = applied(prompt_template=str(path))
    assert task.prompt(ITEM) == "T(2+2?|)"
    with pytest.raises(OptionError, match="the template does not name `shots`"):
        task.prompt(ITEM, [SHOT])


def test_listed_answers_follow_a_chat() -> None:
    task = applied(find_task("piqa"), chat=True)
    assert task.read is not None
    item = task.read({"goal": "g", "sol1": "one", "sol2": "two", "label": 1})
    pairs, right = task.given_answers(item)
    assert pairs == [("<user>Question: g\nAnswer:<assistant>", text) for text in ("one", "two")] and right == 1


def test_prompts_are_part_of_the_identity(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ question }}")
    tasks = [
        GSM8K,
        applied(chat=True),
        applied(chat=True, system="a"),
        applied(chat=True, system="b"),
        applied(prompt_template=str(path)),
        applied(prompt_template=str(path), chat=True),
    ]
    assert len({items_sha256(task, [ITEM]) for task in tasks}) == len(tasks)


def test_a_rendered_prompt_gets_no_special_tokens() -> None:
    tokenizer = tiny_tokenizer().backend_tokenizer
    texts = [("ab", " c"), (RenderedPrompt("ab"), " c"), ("b", " c")]
    plain, rendered, last = encode_pairs(tokenizer, texts)
    assert plain[0] == tokenizer.encode("ab").ids and last[0] == tokenizer.encode("b").ids
    assert rendered[0] == tokenizer.encode("ab", add_special_tokens=False).ids and rendered[1] == plain[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"system": "a"}, "no effect without `--chat`"), ({"lower_is_better": True}, "no effect without `--metric`")],
)
def test_settings_without_effect(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TaskSettings(**settings)


def test_settings_that_do_not_fit_a_task() -> None:
    text = find_task("perplexity")
    with pytest.raises(OptionError, match=r"scores plain text and has no prompt .*`--chat`"):
        applied(text, chat=True)
    with pytest.raises(OptionError, match="is scored by perplexity, not by `rouge2`"):
        applied(text, metric="rouge2")
    with pytest.raises(OptionError, match="is scored by exact_match, not by `perplexity`"):
        applied(metric="perplexity")
    with pytest.raises(OptionError, match="higher values of `rouge1` are better"):
        applied(metric="rouge1", lower_is_better=True)
    with pytest.raises(OptionError, match="higher values of `exact_match` are better"):
        applied(metric="exact_match", lower_is_better=True)
    with pytest.raises(OptionError, match="need a model"):
        TaskSettings(chat=True).apply(GSM8K, None)


def test_another_metric_becomes_the_primary_one(table_engine) -> None:
    assert applied(metric="exact_match").metrics == ("exact_match",)
    assert applied(XSUM, metric="rougeL").metrics == ("rougeL", "rouge2", "rouge1")
    task = applied(metric="rouge1")
    result = evaluate(task, [ITEM], table_engine({task.prompt(ITEM): " #### 4 5"}))
    assert (result.metric, result.value) == ("rouge1", pytest.approx(2 / 3))


METRIC = """
import datasets
import evaluate

class Distance(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

    def _compute(self, predictions, references):
        return RESULT
"""
LENGTHS = '{"distance": sum(abs(len(p) - len(r)) for p, r in zip(predictions, references)) / len(predictions)}'


def metric_folder(folder: Path, result: str = LENGTHS) -> str:
    (folder / "distance").mkdir()
    (folder / "distance" / "distance.py").write_text(METRIC.replace("RESULT", result))
    return str(folder / "distance")


def test_a_metric_of_evaluate_scores_each_item(tmp_path: Path, table_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    task = applied(metric=metric_folder(tmp_path), trusts_metric_code=True, lower_is_better=True)
    items = [{"question": f"{i}?", "answer": "12345"} for i in range(40)]
    one = evaluate(task, items, table_engine({task.prompt(item): " 1234" for item in items}))
    two = evaluate(task, items, table_engine({task.prompt(item): " 123" for item in items}))
    assert (one.metric, one.value, two.value) == ("distance", 1.0, 2.0)
    assert compare(task, one, two).loss == pytest.approx(1.0)  # a greater distance is a loss
    assert compare(task, two, one).loss == pytest.approx(-0.5)
    assert not (tmp_path / "home").exists()


def test_code_of_a_metric_needs_permission(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"is none of moec's metrics .* runs with your rights .*--trust-metric-code"):
        applied(metric=metric_folder(tmp_path))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ('{"a": 1.0, "b": 2.0}', r"has the values a, b, and one is needed .*distance:VALUE"),
        ('{"a": "text"}', "has the values none"),
        ("1 / 0", "does not take texts .* division by zero"),
        ("exit(0)", "does not take texts .*: SystemExit"),
        ("(_ for _ in ()).throw(SystemExit(0))", "does not take texts .*: SystemExit"),
        ("(_ for _ in ()).throw(GeneratorExit)", "does not take texts .*: GeneratorExit"),
    ],
)
def test_metrics_that_cannot_be_used(result: str, message: str, tmp_path: Path) -> None:
    folder = metric_folder(tmp_path, result)
    with pytest.raises(OptionError, match=message):
        applied(metric=folder, trusts_metric_code=True)


def test_one_of_several_values(tmp_path: Path) -> None:
    folder = metric_folder(tmp_path, '{"a": 1.0, "b": float(len(predictions[0]))}')
    found = foreign_metric(f"{folder}:b", True)
    assert (found.name, found.scores(["abc", "d"], ["", ""]).tolist()) == ("b", [3.0, 1.0])


def test_a_metric_that_fails_for_an_item(tmp_path: Path) -> None:
    found = foreign_metric(metric_folder(tmp_path, '{"distance": float(predictions[0].replace("a b", "1"))}'), True)
    with pytest.raises(DataError, match="item 1: the metric `distance` fails with could not convert"):
        found.scores(["1", "x"], ["", ""])
    with pytest.raises(DataError, match="item 0: the metric `distance` gives nan"):
        found.scores(["nan"], [""])


def test_a_metric_that_ends_the_process_gives_no_score(tmp_path: Path) -> None:
    """`evaluate` ends with a sentence, not with code 0 and without a score. An interrupt still ends it."""
    result = '{"distance": 1.0} if predictions[0] == "a b" else exit(0)'
    found = foreign_metric(metric_folder(tmp_path, result), True)
    with pytest.raises(DataError, match="item 0: the metric `distance` fails with SystemExit"):
        found.scores(["x"], [""])

    def interrupted(**given: object) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ForeignMetric("distance", "distance", interrupted).scores(["x"], [""])


def test_a_metric_whose_code_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "ending").mkdir()
    (tmp_path / "ending" / "ending.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(OptionError, match="cannot be loaded: SystemExit"):
        applied(metric=str(tmp_path / "ending"), trusts_metric_code=True)


def test_metrics_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="does not exist"):
        applied(metric=str(tmp_path / "none"), trusts_metric_code=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="cannot be loaded"):
        applied(metric=str(tmp_path / "empty"), trusts_metric_code=True)
