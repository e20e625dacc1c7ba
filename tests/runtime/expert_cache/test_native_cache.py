"""The cache in the extension: right bytes at right places, in its capacity, whatever is read, evicted or fails."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import ChecksumMismatch, ExecutionError, MemoryBudgetExceeded, StorageReadFailed
from moec.runtime import kernels
from moec.runtime.bundle.open_bundle import Bundle, open_bundle
from moec.runtime.expert_cache.bound_experts import BoundExperts, bind_experts
from moec.runtime.expert_cache.cache_spec import CacheSpec
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.expert_cache.open_cache import open_cache
from moec.runtime.expert_cache.records import bundle_records
from moec.runtime.model.dense_weights import load_dense
from moec.runtime.options.runtime import POLICIES, IoMode, Policy, RuntimeOptions
from moec.runtime.storage.interface import page_bytes
from moec.runtime.storage.read_storage import ReadStorage, open_storage
from tests.runtime.faulty_source import PATIENCE_S, InTime, after, each, wait_for, wait_until_settled

LAYERS, EXPERTS = 3, 6
COUNT = LAYERS * EXPERTS

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")


class Opened:
    """A native cache over a bundle, and what each of its experts makes of one input when it is in memory."""

    def __init__(
        self, path: Path, capacity: int | None = None, io: IoMode = "auto", verify: bool = True, **options: Any
    ) -> None:
        self.bundle: Bundle = open_bundle(path)
        stored = self.bundle.manifest.stored_experts
        self.sizes = np.array([page_bytes(entry.size_bytes) for entry in stored], np.int64)
        self.capacity = int(self.sizes.sum()) if capacity is None else capacity
        storage = open_storage(self.bundle, io, verify, self.capacity)
        self.storage, records = storage, bundle_records(self.bundle, self.bundle.tables(), stored)
        self.experts: BoundExperts = bind_experts(self.bundle, stored, storage, load_dense(self.bundle, verify=False))
        spec = CacheSpec(self.sizes, self.capacity, records, pin_limit_bytes=self.capacity)
        opened = open_cache(storage, self.experts, spec, RuntimeOptions(**options))
        assert isinstance(opened, NativeCache)
        self.cache = opened

    def output(self, index: int) -> bytes:
        hidden = self.bundle.manifest.model.hidden_size
        x = np.random.default_rng(0).standard_normal((1, hidden), np.float32)
        out = np.zeros((1, 1, hidden), np.float32)
        kernels.expert_ffn(self.experts.experts[index], x, np.zeros(1, np.int32), np.zeros(1, np.int32), out)
        return out.tobytes()

    def capacity_bytes(self) -> int:
        return min(self.cache.capacity_bytes, int(self.sizes.sum()))

    def close(self) -> None:
        self.cache.close()
        self.storage.close()

    def check_memory(self) -> None:
        """Places take no more than the cache may hold. Mapped files have none."""
        if isinstance(self.storage, ReadStorage):
            assert self.storage.memory_bytes <= self.capacity_bytes()

    def check(self) -> None:
        """Both ledgers, the places, and the bytes at them."""
        self.cache.check_invariants()
        self.storage.take_hand_overs(self.cache.reads.take_places)
        for index in self.cache.resident().tolist():
            entry = self.bundle.manifest.stored_experts[index]
            content = (self.bundle.path / entry.file).read_bytes()[entry.offset_bytes :][: entry.size_bytes]
            assert self.storage.block(index).tobytes() == content


@contextlib.contextmanager
def opened(path: Path, capacity: int | None = None, **options: Any) -> Iterator[Opened]:
    found = Opened(path, capacity, **options)
    yield found
    found.close()


@pytest.fixture(scope="module")
def outputs(tiny_bundle: Path) -> list[bytes]:
    """Return the output of every expert for one input, with all experts in memory."""
    with opened(tiny_bundle) as own:
        assert sorted(each(own.cache.stream(0, list(range(COUNT))))) == list(range(COUNT))
        return [own.output(index) for index in range(COUNT)]


@given(data=st.data())
def test_experts_are_what_they_are_wherever_they_go(
    tiny_bundle: Path, outputs: list[bytes], data: st.DataObject
) -> None:
    """Sizes differ and neighbours are read together; the capacity changes."""
    sizes = [page_bytes(entry.size_bytes) for entry in open_bundle(tiny_bundle).manifest.stored_experts]
    least = 2 * max(sizes)
    capacities = st.integers(least, sum(sizes)).map(lambda size: size // mmap.PAGESIZE * mmap.PAGESIZE)
    io, readers = data.draw(st.sampled_from(("auto", "buffered", "mmap"))), data.draw(st.integers(1, 3))
    policy: Policy = data.draw(st.sampled_from(POLICIES))
    with opened(tiny_bundle, data.draw(capacities), io=io, readers=readers, policy=policy) as own:
        if data.draw(st.booleans()):
            own.cache.warm(range(COUNT))
            own.cache.finish_warming()
        for _ in range(data.draw(st.integers(1, 25))):
            layer = data.draw(st.integers(0, LAYERS - 1))
            chosen = data.draw(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=2, unique=True))
            advice = data.draw(st.lists(st.integers(0, COUNT - 1), max_size=4, unique=True))
            asked = [layer * EXPERTS + expert for expert in chosen]
            together = data.draw(st.booleans())
            with contextlib.closing(own.cache.stream(layer, asked, lambda own=advice: own, together)) as stream:
                for some in stream:
                    assert [own.output(index) for index in some] == [outputs[index] for index in some]
                    asked = [index for index in asked if index not in some]
            assert not asked and own.cache.used_bytes <= own.cache.capacity_bytes
            if data.draw(st.integers(0, 4)) == 0:
                own.cache.resize(data.draw(capacities))
            own.check_memory()
        own.check()
        stats = own.cache.stats
        assert stats.lookups == stats.hits + stats.misses and stats.prefetch_used <= stats.prefetch_reads <= stats.reads
        assert not own.cache.leased().size


def test_most_reads_need_no_python(copied: Path, outputs: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until_settled(copied)
    sizes = [page_bytes(entry.size_bytes) for entry in open_bundle(copied).manifest.stored_experts]
    same = [index for index in range(COUNT) if sizes[index] == sizes[0]]
    assert len(same) >= 3
    with opened(copied, 2 * sizes[0]) as own:
        loads, checks = list[int](), list[int]()
        load_one, check_one = own.storage.load, own.storage.check
        monkeypatch.setattr(own.storage, "load", lambda *run: (loads.extend(run), load_one(*run)))
        monkeypatch.setattr(own.storage, "check", lambda *new: (checks.append(new[0]), check_one(*new)))
        for index in (same * 4)[:20]:
            assert each(own.cache.stream(0, [index])) == [index]
            assert own.output(index) == outputs[index]
        # No place can be taken over before the cache is full. A new expert is compared with its checksum.
        assert loads == same[:2] and checks == same[2:] and own.cache.stats.reads == 20
        own.check()


def test_what_python_has_to_be_told_stays_bounded(tiny_bundle: Path) -> None:
    """Places go from one expert to the other many times before Python needs them."""
    sizes = [page_bytes(entry.size_bytes) for entry in open_bundle(tiny_bundle).manifest.stored_experts]
    same = [index for index in range(COUNT) if sizes[index] == sizes[0]]
    with opened(tiny_bundle, sizes[0]) as own:
        for turn in range(5 * COUNT):
            assert each(own.cache.stream(0, [same[turn % 2]])) == [same[turn % 2]]
        moved, _ = own.cache.reads.take_places()
        assert 0 < len(moved) <= COUNT


def test_nothing_is_compared_where_nothing_is_to_be_verified(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_bundle, 80_000, verify=False) as own:
        monkeypatch.setattr(own.storage, "check", lambda *new: 1 // 0)
        for index in [*range(COUNT), *range(COUNT)]:
            assert each(own.cache.stream(index // EXPERTS, [index])) == [index]
        own.check()


def test_a_file_that_shrinks_is_told_and_may_come_back(copied: Path, in_time: InTime) -> None:
    with opened(copied, io="buffered") as own:
        entry = own.bundle.manifest.stored_experts[1]
        file = copied / entry.file
        content = file.read_bytes()
        assert sorted(in_time(lambda: each(own.cache.stream(0, [0, 1])))) == [0, 1]
        last = int(own.sizes[2:].argmax()) + 2
        own.cache.resize(int(own.sizes.max()))
        assert in_time(lambda: each(own.cache.stream(last // EXPERTS, [last]))) == [last]  # instead of the two
        os.truncate(file, entry.offset_bytes + 16)
        for _ in range(2):
            with pytest.raises(StorageReadFailed, match=f"{entry.file}` ended at byte"):
                in_time(lambda: each(own.cache.stream(0, [1])))
        file.write_bytes(content)
        assert in_time(lambda: each(own.cache.stream(0, [1]))) == [1]
        own.check()


@pytest.mark.parametrize("is_small", [False, True])
def test_damage_is_found_at_the_first_read(copied: Path, in_time: InTime, is_small: bool) -> None:
    """In a place of its own, and in one of another expert."""
    stored = open_bundle(copied).manifest.stored_experts
    entry, size = stored[7], page_bytes(stored[7].size_bytes)
    same = [index for index, other in enumerate(stored) if page_bytes(other.size_bytes) == size and index != 7]
    content = bytearray((copied / entry.file).read_bytes())
    content[entry.offset_bytes] ^= 1
    (copied / entry.file).write_bytes(content)
    with opened(copied, 2 * size if is_small else None) as own:
        for index in same[:2]:
            assert in_time(lambda own=own, index=index: each(own.cache.stream(index // EXPERTS, [index]))) == [index]
        for _ in range(2):
            with pytest.raises(ChecksumMismatch, match="expert 1 of layer 1: bytes differ"):
                in_time(lambda: each(own.cache.stream(1, [7])))
            own.check()
        own.cache.prefetch([7])
        assert in_time(lambda: each(own.cache.stream(0, same[:1]))) == same[:1]
        own.check()


def test_a_fault_of_the_reader_is_told_not_waited_for(
    tiny_bundle: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_bundle) as own:
        monkeypatch.setattr(own.storage, "load", lambda *run: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            in_time(lambda: each(own.cache.stream(0, [0])))


def test_each_failure_is_told_to_who_asked_for_it(
    tiny_bundle: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefetch that failed before says nothing about another expert, nor about itself once it can be read."""
    with opened(tiny_bundle) as own:
        failing, load_one, tried = {1, 2, 7}, own.storage.load, list[int]()

        def load_some(*run: int) -> None:
            tried.extend(run)
            if failed := failing.intersection(run):
                raise StorageReadFailed(f"expert {min(failed)}")
            load_one(*run)

        monkeypatch.setattr(own.storage, "load", load_some)
        own.cache.prefetch([7])
        in_time(lambda: wait_for(lambda: 7 in tried))
        for index in (1, 2):
            with pytest.raises(StorageReadFailed, match=f"expert {index}"):
                in_time(lambda index=index: each(own.cache.stream(0, [0, index])))
        with pytest.raises(StorageReadFailed, match="expert 1"):
            in_time(lambda: each(own.cache.stream(0, [1])))
        failing.clear()
        assert sorted(in_time(lambda: each(own.cache.stream(0, [0, 1, 2])))) == [0, 1, 2]
        assert in_time(lambda: each(own.cache.stream(1, [7]))) == [7]
        own.check()


