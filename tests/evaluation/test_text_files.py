"""Every fault of a JSON Lines, JSON or CSV file is told with its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.evaluation import text_files
from moec.evaluation.text_files import read_jsonl
from moec.manifests.errors import DataError


def test_rows_keep_their_line_numbers(write) -> None:
    path = write("a.jsonl", [b'\xef\xbb\xbf{"text": "\xc3\xa9"}', "", "  ", {"text": "b"}])
    rows = read_jsonl(path)
    assert rows.numbered == ((1, {"text": "é"}), (4, {"text": "b"}))
    assert rows.place(4) == f"`{path}:4`"


def test_last_line_needs_no_line_feed(tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\r\n{"text": "b"}')
    assert [value for _, value in read_jsonl(path).numbered] == [{"text": "a"}, {"text": "b"}]


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
        read_jsonl(path)
    assert f"`{path}:2`: " in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("rows", [[], ["", "   "]])
def test_empty_file(write, rows: list[str]) -> None:
    path = write("empty.jsonl", rows)
    with pytest.raises(DataError, match="expected JSON lines, found an empty file"):
        read_jsonl(path)


def test_a_line_is_bounded_before_it_is_parsed(write, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 64)
    path = write("long.jsonl", [{"text": "a"}, {"text": "b" * 100}])
    with pytest.raises(DataError, match=r"long\.jsonl:2`: expected lines of at most"):
        read_jsonl(path)


def test_a_file_that_cannot_be_opened(tmp_path) -> None:
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_jsonl(tmp_path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytes") / "any.jsonl"


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=80) | st.text('{}[]":,\\u0e1n\n ', max_size=40).map(str.encode))
def test_any_bytes_give_rows_or_a_data_error(scratch: Path, content: bytes) -> None:
    scratch.write_bytes(content)
    try:
        rows = read_jsonl(scratch)
    except DataError as error:
        assert "any.jsonl:" in error.message
    else:
        assert rows.numbered
        assert all(isinstance(value, dict) for _, value in rows.numbered)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "expected rows, found none"),
        (b'[{"text": "a"}, 3]', ":2`: expected a JSON object, found a number"),
        (b'[{"text": "a"}', "malformed JSON"),
        (b'[{"text": "\xff"}]', "found byte 0xff"),
        (b"[" * 100_000, "JSON that cannot be read"),
    ],
)
def test_faults_of_a_json_list(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(DataError) as caught:
        text_files.read_json(path)
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
        text_files.read_csv(path)
    assert message in str(caught.value) and str(path) in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("read", [text_files.read_json, text_files.read_csv])
def test_files_read_as_a_whole_have_a_limit(tmp_path: Path, read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_WHOLE_BYTES", 1 << 20)
    path = tmp_path / "a"
    path.write_bytes(b"[" + b" " * (1 << 20) + b"]")
    with pytest.raises(DataError, match="more than the limit of 1048576"):
        read(path)
    with pytest.raises(DataError, match="is a "):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # without a writer
    with pytest.raises(DataError, match="is a "):
        read(tmp_path / "pipe")


def test_values_of_csv_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbftext,n\r\n"2020-01-01\nand ""more""",007\r\nNA,\r\n')
    assert [row for _, row in text_files.read_csv(path).numbered] == [
        {"text": '2020-01-01\nand "more"', "n": "007"},
        {"text": "NA", "n": ""},
    ]
