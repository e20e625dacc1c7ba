"""Size, nesting and tokens of TOML are counted before it is parsed."""

from __future__ import annotations

import sys
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.files.limits import MAX_TOML_BYTES, MAX_TOML_DEPTH
from moec.manifests.files.strict_toml import load_strict_toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEEP = "{a.a.a.a.a.a.a.a.a.a = 1}"
MOST_MEMORY_BYTES = 48 << 20
pytestmark = pytest.mark.gate("G10")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" + ".a" * 20000 + " = 1", "nested more than 8 deep"),
        ("[a" + " . a" * 20 + "]", "nested more than 8 deep"),
        ("[[" + "a." * 20 + "a]]", "nested more than 8 deep"),
        ('"a"' + "." + "'a'." * 20 + "a = 1", "nested more than 8 deep"),
        ("a = " + "[" * 9 + "]" * 9, "nested more than 8 deep"),
        ("a = " + "{a = " * 9 + "1" + "}" * 9, "nested more than 8 deep"),
        (f'a = ["""x"""", {DEEP}]', "nested more than 8 deep"),
        (f"a = ['''x''''', {DEEP}]", "nested more than 8 deep"),
        (f'a = ["\\"", {DEEP}]', "nested more than 8 deep"),
        (f"a = ['\\', {DEEP}]", "nested more than 8 deep"),
        ("a = [" + "{}," * 16000 + "]", "more than 32768 keys, values and signs"),
        ("[[a]]\n" * 10000, "more than 32768 keys, values and signs"),
        ("a = " + "9" * 5000, "more than 1024 characters"),
        ("a = 0x" + "f" * 5000, "more than 1024 characters"),
        ("a = 1." + "9" * 5000, "more than 1024 characters"),
        ("a = 1" + "_9" * 5000, "more than 1024 characters"),
        ('a = "\\U99999999"', "Unicode scalar"),
        ("a = 1\na = 2", "overwrite"),
        ("#" * (MAX_TOML_BYTES + 1), "more than the limit"),
    ],
)
def test_refused_text(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_strict_toml(text.encode())


def test_what_stands_in_texts_and_comments_is_not_counted() -> None:
    text = f'# [[[[[[[[[[ {DEEP}\na = "[[[[[[[[[[ #"\nb = \'{{{{{{{{{{{{\'\nc = """\n[[[[[[[[[[[\n"""\n'
    assert load_strict_toml(text.encode()) == {"a": "[[[[[[[[[[ #", "b": "{{{{{{", "c": "[[[[[[[[[[[\n"}


@pytest.mark.parametrize(
    "line", ["%x.b.c.d.e.f.g.h=1\n", "[%x.b.c.d.e.f.g.h]\n", "%x={b.c.d.e.f.g.h=1}\n", "%x=[[[[{}]]]]\n", "#%x\n"]
)
def test_the_largest_text_takes_little_memory(line: str) -> None:
    lines = [(line % at).encode() for at in range(MAX_TOML_BYTES)]
    most, size, tokens = list[bytes](), 0, 0
    for entry in lines:
        size, tokens = size + len(entry), tokens + 2 * len(entry)
        if size > MAX_TOML_BYTES or tokens > 1 << 15:
            break
        most.append(entry)
    tracemalloc.start()
    try:
        load_strict_toml(b"".join(most))
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY_BYTES
    finally:
        tracemalloc.stop()


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


PIECES = st.sampled_from(
    ['"""', "'''", '"', "'", "a", ".", "=", "[", "]", "{", "}", "\n", "#", "\\", ",", "1", " ", "x=1\n", DEEP]
)


@given(st.lists(PIECES, max_size=14).map("".join) | st.lists(PIECES, max_size=6).map(lambda few: f"a=[{''.join(few)}]"))
def test_any_text_is_parsed_as_by_the_library_or_refused(text: str) -> None:
    try:
        found = load_strict_toml(text.encode())
    except ValueError:
        return
    assert found == tomllib.loads(text)
    assert depth(found) <= 2 * MAX_TOML_DEPTH
