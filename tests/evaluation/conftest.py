"""Writers of small data sets and an engine that answers from a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, Take

Write = Callable[..., Path]


class TableEngine:
    """Answers each prompt from a table and keeps what it was asked."""

    def __init__(self, answers: dict[str, str] | None = None, nll: dict[str, tuple[float, int]] | None = None) -> None:
        self.answers = answers or {}
        self.nll = nll or {}
        self.requests: list[GenerationRequest] = []
        self.pairs: list[tuple[str, str]] = []

    def generate(self, requests: Sequence[GenerationRequest], take: Take[Generation]) -> None:
        self.requests.extend(requests)
        for index, request in enumerate(requests):
            text = self.answers.get(request.prompt, "")
            words = text.split()
            is_cut = len(words) >= request.max_new_tokens
            take(index, Generation(text, len(words), len(request.prompt.split()), is_cut))

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
        self.pairs.extend(pairs)
        for index, (_, answer) in enumerate(pairs):
            take(index, AnswerScore(*self.nll.get(answer, (1.0, 1))))


@pytest.fixture
def table_engine() -> type[TableEngine]:
    return TableEngine


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """write("a/b.jsonl", rows): one line per row; a row that is text or bytes is written as it is."""

    def _write(name: str, rows: Sequence[object]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            row if isinstance(row, bytes) else row.encode() if isinstance(row, str) else json.dumps(row).encode()
            for row in rows
        ]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return _write


@pytest.fixture
def problems() -> Callable[[int, int], list[dict[str, str]]]:
    def _problems(start: int, count: int) -> list[dict[str, str]]:
        return [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(start, start + count)]

    return _problems
