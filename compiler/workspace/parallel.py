"""Passes in parallel: each on one thread, results in order, the same bits for any number of threads.

A pass over 2,048 tokens has products too small to divide. Measured with 2 cores and 11 M parameters:
* two passes at once: 11,500 tokens/s;
* one pass with two threads: 6,000 to 7,700 tokens/s.
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
    """Threads that run passes. At most twice their number of results is pending or unread at a time."""

    def __init__(self, executor: ThreadPoolExecutor, count: int) -> None:
        self._executor, self.count = executor, count

    def submit(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Run `work` when a thread is free, in the order of submission."""
        return self._executor.submit(work, *args, **kwargs)

    def in_order(self, work: Callable[[Job], Result], jobs: Iterable[Job], most: int | None = None) -> Iterator[Result]:
        """Yield the results of the jobs in their order. The error of a job is raised in its place.

        most: maximum number of pending results.
        """
        most = most or 2 * self.count + 1
        waiting: deque[Future[Result]] = deque()
        for job in jobs:
            waiting.append(self.submit(work, job))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def in_parts(items: Sequence[Job], count: int) -> Iterator[Sequence[Job]]:
    """Yield consecutive parts of `count` items. The last part may be shorter."""
    return (items[start : start + count] for start in range(0, len(items), count))


@contextmanager
def workers(count: int) -> Iterator[Workers]:
    """Start `count` threads, each with one thread of torch. Jobs that have not begun are dropped at the end."""
    with one_torch_thread():
        # Each thread must set its own number. A new thread would divide its first product among all processors,
        # whatever torch was set to elsewhere, and products of few rows would then differ in their last bits.
        executor = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        try:
            yield Workers(executor, count)
        finally:
            executor.shutdown(cancel_futures=True)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit each torch operation to one thread, and restore the previous number at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
