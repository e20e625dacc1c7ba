"""Every way of reading gives the bytes of the file, neighbours at once, and gives the memory back."""

from __future__ import annotations

import mmap
import os
import resource
import threading
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import ChecksumMismatch, ExecutionError, StorageReadFailed
from moec.manifests.quant import PRUNED, QuantSpec
from moec.runtime import kernels, load
from moec.runtime.bundle.open_bundle import Bundle, open_bundle
from moec.runtime.expert_cache.bound_experts import bind_experts
from moec.runtime.model.dense_weights import load_dense
from moec.runtime.options.runtime import IoMode
from moec.runtime.storage import arena
from moec.runtime.storage import arena as arena_module
from moec.runtime.storage.arena import find_page_maker
from moec.runtime.storage.mapped_storage import resident_bytes
from moec.runtime.storage.read_runs import MAX_RUN_BYTES, NONE, ReadRuns, next_in_file, previous_in_file
from moec.runtime.storage.read_storage import ReadStorage, open_storage
from tests.gates.damage import flip
from tests.runtime.faulty_source import PATIENCE_S, InTime, wait_for

MODES: tuple[Literal["direct", "buffered", "mmap"], ...] = ("direct", "buffered", "mmap")
every_mode = pytest.mark.parametrize("io", MODES)


def file_bytes(bundle: Bundle, index: int) -> bytes:
    entry = bundle.manifest.experts[index]
    return (bundle.path / entry.file).read_bytes()[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]


def pages_present(view: np.ndarray) -> int:
    """Return the number of pages of a view that this process holds, from its page table."""
    address = view.__array_interface__["data"][0]
    first, count = address // mmap.PAGESIZE, -(-view.nbytes // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * count), np.uint64)
    return int((entries >> np.uint64(63)).sum())


