"""A sandbox refuses a call of the system: a run goes on without it, or one sentence names the call."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.errors import ExecutionError, StorageReadFailed
from moec.runtime import load
from moec.runtime.storage import arena
from moec.runtime.text import limited_child


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


@pytest.mark.parametrize("call", [limited_child.answer, lambda job, line: limited_child.answer(job, line, True)])
def test_nothing_is_rendered_without_limits(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any, bytes], None]
) -> None:
    written: list[tuple[str, str]] = []
    monkeypatch.setattr(limited_child, "write", lambda word, text: written.append((word, text)))
    monkeypatch.setattr(limited_child, "limit", refuse)
    call(None, b'{"memory_bytes": 1, "cpu_s": 1}')
    assert written == [("unlimited", "Operation not permitted")]
