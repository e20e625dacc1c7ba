"""Freed matrices between blocks that stay do not count against a limit for long."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import torch

from moec.profiles.freed_memory import give_back_freed_memory

MATRIX = 1 << 22
"""16 MiB of float32."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_threads_have_freed_goes_back() -> None:
    stays: list[torch.Tensor] = []

    def work() -> None:
        torch.ones(2 * MATRIX - 4096)  # nearly 32 MiB: once it is freed, matrices come from the thread's heap
        for size in range(1, 13):
            freed = [torch.ones(MATRIX) for _ in range(3)]
            stays.append(torch.ones(1000 * size))
            del freed

    give_back_freed_memory()
    before = resident_bytes()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept = resident_bytes() - before
    give_back_freed_memory()
    assert kept > 4 * 4 * MATRIX, "the allocator keeps nothing, and nothing is shown"
    assert resident_bytes() - before < 4 * MATRIX
    assert len(stays) == 24
