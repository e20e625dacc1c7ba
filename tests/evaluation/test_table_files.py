"""Tables of Parquet and Arrow: rows with their places, needed columns alone, and bounds of memory and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moec.evaluation import table_files
from moec.evaluation.table_files import read_tables
from moec.manifests.errors import DataError, MissingDependency

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.gate("G10")


def write(path: Path, columns: dict[str, Any]) -> Path:
    table = pyarrow.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, compression="zstd")
        return path
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    is_stream = path.stem.endswith("stream")
    opened = (pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file)(str(path), table.schema, options=options)
    with opened as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a-stream.arrow"])
def test_rows_have_places_and_the_needed_fields(tmp_path: Path, name: str) -> None:
    columns = {"q": ["a", "é\n"], "list": [["x"], []], "raw": [b"1", b"2"], "n": [1, None]}
    one, other = write(tmp_path / name, columns), write(tmp_path / f"b{name}", columns)
    form = name.rpartition(".")[2]
    rows = read_tables([one, other], form)
    assert [place for place, _ in rows.read(())] == [f"`{one}:1`", f"`{one}:2`", f"`{other}:1`", f"`{other}:2`"]
    assert rows.first()[1] == {"q": "a", "list": ["x"], "raw": {"kind": "bytes"}, "n": 1}
    assert [row for _, row in read_tables([one], form).read({"q", "n", "none"})] == [
        {"q": "a", "n": 1},
        {"q": "é\n", "n": None},
    ]


BOMBS = {
    "one long text": {"q": ["x" * (96 << 20)]},
    "a text that is repeated": {"q": ["x" * (1 << 20)] * 200},
    "a list of zeros": {"q": pyarrow.array([[0] * 20_000_000], pyarrow.list_(pyarrow.int8()))},
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_file_takes_no_more_memory_than_the_limit(
    kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_files, "MAX_MEMORY_BYTES", 64 << 20)
    path = write(tmp_path / f"a.{suffix}", BOMBS[kind])
    assert path.stat().st_size < 1 << 20
    with pytest.raises(
        DataError, match=rf"a\.{suffix}` cannot be read as a whole .*: (it takes more than 64 MiB|reading)"
    ):
        list(read_tables([path], suffix).read(()))


def test_columns_that_are_not_needed_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "MAX_MEMORY_BYTES", 64 << 20)
    path = write(tmp_path / "a.parquet", {"q": ["a"], "image": ["x" * (96 << 20)]})
    assert [row for _, row in read_tables([path], "parquet").read(("q",))] == [{"q": "a"}]


def test_the_number_of_rows_is_bounded_before_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"q": pyarrow.nulls(3_000_000)})
    assert path.stat().st_size < 1 << 15
    with pytest.raises(DataError, match="it has 3000000 rows, more than the limit of 2097152"):
        list(read_tables([path], "parquet").read(()))


def test_a_row_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "MAX_LINE_BYTES", 1000)
    path = write(tmp_path / "a.parquet", {"q": ["a", "x" * 2000]})
    with pytest.raises(DataError, match=r":2`: expected rows of at most"):
        list(read_tables([path], "parquet").read(()))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    whole = write(tmp_path / f"a.{suffix}", {"q": ["a"] * 100}).read_bytes()
    path = tmp_path / f"b.{suffix}"
    for content in (b"", b"PAR1", whole[: len(whole) // 2], whole[:-9] + b"\xff" * 9, b"\0" * 1000):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"b\.{suffix}`"):
            list(read_tables([path], suffix).read(()))


def test_tables_need_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match="needs the package `pyarrow`"):
        read_tables([tmp_path / "a.parquet"], "parquet")
