"""Every fault of a JSON Lines, JSON or CSV file is told with its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.evaluation import text_files
from moec.evaluation.text_files import Row, Rows, read_jsonl
from moec.manifests.errors import DataError


def read(rows: Rows) -> list[Row]:
    return list(rows.read(()))


def test_rows_keep_their_line_numbers(write) -> None:
    path = write("a.jsonl", [b'\xef\xbb\xbf{"text": "\xc3\xa9"}', "", "  ", {"text": "b"}])
    rows = read_jsonl(path)
    assert read(rows) == [(f"`{path}:1`", {"text": "é"}), (f"`{path}:4`", {"text": "b"})] == read(rows)
    assert rows.first() == (f"`{path}:1`", {"text": "é"})


def test_last_line_needs_no_line_feed(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\r\n{"text": "b"}')
    assert [value for _, value in read(read_jsonl(path))] == [{"text": "a"}, {"text": "b"}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "malformed JSON: expecting ',' delimiter at column 1"),
        ("{'text': 1}", "malformed JSON"),
        ('[{"text": "a"}]', "expected a JSON object, found a list"),
        ('"text"', "found a text"),
        ("12", "found a number"),
        ("true", "found true or false"),
        ("null", "found null"),
        (b'{"text": "\xff"}', "expected UTF-8 text, found byte 0xff"),
        ("[" * 100_000, "JSON that cannot be read"),
        ('{"n": ' + "9" * 5000 + "}", "JSON that cannot be read"),
    ],
)
def test_faults_name_file_and_line(write, line: object, message: str) -> None:
    path = write("bad.jsonl", [{"text": "good"}, line, {"text": "good"}])
    with pytest.raises(DataError) as caught:
        read(read_jsonl(path))
    assert f"`{path}:2`: " in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("rows", [[], ["", "   "]])
def test_empty_file(write, rows: list[str]) -> None:
    path = write("empty.jsonl", rows)
    with pytest.raises(DataError, match="expected JSON lines, found an empty file"):
        read(read_jsonl(path))


def test_a_line_is_bounded_before_it_is_parsed(write, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 64)
    path = write("long.jsonl", [{"text": "a"}, {"text": "b" * 100}])
    with pytest.raises(DataError, match=r"long\.jsonl:2`: expected lines of at most"):
        read(read_jsonl(path))


def test_a_file_that_cannot_be_opened(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read(read_jsonl(tmp_path))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytes") / "any.jsonl"


@given(st.binary(max_size=80) | st.text('{}[]":,\\u0e1n\n ', max_size=40).map(str.encode))
def test_any_bytes_give_rows_or_a_data_error(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    try:
        rows = read(read_jsonl(scratch))
    except DataError as error:
        assert "any.jsonl:" in error.message
    else:
        assert rows and all(isinstance(value, dict) for _, value in rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "expected rows, found none"),
        (b'[{"text": "a"}, 3]', ":2`: expected a JSON object, found a number"),
        (b'[{"text": "a"}', "a bracket has no partner"),
        (b'[{"text": "\xff"}]', "found byte 0xff"),
        (b"[" * 100_000, "JSON that cannot be read"),
    ],
)
def test_faults_of_a_json_list(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        read(text_files.read_json(path))
    assert message in str(caught.value) and str(path) in str(caught.value) and caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "expected rows, found none"),
        (b"text\n", "expected rows, found none"),
        (b"text,n\na,1\nb\n", ":3`: expected as many values as columns"),
        (b"text,n\na,1,2\n", ":2`: expected as many values as columns"),
        (b'text\n"a\n', "malformed CSV"),
        (b"text\n\xff\n", "expected UTF-8 text"),
    ],
)
def test_faults_of_a_csv_file(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        read(text_files.read_csv(path))
    assert message in str(caught.value) and str(path) in str(caught.value) and caught.value.hint


def test_a_json_list_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_WHOLE_BYTES", 1 << 20)
    path = tmp_path / "a"
    path.write_bytes(b"[" + b" " * (1 << 20) + b"]")
    with pytest.raises(DataError, match="more than the limit of 1048576"):
        read(text_files.read_json(path))


@pytest.mark.parametrize("reader", [text_files.read_json, text_files.read_csv])
def test_only_regular_files_are_read(tmp_path: Path, reader: Callable[[Path], Rows]) -> None:
    with pytest.raises(DataError, match="is a "):
        read(reader(tmp_path))
    os.mkfifo(tmp_path / "pipe")  # without a writer
    with pytest.raises(DataError, match="is a "):
        read(reader(tmp_path / "pipe"))


def test_lines_of_a_pipe_are_read_once(tmp_path: Path) -> None:
    """The first object tells the task, and all objects are its items."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=('{"text": "a"}\n{"text": "b"}\n',))
    writer.start()
    rows = read_jsonl(pipe)
    writer.join()
    assert rows.first()[1] == {"text": "a"} and len(read(rows)) == 2


@pytest.mark.gate("G10")
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", b'{"a": [' + b"1," * 1_100_000 + b"1]}", "more than 1048576 values"),
        ("a.jsonl", b'{"a": [' + b"{}," * 70_000 + b"{}]}", "more than 65536 containers"),
        ("a.jsonl", b'{"a":' * 100 + b"1" + b"}" * 100, "nested more than 64 deep"),
        ("a.json", b"[" + b'{"a":' * 100 + b"1" + b"}" * 100 + b"]", "nested more than 64 deep"),
        ("a.json", b'[{"n": ' + b"9" * 5000 + b"}]", "JSON that cannot be read"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "malformed JSON"),
        ("a.json", b'[{"a": 1}, ]', "malformed JSON"),
        ("a.json", b'[{"a": 1}] 2', "extra data after the list"),
        ("a.json", b"[] []", "extra data after the list"),
        ("a.csv", b"a," * 5000 + b"a\n" + b"1," * 5000 + b"1\n", "at most 4096 columns"),
        ("a.csv", b'a\n"' + (b"x" * 99 + b"\n") * 170_000, "rows of at most 16 MiB"),
        ("a.csv", b"a\n" + b"x" * (17 << 20), "rows of at most 16 MiB"),
    ],
)
def test_what_a_size_on_disk_does_not_bound(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(text)
    with pytest.raises(DataError, match=message):
        read({"jsonl": read_jsonl, "json": text_files.read_json, "csv": text_files.read_csv}[name[2:]](path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_the_number_of_rows_is_bounded(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_ROWS", 3)
    path = tmp_path / name
    path.write_text({"a.jsonl": "{}\n" * 4, "a.json": "[{}, {}, {}, {}]", "a.csv": "a\n1\n2\n3\n4\n"}[name])
    with pytest.raises(DataError, match=r":\d`: expected at most 3 rows"):
        read({"jsonl": read_jsonl, "json": text_files.read_json, "csv": text_files.read_csv}[name[2:]](path))


def test_values_of_csv_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,n\r\n"2020-01-01\nand ""more""",007\r\nNA,\r\n')
    assert [row for _, row in read(text_files.read_csv(path))] == [
        {"text": '2020-01-01\nand "more"', "n": "007"},
        {"text": "NA", "n": ""},
    ]
