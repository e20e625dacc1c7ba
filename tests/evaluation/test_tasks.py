"""Prompts letter by letter, and which task a set of fields belongs to."""

from __future__ import annotations

import pytest

from moec.evaluation.tasks import TASKS, find_task, infer_task
from moec.manifests.errors import DataError, OptionError


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
