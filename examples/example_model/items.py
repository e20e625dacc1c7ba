"""The items: prompts, the three splits of each task, and the training text.

Splits and training text come from the same generators. No normalised question or dialogue occurs twice in them: a
repeated text is dropped and another one is drawn.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from example_model.dialogues import draw_dialogue
from example_model.problems import draw_drill, draw_problem
from example_model.wording import normalise

SEED = 20_240
SPLITS = {"train": 1_000, "validation": 2_000, "test": 4_000}
FIELDS = {"gsm8k": ("question", "answer"), "samsum": ("dialogue", "summary")}
_BEFORE = {"gsm8k": "Question: {}\nAnswer:", "samsum": "Dialogue:\n{}\nSummary:"}


@dataclass(frozen=True)
class TrainingText:
    """A text to train on. The loss covers the answer. All of a drill is its answer."""

    task: str
    prompt: str
    answer: str


def prompt_of(task: str, text: str) -> str:
    """Return the prompt of an item. The answer follows after one space."""
    return _BEFORE[task].format(text)


def draw_pair(task: str, rng: random.Random) -> tuple[str, str]:
    """Draw a question and its answer, or a dialogue and its summary."""
    if task == "gsm8k":
        problem = draw_problem(rng)
        return problem.question, problem.answer
    dialogue = draw_dialogue(rng)
    return dialogue.dialogue, dialogue.summary


def draw_new(task: str, rng: random.Random, seen: set[str]) -> Iterator[tuple[str, str]]:
    """Draw pairs for ever. A pair is skipped if its normalised first text is in ``seen``; others are added to it."""
    while True:
        text, answer = draw_pair(task, rng)
        key = normalise(text)
        if key not in seen:
            seen.add(key)
            yield text, answer


def _take(task: str, draws: Iterator[tuple[str, str]], count: int) -> list[dict[str, str]]:
    first, second = FIELDS[task]
    return [{first: text, second: answer} for text, answer in (next(draws) for _ in range(count))]


def splits(task: str) -> dict[str, list[dict[str, str]]]:
    """Return the three splits that are shipped."""
    draws = draw_new(task, random.Random(f"{SEED} splits {task}"), set())
    return {name: _take(task, draws, count) for name, count in SPLITS.items()}


def training_texts(task: str, count: int) -> list[TrainingText]:
    """Return texts for training. None of their normalised questions or dialogues is in a split."""
    first, _ = FIELDS[task]
    seen = {normalise(item[first]) for items in splits(task).values() for item in items}
    draws = draw_new(task, random.Random(f"{SEED} training {task}"), seen)
    return [
        TrainingText(task, prompt_of(task, text), " " + answer) for text, answer in (next(draws) for _ in range(count))
    ]


def drills(count: int) -> list[TrainingText]:
    """Return rows of sums without a question."""
    rng = random.Random(f"{SEED} drills")
    return [TrainingText("drill", "", draw_drill(rng)) for _ in range(count)]
