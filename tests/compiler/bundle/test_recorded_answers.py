"""Answers in a journal: one that depends on anything else is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moec.compiler.bundle.recorded_answers import RecordedAnswers
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, Take, in_order


class Engine:
    """Answers with a text of its own, last request first, and fails after some answers."""

    def __init__(self, text: str, most: int = 100) -> None:
        self._text, self._left, self.answered = text, most, list[str]()

    def generate(self, requests: Sequence[GenerationRequest], take: Take[Generation]) -> None:
        for index in reversed(range(len(requests))):
            self._answer(requests[index].prompt)
            take(index, Generation(f"{self._text} {requests[index].prompt}", 2, 1))

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
        for index in reversed(range(len(pairs))):
            self._answer("".join(pairs[index]))
            take(index, AnswerScore(len(self._text) / 3, len(pairs[index][1])))

    def _answer(self, question: str) -> None:
        if len(self.answered) == self._left:
            raise MemoryError
        self.answered.append(question)


def requests(limit: int = 9, stop: tuple[str, ...] = ("x",), draft: str | None = None) -> list[GenerationRequest]:
    return [GenerationRequest(prompt, draft, limit, stop) for prompt in "abcd"]


def never() -> Engine:
    raise AssertionError("the runtime was opened")


def generations(
    folder: Path, runtime: Callable[[], Engine], asked: list[GenerationRequest], bundle: str = "answers-1"
) -> list[str]:
    with Journal(folder / "out.work", "one", Disk()).records(bundle) as records:
        return [answer.text for answer in in_order(RecordedAnswers(runtime, records).generate, asked)]


def test_finished_answers_are_taken_from_the_journal(tmp_path: Path) -> None:
    first, second = Engine("said", most=2), Engine("said")
    with pytest.raises(MemoryError):
        generations(tmp_path, lambda: first, requests())
    assert generations(tmp_path, lambda: second, requests(draft="a guess")) == ["said a", "said b", "said c", "said d"]
    assert (first.answered, second.answered) == (["d", "c"], ["b", "a"])
    assert generations(tmp_path, never, requests()) == ["said a", "said b", "said c", "said d"]


@pytest.mark.parametrize(
    ("bundle", "asked"),
    [("answers-2", requests()), ("answers-1", requests(limit=8)), ("answers-1", requests(stop=("x", "y")))],
)
def test_another_bundle_limit_or_end_has_other_answers(
    tmp_path: Path, bundle: str, asked: list[GenerationRequest]
) -> None:
    generations(tmp_path, lambda: Engine("said"), requests())
    assert generations(tmp_path, lambda: Engine("new"), asked, bundle) == ["new a", "new b", "new c", "new d"]


def test_scores_keep_every_bit(tmp_path: Path) -> None:
    """A prompt that ends where another answer begins is another question."""
    pairs, scores = [("a", "bc"), ("ab", "c"), ("", "abc")], list[list[AnswerScore]]()
    for runtime in (lambda: Engine("said"), never):
        with Journal(tmp_path / "out.work", "one", Disk()).records("answers-1") as records:
            scores.append(in_order(RecordedAnswers(runtime, records).answer_log_probs, pairs))
    assert scores[0] == scores[1] == [AnswerScore(4 / 3, count) for count in (2, 1, 3)]
