"""The journal of a compile: finished stages are found, damaged and foreign ones are not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal, Records
from moec.manifests.errors import MoecError, OptionError
from tests.compiler.workspace.faulty_disk import MODES, FaultyDisk, Mode, PowerCut


def open_journal(
    tmp_path: Path, identity: str = "one", disk: Disk | None = None, notes: list[str] | None = None
) -> Journal:
    return Journal(tmp_path / "model.work", identity, disk or Disk(), (notes if notes is not None else []).append)


def test_results_are_found_again(tmp_path: Path) -> None:
    notes: list[str] = []
    journal = open_journal(tmp_path, notes=notes)
    assert journal.get("calibrate") is None
    journal.put("calibrate", b"counts")
    journal.put("calibrate", b"better counts")
    assert open_journal(tmp_path).get("calibrate") == b"better counts"
    assert open_journal(tmp_path, "two").get("calibrate") is None
    assert notes == []


def test_json_and_arrays_are_computed_once(tmp_path: Path) -> None:
    calls: list[str] = []
    table = {"popularity": np.arange(6, dtype=np.uint32).reshape(2, 3), "scale": np.float32([0.5])}

    def numbers() -> dict[str, object]:
        calls.append("json")
        return {"kl": 0.25, "units": (1, 2)}

    def arrays() -> dict[str, np.ndarray]:
        calls.append("arrays")
        return {"popularity": table["popularity"].T, "scale": table["scale"]}

    for _ in range(2):
        journal = open_journal(tmp_path)
        assert journal.json("trial-1", numbers) == {"kl": 0.25, "units": [1, 2]}
        found = journal.arrays("tables", arrays)
        assert found["popularity"].dtype == np.uint32
        assert np.array_equal(found["popularity"], table["popularity"].T)
        assert np.array_equal(found["scale"], table["scale"])
    assert calls == ["json", "arrays"]


def entry(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "model.work").iterdir()
    return path


def test_every_damage_of_a_result_is_noticed(tmp_path: Path) -> None:
    open_journal(tmp_path).put("search", b"plan")
    path = entry(tmp_path)
    whole = path.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))]
    for damaged in [*flipped, *(whole[:size] for size in range(len(whole))), whole + b"\0"]:
        path.write_bytes(damaged)
        notes: list[str] = []
        assert open_journal(tmp_path, notes=notes).get("search") is None
        assert len(notes) == 1 and str(path) in notes[0]


def test_an_unreadable_result_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    journal = open_journal(tmp_path, notes=notes)
    journal.put("search", b"plan")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert journal.get("search") is None
    assert "Permission denied" in notes[0]


def test_finished_stages_are_those_of_the_same_identity(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    for stage in ("kl-4.5", "calibration"):
        journal.put(stage, b"found")
    open_journal(tmp_path, "two").put("search", b"plan")
    with journal.stream("layer-0") as file:
        file.write(b"half")
        assert journal.finished() == ["calibration", "kl-4.5"]
    (tmp_path / "model.work" / f"{'x' * 150}-{'0' * 16}").touch()
    assert journal.finished() == ["calibration", "kl-4.5", "layer-0"]


def test_fresh_forgets_and_remove_leaves_nothing(tmp_path: Path) -> None:
    open_journal(tmp_path).put("search", b"plan")
    journal = Journal.fresh(tmp_path / "model.work", "one", Disk())
    assert journal.get("search") is None
    journal.put("search", b"plan")
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_never_removed(tmp_path: Path) -> None:
    folder = tmp_path / "model.work"
    folder.mkdir()
    (folder / "thesis.tex").write_bytes(b"thesis")
    for start in (Journal, Journal.fresh):
        with pytest.raises(OptionError, match=r"thesis\.tex"):
            start(folder, "one", Disk())
    assert (folder / "thesis.tex").exists()


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.work").write_bytes(b"")
    with pytest.raises(MoecError, match=r"model\.work"):
        open_journal(tmp_path)


@pytest.mark.parametrize("stage", ["", "../escape", "a/b", "-x", "A", "x" * 101])
def test_a_stage_name_cannot_leave_the_folder(tmp_path: Path, stage: str) -> None:
    with pytest.raises(ValueError, match="not a stage name"):
        open_journal(tmp_path).put(stage, b"")


def faults(mode: Mode) -> Iterator[tuple[int, int]]:
    """Return the operations to fail, with seeds. Only a power cut has several outcomes."""
    for number in itertools.count(1):
        for seed in range(8 if mode == "power cut" else 1):
            yield number, seed


@pytest.mark.parametrize("mode", MODES)
def test_put_leaves_the_old_result_or_the_new(tmp_path: Path, mode: Mode) -> None:
    for number, seed in faults(mode):
        place = tmp_path / f"{number}-{seed}"
        place.mkdir()
        open_journal(place).put("search", b"old plan")
        disk = FaultyDisk(tmp_path / "attic", number, mode, seed)
        with contextlib.suppress(MoecError, PowerCut):
            open_journal(place, disk=disk).put("search", b"new plan")
        assert open_journal(place).get("search") in (b"old plan", b"new plan")
        if not disk.has_failed:
            assert number > 3
            return


STAGES = ("calibrate", "sensitivity", "search")


@pytest.mark.gate("G5")
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, mode: Mode) -> None:
    """Stages that finished before the fault are not computed again, and the results are equal."""

    def run(place: Path, disk: Disk, computed: list[str], finished: list[str]) -> list[object]:
        journal, results = open_journal(place, disk=disk), []
        for stage in STAGES:

            def compute(stage: str = stage) -> str:
                computed.append(stage)
                return stage + " result"

            results.append(journal.json(stage, compute))
            finished.append(stage)
        return results

    for number, seed in faults(mode):
        place = tmp_path / f"{number}-{seed}"
        place.mkdir()
        disk, finished, again = FaultyDisk(tmp_path / "attic", number, mode, seed), [], []
        with contextlib.suppress(MoecError, PowerCut):
            run(place, disk, [], finished)
        assert run(place, Disk(), again, []) == [stage + " result" for stage in STAGES]
        assert not set(again) & set(finished)
        if not disk.has_failed:
            assert number > 10
            return


def recorded(place: Path, disk: Disk | None = None, identity: str = "one") -> Records:
    return open_journal(place, identity, disk).records("answers")


def test_records_are_found_again_up_to_the_first_damage(tmp_path: Path) -> None:
    for values in ({"a": ["one", 1], "b": ["two\n", 0.1]}, {"c": float("nan")}):
        with recorded(tmp_path) as records:
            for name, value in values.items():
                records.add(name, value)
    with recorded(tmp_path) as records:
        assert (records.get("a"), records.get("b")) == (["one", 1], ["two\n", 0.1]) and records.get("c") != records
        assert records.get("d") is None
    with recorded(tmp_path, identity="two") as records:
        assert records.get("a") is None
    path = next(path for path in (tmp_path / "model.work").iterdir() if path.stat().st_size)
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in (lines[0] + lines[1][:-1], lines[0] + lines[1].replace(b"two", b"owt") + lines[2]):
        path.write_bytes(cut)
        for name in ("d", "e"):  # what follows the damage is written anew
            with recorded(tmp_path) as records:
                assert records.get("a") == ["one", 1] and records.get("b") is None and records.get("c") is None
                records.add(name, name)
        with recorded(tmp_path) as records:
            assert (records.get("d"), records.get("e")) == ("d", "e")


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_of_the_disk_damages_no_earlier_record(
    tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.compiler.workspace.journal.SYNC_EVERY_S", -1.0)
    for number, seed in faults(mode):
        place = tmp_path / f"{number}-{seed}"
        place.mkdir()
        disk, known = FaultyDisk(tmp_path / "attic", number, mode, seed), list[str]()
        with contextlib.suppress(MoecError, PowerCut), recorded(place, disk) as records:
            for name in ("a", "b", "c"):
                records.add(name, [name])
                known.append(name)
        with recorded(place) as records:
            assert all(records.get(name) == [name] for name in known)
            assert all(records.get(name) in (None, [name]) for name in ("a", "b", "c"))
        if not disk.has_failed:
            assert number > 8
            return
