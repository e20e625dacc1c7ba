"""Prompts letter by letter, which task a set of fields belongs to, and multiple choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from moec.evaluation.data import load_items
from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, Take
from moec.evaluation.run import compare, evaluate
from moec.evaluation.tasks import TASKS, find_task, infer_task
from moec.evaluation.tasks.choices import choices_of
from moec.manifests.errors import DataError, ExecutionError, OptionError


def test_prompts_are_those_of_the_plan() -> None:
    problem = {"question": "What is 1 + 1?", "answer": "<<1+1=2>>2.\n#### 2"}
    gsm8k = find_task("gsm8k")
    assert gsm8k.prompt(problem) == "Question: What is 1 + 1?\nAnswer:"
    assert gsm8k.answer(problem) == " <<1+1=2>>2.\n#### 2"
    assert gsm8k.reference(problem) == "<<1+1=2>>2.\n#### 2"
    dialogue = {"dialogue": "A: Hi\nB: Bye", "summary": "A greets B."}
    assert find_task("samsum").prompt(dialogue) == "Dialogue:\nA: Hi\nB: Bye\nSummary:"
    assert find_task("samsum").answer(dialogue) == " A greets B."
    assert find_task("xsum").prompt({"document": "Long {text}.", "summary": "S"}) == "Document:\nLong {text}.\nSummary:"
    plain = find_task("perplexity")
    assert (plain.prompt({"text": "words"}), plain.answer({"text": "words"})) == ("", "words")
    assert plain.reference({"text": "words"}) == "words"


def test_shots_stand_in_front_with_blank_lines() -> None:
    task = find_task("gsm8k")
    shots = [{"question": f"q{i}", "answer": f"#### {i}"} for i in (1, 2)]
    expected = "Question: q1\nAnswer: #### 1\n\nQuestion: q2\nAnswer: #### 2\n\nQuestion: q3\nAnswer:"
    assert task.prompt({"question": "q3", "answer": "#### 3"}, shots) == expected


def test_plain_text_takes_no_shots() -> None:
    with pytest.raises(OptionError, match=r"takes no solved examples .*--shots"):
        find_task("perplexity").prompt({"text": "a"}, [{"text": "b"}])


@pytest.mark.parametrize(
    ("text", "prediction"),
    [
        (" 2.\n#### 2\n\nQuestion: more", "2.\n#### 2"),
        (" #### 2\nQuestion: more\n\n", "#### 2"),
        (" #### 2", "#### 2"),
        ("", ""),
        ("\n\nlate", ""),
    ],
)
def test_predictions_end_at_the_first_stop(text: str, prediction: str) -> None:
    assert find_task("gsm8k").cut(text) == prediction


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (["question", "answer", "id"], "gsm8k"),
        (["dialogue", "summary"], "samsum"),
        (["document", "summary"], "xsum"),
        (["text"], "perplexity"),
        (["text", "question", "answer"], "gsm8k"),
    ],
)
def test_task_follows_from_the_fields(fields: list[str], name: str) -> None:
    assert infer_task(dict.fromkeys(fields, "x"), "here").name == name


def test_every_task_is_inferred_from_its_own_fields() -> None:
    assert [infer_task(dict.fromkeys(task.row_fields, "x"), "here") for task in TASKS.values()] == list(TASKS.values())


def test_fields_that_fit_no_task_or_several() -> None:
    with pytest.raises(DataError) as caught:
        infer_task({"body": "x", "title": "x"}, "`a.jsonl:1`")
    for part in ("`a.jsonl:1`", "`body`, `title`", "gsm8k (question, answer)", "perplexity (text)"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match=r"fit the tasks samsum and xsum .*--task"):
        infer_task(dict.fromkeys(("document", "dialogue", "summary"), "x"), "`a.jsonl:1`")
    with pytest.raises(DataError, match="found none"):
        infer_task({}, "`a.jsonl:1`")


def test_unknown_task_lists_the_known() -> None:
    with pytest.raises(OptionError, match=r"task `copa` is not known .*gsm8k .*samsum .*xsum .*perplexity"):
        find_task("copa")


ROWS: dict[str, dict[str, Any]] = {
    "hellaswag": {
        "activity_label": "Roof work", "ctx_a": "[header] A man is on a roof [title] He", "ctx_b": "starts",
        "endings": ["sings.", " eats [step] a nail."], "label": "1", "ctx": "unused", "ind": 4,
    },
    "piqa": {"goal": "Open a jar.", "sol1": "Twist the lid.", "sol2": "Drop it.", "label": 0},
    "winogrande": {
        "sentence": "The cup beat the plate because _ was tougher.", "option1": "the cup", "option2": "the plate",
        "answer": "2",
    },
    "mmlu": {"question": "2 + 2? ", "choices": ["3", "4", "5", "22"], "answer": 1, "subject": "sums"},
    "truthfulqa": {
        "question": "What falls?", "mc1_targets": {"choices": ["Rain", "Nothing", "Up"], "labels": [0, 1, 0]},
    },
}  # fmt: skip
_CUP = "The cup beat the plate because "
EXPECTED: dict[str, tuple[list[tuple[str, str]], int]] = {
    "hellaswag": ([("Roof work: A man is on a roof. He Starts", ending) for ending in (" sings.", " eats a nail.")], 1),
    "piqa": ([("Question: Open a jar.\nAnswer:", answer) for answer in (" Twist the lid.", " Drop it.")], 0),
    "winogrande": ([(f"{_CUP}{option}", " was tougher.") for option in ("the cup", "the plate")], 1),
    "mmlu": ([("2 + 2?\nA. 3\nB. 4\nC. 5\nD. 22\nAnswer:", f" {letter}") for letter in "ABCD"], 1),
    "truthfulqa": ([("Q: What falls?\nA:", f" {answer}") for answer in ("Rain", "Nothing", "Up")], 1),
}


def save(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Likes:
    """Gives each answer the NLL that a function says."""

    def __init__(self, nll: Any) -> None:
        self._nll = nll
        self.asked: list[tuple[str, str]] = []

    def generate(self, requests: Sequence[GenerationRequest], take: Take[Generation]) -> None:
        raise AssertionError("nothing is generated")

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
        self.asked += pairs
        for index, (_, answer) in enumerate(pairs):
            take(index, AnswerScore(float(self._nll(answer)), len(answer)))


@pytest.mark.parametrize("name", ROWS)
def test_rows_become_prompts_and_answers(name: str, tmp_path: Path) -> None:
    for task in (name, None):  # also inferred from the fields
        items, _ = load_items(save(tmp_path / "rows.jsonl", ROWS[name]), task)
        assert items.task.name == name
        assert choices_of(items.items[0]) == EXPECTED[name]
    saved = save(tmp_path / "items.jsonl", dict(items.items[0]))
    assert load_items(saved, name)[0].items == items.items  # an item is read as it is written


def test_the_likeliest_answer_is_the_prediction(tmp_path: Path) -> None:
    rows = [{**ROWS["piqa"], "label": label, "goal": f"goal {label}"} for label in (0, 1)]
    items, _ = load_items(save(tmp_path / "rows.jsonl", *rows), "piqa")
    engine = Likes(len)  # the shorter answer is likelier; per character all are alike, so the first counts
    found = evaluate(items.task, items.items, engine)
    assert found.metric == "accuracy" and found.value == 0.5 and found.scores.tolist() == [0.0, 1.0]
    assert found.other_metrics == {"accuracy_by_length": 0.5}
    assert [item.prediction for item in found.items] == ["Drop it.", "Drop it."]
    assert [item.reference for item in found.items] == ["Twist the lid.", "Drop it."]
    assert len(engine.asked) == 4
    assert compare(items.task, found, evaluate(items.task, items.items, Likes(lambda answer: -len(answer)))).loss == 0.0


def test_solved_examples_stand_in_front(tmp_path: Path) -> None:
    rows = [{**ROWS["mmlu"], "question": f"question {n}"} for n in range(40)]
    items, shots = load_items(save(tmp_path / "rows.jsonl", *rows), "mmlu", shots=2)
    engine = Likes(len)
    evaluate(items.task, items.items[:1], engine, shots=shots)
    prompt = engine.asked[0][0]
    assert prompt.count("Answer: B\n\n") == 2 and prompt.endswith("D. 22\nAnswer:")


def test_an_nll_that_is_no_number_is_named(tmp_path: Path) -> None:
    items, _ = load_items(save(tmp_path / "rows.jsonl", ROWS["piqa"]), "piqa")
    with pytest.raises(ExecutionError, match="item 0: the engine gave an answer an NLL that is not finite"):
        evaluate(items.task, items.items, Likes(lambda answer: float("nan")))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("piqa", {"label": 2}, "names answer 2 of 2"),
        ("piqa", {"label": None}, "has no number of an answer in `label`"),
        ("piqa", {"sol1": " "}, "none of them blank"),
        ("piqa", {"goal": 7}, "has no text in `goal`"),
        ("hellaswag", {"endings": "one"}, "has no list of texts in `endings`"),
        ("winogrande", {"sentence": "no gap"}, "has no `_` in `sentence`"),
        ("mmlu", {"answer": "Z"}, "has no number of an answer in `answer`"),
        ("mmlu", {"answer": ""}, "hides its answer: `answer` is ''"),
        ("mmlu", {"answer": "BC"}, "has no number of an answer in `answer`"),
        ("truthfulqa", {"mc1_targets": {"choices": ["a", "b"], "labels": 5}}, "other than one right answer"),
        ("truthfulqa", {"mc1_targets": {"choices": ["a", "b"], "labels": [1, None]}}, "other than one right answer"),
        ("mmlu", {"choices": ["only"], "answer": 0}, "needs two answers or more"),
        ("truthfulqa", {"mc1_targets": {"choices": ["a", "b"], "labels": [1, 1]}}, "other than one right answer"),
        ("truthfulqa", {"mc1_targets": []}, "has no `choices` and `labels`"),
    ],
)
def test_rows_that_make_no_item_name_their_place(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save(tmp_path / "rows.jsonl", ROWS[name], {**ROWS[name], **changes})
    with pytest.raises(DataError, match=message) as caught:
        load_items(path, name)
    assert "rows.jsonl:2" in str(caught.value)
    lacking = {key: value for key, value in ROWS[name].items() if key not in changes}
    with pytest.raises(DataError, match=f"the field `{next(iter(changes))}` of task `{name}` is missing"):
        load_items(save(path, lacking), name)
