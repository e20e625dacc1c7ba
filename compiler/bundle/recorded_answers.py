"""Answers of the runtime that a killed compile does not lose."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, Take, TextEngine
from moec.manifests.codec import canonical_json

from ..workspace.journal import Records


class RecordedAnswers:
    """The runtime on a bundle. Each answer is recorded as soon as it is finished, and is computed once.

    runtime: returns the runtime. It is called only if an answer is missing.
    records: answers of this bundle, by the digest of what was asked.
    """

    def __init__(self, runtime: Callable[[], TextEngine], records: Records) -> None:
        self._runtime, self._records = runtime, records

    def generate(self, requests: Sequence[GenerationRequest], take: Take[Generation]) -> None:
        """See TextEngine. A draft changes no answer."""
        questions = [(request.prompt, request.max_new_tokens, request.stop) for request in requests]
        self._answer(
            requests, questions, lambda missing, record: self._runtime().generate(missing, record), Generation, take
        )

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
        """See TextEngine."""

        def score(missing: Sequence[tuple[str, str]], record: Take[AnswerScore]) -> None:
            self._runtime().answer_log_probs(missing, record)

        self._answer(pairs, pairs, score, AnswerScore, take)

    def _answer(
        self,
        requests: Sequence[Any],
        questions: Sequence[Any],
        compute: Callable[[Sequence[Any], Take[Any]], None],
        result: Callable[..., Any],
        take: Take[Any],
    ) -> None:
        """Take the recorded results, then compute and record the others.

        questions: by request, everything that its result depends on.
        result: makes a result from its recorded values.
        """
        names = [hashlib.sha256(canonical_json(question)).hexdigest() for question in questions]
        missing = list[int]()
        for index, name in enumerate(names):
            values = self._records.get(name)
            if values is None:
                missing.append(index)
            else:
                take(index, result(*values))

        def record(position: int, answer: Any) -> None:
            self._records.add(names[missing[position]], astuple(answer))
            take(missing[position], answer)

        if missing:
            compute([requests[index] for index in missing], record)
