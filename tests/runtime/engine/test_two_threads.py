"""One engine in two threads: the right result or a refusal, never a wrong result without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ExecutionError
from moec.runtime import load
from moec.runtime.engine.batch import forced_logits, generate_many
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.engine.engine import Engine

TEXTS = [[1, 5, 9, 3, 7], [2, 8, 4, 6], [3, 1, 4, 1, 5, 9, 2, 6]]
REFUSAL = "in use by another thread"


def logits(engine: Engine, text: list[int]) -> list[np.ndarray]:
    return [engine.logits(text)]


def generated(engine: Engine, text: list[int]) -> list[np.ndarray]:
    return [np.array([step.token_id for step in engine.generate(text, 6)])]


def batch(engine: Engine, text: list[int]) -> list[np.ndarray]:
    return [np.array(answer) for answer in generate_many(engine, [text, text[1:]], [[], []], [4, 4])]


def forced(engine: Engine, text: list[int]) -> list[np.ndarray]:
    return [found for _, found in forced_logits(engine, [(text, text), (text[1:], text)], decodes=True)]


def beams(engine: Engine, text: list[int]) -> list[np.ndarray]:
    return [np.array(beam.tokens) for beam in beam_search(engine, text, 4, BeamOptions(2))]


CALLS: dict[str, Callable[[Engine, list[int]], list[np.ndarray]]] = {
    "logits": logits,
    "generate": generated,
    "batch": batch,
    "forced": forced,
    "beams": beams,
}
OPTIONS: list[dict[str, Any]] = [
    {"expert_cache": "100%"},
    {"expert_cache": "30%", "cache_state": "cold"},
    {"expert_cache": "30%", "cache_state": "cold", "io": "mmap"},
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("options", OPTIONS, ids=["all", "some", "mapped"])
def test_right_or_refused(tiny_bundle: Path, call: str, options: dict[str, Any]) -> None:
    with load(tiny_bundle, slots=2, **options) as engine:
        compute = CALLS[call]
        expected = [compute(engine, text) for text in TEXTS]
        refusals, wrong, done, start = list[str](), list[int](), list[int](), threading.Barrier(2)

        def work(first: int) -> None:
            start.wait()
            for number in range(first, first + 40):
                which = number % len(TEXTS)
                try:
                    found = compute(engine, TEXTS[which])
                except ExecutionError as error:
                    refusals.append(str(error))
                    continue
                done.append(which)
                if not all(np.array_equal(one, other) for one, other in zip(found, expected[which], strict=True)):
                    wrong.append(which)

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not wrong and len(done) + len(refusals) == 80
        assert all(REFUSAL in text or "another call has taken over" in text for text in refusals)
        assert all(np.array_equal(*pair) for pair in zip(compute(engine, TEXTS[0]), expected[0], strict=True))


def test_a_second_thread_is_refused_while_one_is_in_a_pass(tiny_bundle: Path) -> None:
    """And only then: threads may take turns, also within one generation."""
    with load(tiny_bundle, slots=2) as engine:
        expected = generated(engine, TEXTS[0])[0].tolist()
        inside, leave = threading.Event(), threading.Event()
        plain = engine.model.forward

        def slow(*arguments: Any, **options: Any) -> np.ndarray:
            inside.set()
            assert leave.wait(60)
            return plain(*arguments, **options)

        engine.model.forward = slow  # type: ignore[method-assign]
        results = list[np.ndarray]()
        thread = threading.Thread(target=lambda: results.extend(logits(engine, TEXTS[1])))
        thread.start()
        assert inside.wait(60)
        for call in CALLS.values():
            with pytest.raises(ExecutionError, match=REFUSAL):
                call(engine, TEXTS[0])
        for refused in (
            lambda: engine.step([1], [0], [0]),
            lambda: engine.copy_slots([0, 0], 1),
            engine.begin_sequence,
            lambda: engine.place_dense(on_device=False),
        ):
            with pytest.raises(ExecutionError, match=REFUSAL):
                refused()
        leave.set()
        thread.join(60)
        engine.model.forward = plain  # type: ignore[method-assign]
        assert np.array_equal(results[0], engine.logits(TEXTS[1]))

        steps, found = engine.generate(TEXTS[0], 6), list[int]()
        for _ in expected:
            turn = threading.Thread(target=lambda: found.append(next(steps).token_id))
            turn.start()
            turn.join(60)
        assert found == expected


def test_a_failed_pass_leaves_the_engine_free(tiny_bundle: Path) -> None:
    with load(tiny_bundle) as engine:
        with pytest.raises(ValueError, match="expected indices"):
            engine.step([10**6], [0], [0])
        found = list[np.ndarray]()
        thread = threading.Thread(target=lambda: found.extend(logits(engine, TEXTS[0])))
        thread.start()
        thread.join(60)
        assert np.array_equal(found[0], engine.logits(TEXTS[0]))
