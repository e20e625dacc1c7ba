"""The example data: forms, arithmetic, variety, disjointness, and that the generators draw the same again."""

import json
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from example_model import items as item_module  # noqa: E402
from example_model.items import FIELDS, SPLITS, prompt_of, splits, training_texts  # noqa: E402
from example_model.wording import normalise  # noqa: E402

pytestmark = pytest.mark.slow

STEP = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a // b if a % b == 0 else None,
}


def shipped(task: str, split: str) -> list[dict[str, str]]:
    lines = (EXAMPLES / "data" / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def every_item(task: str) -> list[dict[str, str]]:
    return [item for split in SPLITS for item in shipped(task, split)]


@pytest.mark.parametrize("task", FIELDS)
def test_splits_have_their_sizes_and_fields(task: str) -> None:
    for split, count in SPLITS.items():
        found = shipped(task, split)
        assert len(found) == count
        assert all(tuple(item) == FIELDS[task] for item in found)
        assert all(value.strip() == value and value for item in found for value in item.values())


@pytest.mark.parametrize("task", FIELDS)
def test_data_is_what_the_generator_draws(task: str) -> None:
    drawn = splits(task)
    for split in SPLITS:
        assert drawn[split] == shipped(task, split)


@pytest.mark.parametrize("task", FIELDS)
def test_no_text_occurs_twice_in_the_splits(task: str) -> None:
    texts = [normalise(item[FIELDS[task][0]]) for item in every_item(task)]
    assert len(set(texts)) == len(texts)


def test_working_is_right_and_results_are_small() -> None:
    for item in every_item("gsm8k"):
        working, _, number = item["answer"].partition("\n#### ")
        steps = STEP.findall(working)
        assert steps, item
        for left, sign, right, result, shown in steps:
            assert OPERATIONS[sign](int(left), int(right)) == int(result)
            assert result == shown
            assert 0 <= int(result) <= 100
        assert number == steps[-1][3]
        assert len(STEP.sub("", working).split()) <= 2 * len(steps)


@pytest.mark.parametrize("task", FIELDS)
def test_training_text_holds_no_shipped_text_and_none_twice(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from example_model.train import COUNTS

    drawn = training_texts(task, COUNTS[task])
    prompts = {normalise(text.prompt) for text in drawn}
    assert len(prompts) == len(drawn)
    assert not prompts & {normalise(prompt_of(task, item[FIELDS[task][0]])) for item in every_item(task)}
    assert item_module.SEED == 20_240