ENDS = """
import sys, time
from moec.runtime import load
from moec.runtime.storage import read_storage as storage
slow = storage.ReadStorage.load
def load_slowly(self, *run):
    time.sleep(0.02)
    slow(self, *run)
storage.ReadStorage.load = load_slowly
engine = load(sys.argv[1], expert_cache="100%", context=64)
time.sleep(0.03)
print("done")
"""


def test_a_process_may_end_while_experts_are_read(tiny_bundle: Path) -> None:
    """Nobody has closed the engine; its readers are between Python and the extension."""
    for _ in range(3):
        command = [sys.executable, "-c", ENDS, str(tiny_bundle)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


class _Interrupted(Exception):
    """The error that a signal handler of the user raises."""


@pytest.fixture
def interrupt() -> Iterator[signal.Signals]:
    """A signal whose handler raises in the main thread, as Ctrl-C does; test runners ignore that one."""

    def raise_it(number: int, frame: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGUSR1, raise_it)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_leaves_no_half_of_a_resize(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, interrupt: signal.Signals
) -> None:
    with opened(tiny_bundle) as own:
        done, is_interrupted, resize = threading.Event(), threading.Event(), own.storage.resize

        def resize_slowly(capacity_bytes: int) -> None:
            os.kill(os.getpid(), interrupt)
            assert is_interrupted.wait(PATIENCE_S)
            resize(capacity_bytes)
            done.set()

        monkeypatch.setattr(own.storage, "resize", resize_slowly)
        with pytest.raises(_Interrupted):
            own.cache.resize(int(own.sizes.max()))
        is_interrupted.set()
        assert done.wait(PATIENCE_S)
        assert own.storage.memory_bytes <= own.sizes.max()


def test_too_small_closed_and_forked(tiny_bundle: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Opened(tiny_bundle)
    sizes = own.sizes.tolist()
    own.cache.resize(max(sizes) - mmap.PAGESIZE)
    largest = sizes.index(max(sizes))
    with pytest.raises(MemoryBudgetExceeded, match=f"an expert of {max(sizes)} bytes does not fit into the"):
        in_time(lambda: each(own.cache.stream(largest // EXPERTS, [largest])))
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        for call in (lambda: next(own.cache.stream(0, [0])), lambda: own.cache.resize(max(sizes))):
            with pytest.raises(ExecutionError, match="forked"):
                call()
        own.cache.close()  # there is nothing to stop
    own.close()
    own.close()
    with pytest.raises(ExecutionError, match="closed"):
        next(own.cache.stream(0, [0]))


def test_closing_wakes_who_waits(tiny_bundle: Path, in_time: InTime, monkeypatch: pytest.MonkeyPatch) -> None:
    own, gate, is_reading = Opened(tiny_bundle), threading.Event(), threading.Event()

    def load_late(*run: int) -> None:
        is_reading.set()
        gate.wait(PATIENCE_S)

    monkeypatch.setattr(own.storage, "load", load_late)
    closing = after(is_reading.is_set, own.cache.close)
    with pytest.raises(ExecutionError, match="closed"):
        in_time(lambda: each(own.cache.stream(0, [0])))
    gate.set()
    in_time(closing.join)
    own.close()
