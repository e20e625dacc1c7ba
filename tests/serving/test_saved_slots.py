"""`--prefix-cache`: what a slot holds is there after a restart, bit for bit, and a bad file is never used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.errors import InputError, OptionError
from moec.runtime import Engine, load
from moec.serving.engine import saved_slots
from moec.serving.engine.request import TokenMade
from moec.serving.engine.saved_slots import SavedSlots
from moec.serving.engine.scheduler import Scheduler
from tests.serving.engine_requests import Asked, ask

CONTEXT, LIMIT = 96, 1 << 30
TEXT = [3 + (7 * at) % 200 for at in range(40)]
TURN = [*TEXT, 90, 91, 92]


@pytest.fixture(scope="module")
def opened(tiny_bundle: Path) -> Iterator[Engine]:
    with load(tiny_bundle, expert_cache="60%", context=CONTEXT, slots=2) as engine:
        yield engine


@contextmanager
def started(engine: Engine, folder: Path, limit: int = LIMIT) -> Iterator[tuple[Scheduler, SavedSlots, list[str]]]:
    """A server's engine after a start: its slots hold nothing."""
    engine.begin_sequence()
    said = list[str]()
    store = SavedSlots(engine, folder, limit, said.append)
    with Scheduler(engine, saved_slots=store) as scheduler:
        yield scheduler, store, said


def answer(scheduler: Scheduler, tokens: list[int], **options: Any) -> Asked:
    asked = Asked(tokens, 6, log_probs=2, **options)
    ask(scheduler, asked)
    return asked


def made(asked: Asked) -> list[TokenMade]:
    return [event for event in asked.events if isinstance(event, TokenMade)]


@pytest.fixture
def folder(opened: Engine, tmp_path: Path) -> Path:
    """A folder with the slot of one conversation."""
    with started(opened, tmp_path / "kv") as (scheduler, _, _):
        answer(scheduler, TEXT)
    (only,) = (tmp_path / "kv").iterdir()
    assert only.stat().st_mode & 0o777 == 0o600
    return tmp_path / "kv"


def test_the_next_start_goes_on_with_the_same_bits(opened: Engine, folder: Path) -> None:
    with Scheduler(opened) as scheduler:
        opened.begin_sequence()
        expected = answer(scheduler, TURN)
    assert expected.ended.timings.cached_tokens == 0
    with started(opened, folder) as (scheduler, store, said):
        found = answer(scheduler, TURN)
    assert made(found) == made(expected)
    assert found.ended.timings.cached_tokens >= len(TEXT) and store.loaded >= len(TEXT) and said == []


def test_slots_are_saved_while_nothing_else_is_to_do(opened: Engine, tmp_path: Path) -> None:
    with started(opened, tmp_path / "kv") as (scheduler, store, _):
        answer(scheduler, TEXT)
        for _ in range(600):
            if store.saved:
                break
            threading.Event().wait(0.05)
        assert store.saved >= len(TEXT)


def test_a_longer_text_replaces_its_beginning(opened: Engine, folder: Path) -> None:
    with started(opened, folder) as (scheduler, store, _):
        answer(scheduler, TURN)
    assert len(list(folder.iterdir())) == 2  # the answer to TEXT, and that to TURN, differ after TEXT
    with started(opened, folder) as (scheduler, store, _):
        answer(scheduler, TURN)
    assert len(list(folder.iterdir())) == 2 and store.saved == 0


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "the last byte": lambda data: flipped(data, len(data) - 1),
    "cut": lambda data: data[:-7],
    "longer": lambda data: data + b"more",
    "a huge number of tokens": lambda data: data[:40] + (1 << 62).to_bytes(8, "little") + data[48:],
    "no token": lambda data: data[:40] + bytes(8) + data[48:],
    "of another bundle": lambda data: flipped(data, 9),
    "without its mark": lambda data: flipped(data, 0),
    "empty": lambda data: b"",
    "another token": lambda data: flipped(data, 80 + 4 * 38),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_not_used(opened: Engine, folder: Path, damage: str) -> None:
    (path,) = folder.iterdir()
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with Scheduler(opened) as scheduler:
        opened.begin_sequence()
        expected = answer(scheduler, TURN)
    with started(opened, folder) as (scheduler, store, said):
        found = answer(scheduler, TURN)
    assert made(found) == made(expected)
    assert (found.ended.timings.cached_tokens, store.loaded) == (0, 0)
    assert said and str(path) in said[0]