@every_mode
def test_equal_to_the_file(tiny_bundle: Path, io: IoMode) -> None:
    bundle = open_bundle(tiny_bundle)
    storage = open_storage(bundle, io, verify=True)
    assert storage.mode == io
    for index in [5, 0, 17, 5, 9]:
        storage.load(index)
        assert storage.block(index).tobytes() == file_bytes(bundle, index)
        storage.release(index)
    storage.load(5)
    assert storage.block(5).tobytes() == file_bytes(bundle, 5)
    storage.close()
    storage.close()
    assert storage.block(5).tobytes() == file_bytes(bundle, 5)


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_neighbours_come_in_one_read(tiny_bundle: Path, io: IoMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if the system returns fewer bytes, in the middle of an expert or at its end."""
    bundle = open_bundle(tiny_bundle)
    storage = open_storage(bundle, io, verify=True)
    run = [2]
    while len(run) < 3:
        run.append(storage.next_in_file[run[-1]])
    real, calls = os.preadv, list[int]()

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(sum(map(len, buffers)))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    storage.load(*run)
    assert calls == [sum(storage.block(index).nbytes for index in run)]
    assert all(storage.block(index).tobytes() == file_bytes(bundle, index) for index in run)
    for limit in (4096, storage.block(2).nbytes, storage.block(2).nbytes + 4096):
        for index in run:
            storage.release(index)
            storage.block(index)[:] = 0

        def short(descriptor: int, buffers: list[memoryview], offset: int, limit: int = limit) -> int:
            room, some = limit, []
            for buffer in buffers:
                some.append(buffer[:room])
                room -= len(some[-1])
            return real(descriptor, [piece for piece in some if len(piece)], offset)

        monkeypatch.setattr(os, "preadv", short)
        storage.load(*run)
        assert all(storage.block(index).tobytes() == file_bytes(bundle, index) for index in run)
    storage.close()


def cached_bytes(bundle: Bundle) -> int:
    """Return the bytes of the expert files in the page cache."""
    names = {entry.file for entry in bundle.manifest.experts}
    return sum(resident_bytes(np.memmap(bundle.path / name, np.uint8, "r")) for name in names)


def test_buffered_reads_leave_nothing_in_the_page_cache(copied: Path) -> None:
    """Neither what was read nor what the system reads ahead of it, as it does for who reads a header."""
    bundle = open_bundle(copied)
    for path in copied.glob("experts-*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_bytes(bundle):
        pytest.skip("NOT RUN: a file system that keeps what it is told to drop")
    storage = open_storage(open_bundle(copied), "buffered", verify=True)
    for index in range(len(bundle.manifest.experts)):
        storage.load(index)
        assert cached_bytes(bundle) == 0
    storage.close()


def test_release_unmaps_a_file_range(tiny_bundle: Path) -> None:
    storage = open_storage(open_bundle(tiny_bundle), "mmap", verify=True)
    for index in (3, 4, 5):
        storage.load(index)
    storage.release(4)
    assert [pages_present(storage.block(index)) > 0 for index in (3, 4, 5)] == [True, False, True]
    storage.close()


@pytest.mark.parametrize("moves", [True, False], ids=["mremap", "without"])
@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_memory_goes_from_expert_to_expert(
    tiny_bundle: Path, io: IoMode, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not moves:
        monkeypatch.setattr(arena_module, "find_page_mover", lambda: None)
    bundle = open_bundle(tiny_bundle)
    entries = bundle.manifest.experts
    capacity = max(sum(entry.size_bytes for entry in entries[i : i + 3]) for i in range(len(entries) - 2))
    storage = open_storage(bundle, io, True, capacity)
    assert isinstance(storage, ReadStorage)
    memory = storage.arena.view
    assert pages_present(memory) == 0
    for index in (3, 4, 5):
        storage.load(index)
    for index in range(6, len(entries)):
        storage.release(index - 3)
        storage.load(index)
        for held in (index - 2, index - 1, index):
            assert storage.block(held).tobytes() == file_bytes(bundle, held)
        assert pages_present(memory) * mmap.PAGESIZE <= capacity
    storage.trim()
    assert pages_present(memory) * mmap.PAGESIZE == sum(entry.size_bytes for entry in entries[-3:])
    storage.close()


@given(data=st.data())
def test_experts_keep_their_bytes_inside_a_capacity_that_changes(tiny_bundle: Path, data: st.DataObject) -> None:
    """Sizes differ here. Who follows is told where every expert is read to."""
    bundle = open_bundle(tiny_bundle)
    sizes = [entry.size_bytes for entry in bundle.manifest.experts]
    capacity = data.draw(st.integers(max(sizes), sum(sizes)))
    storage = open_storage(bundle, "direct", False, capacity)
    assert isinstance(storage, ReadStorage)
    seen: dict[int, np.ndarray] = {}
    storage.on_place(seen.__setitem__)
    held: set[int] = set()
    for _ in range(data.draw(st.integers(1, 25))):
        index = data.draw(st.integers(0, len(sizes) - 1))
        used = sum(sizes[i] for i in held)
        if index in held:
            storage.release(index)
            held.discard(index)
        elif used + sizes[index] <= capacity // mmap.PAGESIZE * mmap.PAGESIZE:
            storage.load(index)
            held.add(index)
        else:
            capacity = data.draw(st.integers(max(used, *sizes), sum(sizes)))
            storage.resize(capacity)
        assert all(seen[i].tobytes() == storage.block(i).tobytes() == file_bytes(bundle, i) for i in held)
        assert pages_present(storage.arena.view) * mmap.PAGESIZE <= capacity
    storage.close()


def test_kernels_follow(tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    stored = bundle.manifest.stored_experts
    storage = open_storage(bundle, "direct", False, sum(entry.size_bytes for entry in stored[:3]))
    experts = bind_experts(bundle, stored, storage, load_dense(bundle, verify=False)).experts
    hidden = bundle.manifest.model.hidden_size
    x = np.random.default_rng(0).standard_normal((1, hidden), np.float32)

    def result(index: int) -> np.ndarray:
        out = np.zeros((1, 1, hidden), np.float32)
        kernels.expert_ffn(experts[index], x, np.zeros(1, np.int32), np.zeros(1, np.int32), out)
        return out

    storage.load(0)
    expected, place = result(0), storage.block(0).__array_interface__["data"][0]
    for index in (1, 2):
        storage.load(index)
    for index in (0, 1, 2):
        storage.release(index)
    storage.load(1)
    storage.load(0)
    assert storage.block(0).__array_interface__["data"][0] != place
    assert np.array_equal(result(0), expected)
    with pytest.raises(ValueError, match="expected"):
        experts[0].move_to(*[storage.block(0)[:16]] * 3)
    storage.close()


@every_mode
def test_a_flipped_byte_is_found_at_the_next_read(copied: Path, io: IoMode) -> None:
    bundle = open_bundle(copied)
    entries = bundle.manifest.experts
    healthy = open_storage(bundle, io, verify=True)
    healthy.load(7)
    flip(copied / entries[7].file, entries[7].offset_bytes + entries[7].size_bytes - 1)
    storage = open_storage(bundle, io, verify=True)
    for _ in range(2):
        with pytest.raises(ChecksumMismatch, match=f"expert {entries[7].expert} of layer {entries[7].layer}") as caught:
            storage.load(7)
        assert entries[7].file in caught.value.message
    storage.load(8)
    healthy.release(7)
    with pytest.raises(ChecksumMismatch, match=entries[7].file):
        healthy.load(7)
    trusting = open_storage(bundle, io, verify=False)
    trusting.load(7)
    assert trusting.block(7).tobytes() == file_bytes(bundle, 7)
    for opened in (healthy, storage, trusting):
        opened.close()


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_file_that_shrinks_while_it_is_read(copied: Path, io: IoMode) -> None:
    bundle = open_bundle(copied)
    storage = open_storage(bundle, io, verify=False)
    entry = bundle.manifest.experts[5]
    os.truncate(copied / entry.file, entry.offset_bytes + 4096)
    with pytest.raises(StorageReadFailed, match=f"{entry.file}`"):
        storage.load(5)
    with pytest.raises(StorageReadFailed, match=f"ended at byte {entry.offset_bytes + 4096}"):
        storage.load(4, 5)
    storage.close()


@pytest.mark.parametrize("io", ["auto", *MODES])
def test_a_file_that_is_gone_is_read_and_an_empty_one_is_not(copied: Path, io: IoMode) -> None:
    bundle = open_bundle(copied)
    last = len(bundle.manifest.experts) - 1
    file, expected = copied / bundle.manifest.experts[-1].file, file_bytes(bundle, last)
    whole = file.read_bytes()
    file.unlink()
    storage = open_storage(bundle, io, verify=True)
    storage.load(last)
    assert storage.block(last).tobytes() == expected
    storage.close()
    file.write_bytes(whole)
    bundle = open_bundle(copied)
    os.truncate(file, 0)
    with pytest.raises(StorageReadFailed, match=f"{file.name}` "):
        open_storage(bundle, io, verify=True).load(last)


def test_auto_prefers_direct_and_falls_back(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle, real = open_bundle(tiny_bundle), os.open

    def without_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", without_direct)
    storage = open_storage(bundle, "auto", verify=True)
    assert storage.mode == "buffered"
    storage.load(0)
    assert storage.block(0).tobytes() == file_bytes(bundle, 0)
    storage.close()


def arena_pages(storage: ReadStorage) -> int:
    return pages_present(storage.arena.view)


def makes_pages() -> bool:
    """Return whether this system allocates pages on advice (Linux 5.14)."""
    page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    return find_page_maker()(page.__array_interface__["data"][0], mmap.PAGESIZE)


def test_memory_is_made_ready_meanwhile_and_no_more_than_the_capacity(
    tiny_bundle: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "CLEARED_AT_ONCE_BYTES", mmap.PAGESIZE)  # many parts
    bundle = open_bundle(tiny_bundle)
    capacity = sum(entry.size_bytes for entry in bundle.manifest.stored_experts) // 2
    storage = open_storage(bundle, "auto", verify=True, capacity_bytes=capacity)
    assert isinstance(storage, ReadStorage)
    if not makes_pages():
        pytest.skip("this system has no such advice")
    pages = capacity // mmap.PAGESIZE
    with storage.made_ready(is_wanted=False):
        time.sleep(0.02)
    assert arena_pages(storage) == 0
    with storage.made_ready(is_wanted=True):
        in_time(lambda: wait_for(lambda: arena_pages(storage) == pages))
    assert arena_pages(storage) == pages
    storage.load(5)
    assert storage.block(5).tobytes() == file_bytes(bundle, 5) and arena_pages(storage) == pages
    storage.close()


def test_making_ready_ends_with_the_work_beside_it(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends for any amount of work, and if the system refuses it at once."""
    asked, has_begun = list[int](), threading.Event()

    def slowly(address: int, size_bytes: int) -> bool:
        time.sleep(0.05)
        return refused(address, size_bytes) or True

    def refused(address: int, size_bytes: int) -> bool:
        asked.append(size_bytes)
        has_begun.set()
        return False

    monkeypatch.setattr(arena_module, "CLEARED_AT_ONCE_BYTES", mmap.PAGESIZE)
    for make in (slowly, refused):
        monkeypatch.setattr(arena_module, "find_page_maker", lambda make=make: make)
        asked.clear()
        has_begun.clear()
        storage = open_storage(open_bundle(tiny_bundle), "auto", verify=True)
        assert isinstance(storage, ReadStorage)
        with storage.made_ready(is_wanted=True):
            assert has_begun.wait(PATIENCE_S)
        most = 1 if make is refused else storage.arena.view.nbytes // mmap.PAGESIZE - 1
        assert 0 < len(asked) <= most and set(asked) == {mmap.PAGESIZE}
        assert "moec-pages" not in {thread.name for thread in threading.enumerate()}
        storage.close()


@every_mode
def test_files_are_closed_if_the_work_fails(tiny_bundle: Path, io: IoMode) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    storage = open_storage(open_bundle(tiny_bundle), io, verify=True)
    with pytest.raises(ChecksumMismatch, match="dense"), storage.made_ready(is_wanted=True):
        raise ChecksumMismatch("dense", "copy")
    del storage
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_without_a_thread_there_is_nothing_ready_and_nothing_wrong(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    storage = open_storage(open_bundle(tiny_bundle), "auto", verify=True)
    assert isinstance(storage, ReadStorage)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with storage.made_ready(is_wanted=True):
            pass
    assert arena_pages(storage) == 0
    storage.close()


QUARTER = MAX_RUN_BYTES // 4


def taken(queue: list[int], sizes: list[int], following: list[int], readers: int = 1) -> list[list[int]]:
    runs, waiting, found = ReadRuns(sizes, following, readers), deque(queue), []
    while waiting:
        found.append(runs.take(waiting))
    return found


def test_neighbours_on_both_sides_of_the_most_urgent_come_with_it() -> None:
    following = [1, 2, 3, 4, NONE, 6, NONE]
    assert taken([3, 6, 1, 2, 0], [1] * 7, following) == [[0, 1, 2, 3], [6]]
    assert taken([3, 5, 1, 0], [1] * 7, following) == [[3], [5], [0, 1]]
    assert taken([3, 2, 1], [1] * 7, [NONE] * 7) == [[3], [2], [1]]


def test_readers_share_what_waits() -> None:
    following = [1, 2, 3, 4, 5, NONE]
    assert taken([0, 1], [1] * 6, following, readers=2) == [[0], [1]]
    assert taken([0, 1, 2, 3, 4, 5], [1] * 6, following, readers=2) == [[0, 1, 2], [3, 4], [5]]


def test_a_run_is_bounded_and_a_large_expert_comes_alone() -> None:
    following = [1, 2, 3, 4, 5, NONE]
    assert taken([1, 2, 3, 4, 5, 0], [QUARTER] * 6, following) == [[1, 2, 3, 4], [5], [0]]
    assert taken([0, 1, 2], [QUARTER, 4 * QUARTER, QUARTER, 1, 1, 1], following) == [[0], [1], [2]]


@given(data=st.data())
def test_every_read_happens_once_and_runs_are_contiguous(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    sizes = data.draw(st.lists(st.sampled_from([1, QUARTER, 3 * QUARTER, 8 * QUARTER]), min_size=count, max_size=count))
    breaks = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    following = [at + 1 if at + 1 < count and not breaks[at] else NONE for at in range(count)]
    queue = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=count))
    runs = taken(queue, sizes, following, data.draw(st.integers(1, 4)))
    assert sorted(index for run in runs for index in run) == sorted(queue)
    assert all(following[first] == second for run in runs for first, second in pairwise(run))
    assert all(len(run) == 1 or sum(sizes[index] for index in run) <= MAX_RUN_BYTES for run in runs)
    # The most urgent of what waits is always in the next read.
    left = list(queue)
    for run in runs:
        assert left[0] in run
        left = [index for index in left if index not in run]


def test_successors_follow_the_bytes_of_files(tiny_bundle: Path) -> None:
    entries = open_bundle(tiny_bundle).manifest.stored_experts
    following = next_in_file(entries)
    for at, after in enumerate(following):
        ends = (entries[at].file, entries[at].offset_bytes + entries[at].size_bytes)
        assert after == NONE or ends == (entries[after].file, entries[after].offset_bytes)
    files = {entry.file for entry in entries}
    assert following.count(NONE) == len(files)  # the last of each file
    assert [after for after in following if after != NONE] == [
        at for at, before in enumerate(previous_in_file(following)) if before != NONE
    ]


def test_experts_that_are_left_out_neither_follow_nor_are_followed(tiny_bundle: Path) -> None:
    first, *rest = open_bundle(tiny_bundle).manifest.experts[:3]
    gone = QuantSpec(PRUNED)
    left_out = replace(rest[0], size_bytes=0, gate=gone, up=gone, down=gone)
    after = replace(rest[1], offset_bytes=first.offset_bytes + first.size_bytes)
    assert next_in_file([first, left_out, after]) == [2, NONE, NONE]


def refuse(*values: Any) -> Any:
    raise PermissionError(1, "Operation not permitted")


class Refusing(mmap.mmap):
    """A mapping for which the system takes no advice."""

    madvise = refuse


def answer(bundle: Path, **options: Any) -> list[int]:
    with load(bundle, context=64, **options) as engine:
        return [step.token_id for step in engine.generate([5, 60, 31], 12)]


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_a_run_needs_no_advice_while_pages_move(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, io: Any) -> None:
    expected = answer(tiny_bundle)
    monkeypatch.setattr("mmap.mmap", Refusing)
    assert answer(tiny_bundle, expert_cache="50%", io=io) == expected


def test_memory_that_the_system_does_not_take_back(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.mmap", Refusing)
    monkeypatch.setattr(arena, "find_page_mover", lambda: None)
    with pytest.raises(ExecutionError, match=r"does not take back the memory of experts \(madvise\): Operation not"):
        answer(tiny_bundle, expert_cache="30%", prefetch="off", io="buffered")


def test_mapped_files_need_advice(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmap.mmap", Refusing)
    with pytest.raises(StorageReadFailed, match=r"advice for the mapped memory .* \(madvise\)") as caught:
        load(tiny_bundle, io="mmap")
    assert caught.value.hint == 'take `io="direct"` or `io="buffered"`'


@pytest.mark.parametrize("name", ["getrlimit", "setrlimit"])
def test_limits_of_open_files_that_cannot_be_read_or_raised(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "setrlimit":
        most = resource.RLIM_INFINITY
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (len(os.listdir("/proc/self/fd")), most))
    monkeypatch.setattr(resource, name, refuse)
    load(tiny_bundle, context=64).close()
