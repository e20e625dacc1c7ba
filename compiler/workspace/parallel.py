"""Passes side by side: each on one thread, results in order, the same bits whatever the number of threads.

A pass over 2,048 tokens has products too small to share: two passes at once give 11.5 k tokens/s where two threads on
one give 6 to 7.7 k (2 cores, 11 M parameters).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
Job = TypeVar("Job")
Result = TypeVar("Result")


class Workers:
    """Threads that run passes; results that are under way or wait to be taken are bounded: by twice their number."""

    def __init__(self, executor: ThreadPoolExecutor, count: int) -> None:
        self._executor, self.count = executor, count

    def submit(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Run it when a thread is free, in the order of submission."""
        return self._executor.submit(work, *args, **kwargs)

    def in_order(self, work: Callable[[Job], Result], jobs: Iterable[Job], most: int | None = None) -> Iterator[Result]:
        """Results of the jobs in their order; an error of a job is raised at its place. most: results at once."""
        most = most or 2 * self.count + 1
        waiting: deque[Future[Result]] = deque()
        for job in jobs:
            waiting.append(self.submit(work, job))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def in_parts(items: Sequence[Job], count: int) -> Iterator[Sequence[Job]]:
    """Consecutive parts of that many items, the last one shorter."""
    return (items[start : start + count] for start in range(0, len(items), count))


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    """That many threads, each with one thread of torch. Jobs that have not begun are dropped at the end."""
    with one_torch_thread():
        # Each says so itself: a new thread whose first work is a product shares it between as many threads as there
        # are processors, whatever torch was told elsewhere, and products of few rows then end in other last bits.
        executor = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield Workers(executor, count)
        finally:
            executor.shutdown(cancel_futures=True)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """One thread inside each of torch's operations, and the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