def test_what_a_killed_server_left_half_written_is_removed(opened: Engine, folder: Path) -> None:
    (only,) = folder.iterdir()
    for name in ("0.kv.partial", "1.kv.partial"):
        (folder / name).write_bytes(b"x" * 5000)
    (folder / "2.kv.partial").mkdir()
    with started(opened, folder) as (_, store, said):
        assert store.used_bytes == only.stat().st_size
    assert sorted(path.name for path in folder.iterdir()) == sorted(["2.kv.partial", only.name])
    assert said == [f"unfinished files in `{folder}` are removed: 2"]


def test_values_that_are_no_numbers_are_refused(opened: Engine, folder: Path) -> None:
    """A file whose digest was made anew."""
    with started(opened, folder) as (_, store, _):
        saved = store.longest([*TURN, 1, 2, 3])
    (path,) = folder.iterdir()
    text = saved_slots.read_tokens(path, path.read_bytes()[8:40], CONTEXT, saved_slots.slot_sizes(opened))
    parts = [part.copy() for part in opened.kv.prefix_parts(0, len(text))]
    parts[0][0] = float("nan")
    saved_slots.write_slot(path, path.read_bytes()[8:40], text, parts)
    with started(opened, folder) as (scheduler, store, said):
        found = answer(scheduler, TURN)
    assert (
        saved >= len(TEXT)
        and store.loaded == 0
        and "no numbers" in said[0]
        and found.ended.reason in ("stop", "length")
    )


def test_links_and_other_kinds_are_left_alone(opened: Engine, folder: Path, tmp_path: Path) -> None:
    (path,) = folder.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    os.mkfifo(folder / ("a" * 32 + ".kv"))
    (folder / "notes.txt").write_text("mine")
    with started(opened, folder) as (scheduler, store, _):
        assert answer(scheduler, TURN).ended.timings.cached_tokens == 0
    assert (folder / "notes.txt").exists() and (tmp_path / "elsewhere").exists() and store.loaded == 0


def test_the_bytes_are_bounded(opened: Engine, tmp_path: Path) -> None:
    limit = 3 * saved_slots.file_bytes(50, saved_slots.slot_sizes(opened))
    for start in range(8):
        with started(opened, tmp_path, limit) as (scheduler, store, _):
            answer(scheduler, [start + 3, *TEXT])
    files = list(tmp_path.iterdir())
    assert 2 <= len(files) <= 3 and sum(path.stat().st_size for path in files) == store.used_bytes <= limit
    with started(opened, tmp_path, limit // 3) as (_, store, _):
        assert store.used_bytes <= limit // 3  # a smaller limit holds from the start on


def test_files_of_other_bundles_count_and_go_first(opened: Engine, folder: Path) -> None:
    (path,) = folder.iterdir()
    other = folder / f"{'b' * 32}.kv"
    data = path.read_bytes()
    other.write_bytes(flipped(data, 9))
    with started(opened, folder, len(data)) as (_, store, _):
        assert store.used_bytes == len(data)
    assert list(folder.iterdir()) == [path]


def test_another_bundle_or_type_has_other_slots(tiny_bundle: Path, folder: Path) -> None:
    with load(tiny_bundle, context=CONTEXT, slots=2, kv="float16") as engine:
        with started(engine, folder) as (scheduler, _, said):
            assert answer(scheduler, TURN).ended.timings.cached_tokens == 0
        assert "another bundle or to other options" in said[0]


def test_a_folder_of_others_is_refused(opened: Engine, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InputError, match="other users"):
        SavedSlots(opened, tmp_path, LIMIT, print)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be used"):
        SavedSlots(opened, tmp_path / "file", LIMIT, print)


def test_lossy_runs_have_no_saved_slots(tiny_bundle: Path, tmp_path: Path) -> None:
    lossy = load(tiny_bundle, context=CONTEXT, lossy="big-little gamma=0.9,k=1", expert_cache="60%")
    with lossy as engine, pytest.raises(OptionError, match="exact"):
        SavedSlots(engine, tmp_path / "kv", LIMIT, print)


def test_a_full_disk_costs_the_file_only(opened: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*values: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_slots.FileSystem, "sync", full)
    with started(opened, tmp_path / "kv") as (scheduler, store, said):
        answer(scheduler, TEXT)
    assert list((tmp_path / "kv").iterdir()) == [] and store.saved == 0
    assert "No space left" in said[0]
