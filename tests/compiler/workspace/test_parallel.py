"""Parallel passes: order, errors, bounded waiting, and equal bits for any number of threads."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from moec.compiler.sensitivity.answer_walk import AnswerWalk
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.output_head import OutputHead
from moec.compiler.workspace.parallel import one_torch_thread, workers
from tests.compiler.lowered import lowered, scored
from tests.tiny_models import TinyMixtral, save_tiny_mixtral


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_mixtral(tmp_path_factory.mktemp("parallel") / "tiny", TinyMixtral())


def test_results_come_in_the_order_of_the_jobs() -> None:
    def late(job: int) -> int:
        time.sleep(0.02 if job % 3 == 0 else 0)
        return job

    with workers(3) as pool:
        assert list(pool.in_order(late, range(20))) == list(range(20))


def test_an_error_is_raised_at_its_place_and_ends_the_rest() -> None:
    started = []

    def work(job: int) -> int:
        started.append(job)
        time.sleep(0.01)
        if job == 2:
            raise KeyError(job)
        return job

    seen = []
    with pytest.raises(KeyError), workers(1) as pool:
        for result in pool.in_order(work, range(100)):
            seen.append(result)
    assert seen == [0, 1]
    assert len(started) < 10, "jobs that had not begun were dropped"


def test_what_waits_is_bounded() -> None:
    taken = 0

    def jobs():
        nonlocal taken
        for job in range(50):
            taken += 1
            yield job

    with workers(2) as pool:
        results = pool.in_order(lambda job: job, jobs())
        next(results)
        assert taken <= 6


def test_jobs_run_at_the_same_time_with_one_torch_thread_each() -> None:
    meeting = threading.Barrier(2, timeout=120)
    before = torch.get_num_threads()

    def work(job: int) -> int:
        meeting.wait()
        return torch.get_num_threads()

    with workers(2) as pool:
        assert list(pool.in_order(work, range(4))) == [1] * 4
    assert torch.get_num_threads() == before
    torch.set_num_threads(2)
    try:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_new_thread_begins_with_one_torch_thread_as_well() -> None:
    """Its first job is a product of few rows, whose bits depend on the number of threads."""
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    pairs = [
        (torch.randn(rows, 32, generator=generator), torch.randn(32, 48, generator=generator))
        for rows in (5, 6, 7, 9, 10, 11)
    ]
    torch.set_num_threads(4)
    try:
        with one_torch_thread():
            expected = [one @ other for one, other in pairs]
        for pair, product in zip(pairs, expected, strict=True):
            with workers(1) as pool:
                assert torch.equal(pool.submit(torch.mm, *pair).result(), product)
    finally:
        torch.set_num_threads(before)


def test_the_number_of_threads_changes_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are computed in many parts, by as many threads as there are."""
    monkeypatch.setattr("moec.compiler.walker.output_head.LOGITS_PER_CHUNK", 40_000)
    computing, logits = set[int](), OutputHead.logits

    def noted(head: OutputHead, states: torch.Tensor) -> torch.Tensor:
        computing.add(threading.get_ident())
        time.sleep(0.001)  # lets the other threads take a part
        return logits(head, states)

    monkeypatch.setattr(OutputHead, "logits", noted)
    lowering, random, found = lowered(folder), np.random.default_rng(1), []
    pairs = [(random.integers(4, 250, 5 + 9 * (n % 7)).tolist(), [n, 7, 9]) for n in range(150)]
    answers = scored(lowering.model, pairs)
    matrix = {"lm_head": lowering.dense_weight("lm_head").float().mul(1.1)}
    told = list[tuple[int, int]]()
    for threads in (1, 2, 5):
        walk = AnswerWalk(lambda: LoadedLayer(lowering), answers, threads, lambda *step: told.append(step))
        computing.clear()
        found.append(walk.measure(matrix.get))
        assert (len(computing) > 1) == (threads > 1)
        assert told[-1][0] == told[-1][1] > lowering.model.num_layers + 3, "the parts of the logits are told"
    for measures in found[1:]:
        assert np.array_equal(measures.kl, found[0].kl) and np.array_equal(measures.nll, found[0].nll)
    assert found[0].kl.mean() > 0
