"""The needs of untrusted JSON and TOML are counted before it is parsed. Messages about it are short."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests import codec
from moec.manifests.errors import ManifestInvalid
from moec.manifests.files import limits, strict_json
from moec.manifests.files.limits import (
    MANIFEST_JSON,
    MAX_MANIFEST_BYTES,
    MAX_TOML_BYTES,
    MAX_TOML_DEPTH,
    JsonLimits,
    header_json,
)
from moec.manifests.files.strict_json import check_structure, load_strict_json, shown
from moec.manifests.files.strict_toml import load_strict_toml
from tests.manifests.examples import plain_example, seal

WIDE = JsonLimits(1 << 20, 1 << 20, 1 << 20, 1 << 20)
TEXTS = st.text(st.sampled_from('a"\\[]{},:\n€'), max_size=6)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int, int, int]:
    """Containers, commas, texts and depth of a value."""
    if isinstance(value, str):
        return 0, 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    keys = len(value) if isinstance(value, dict) else 0
    return (
        1 + sum(part[0] for part in parts),
        max(len(parts) - 1, 0) + sum(part[1] for part in parts),
        keys + sum(part[2] for part in parts),
        1 + max((part[3] for part in parts), default=0),
    )


@given(VALUES, st.sampled_from([1, 2, 3, 7, 1 << 20]), st.booleans(), st.sampled_from([None, 1]))
def test_the_count_is_that_of_the_parser(value: Any, part_bytes: int, is_ascii: bool, indent: int | None) -> None:
    """Whatever the texts hold, and wherever the bytes are cut: the least limits pass, and one less is refused."""
    data = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    containers, commas, texts, depth = counted(value)
    least = [containers, containers + commas, texts, depth]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "PART_BYTES", part_bytes)
        assert load_strict_json(data, JsonLimits(len(data), *least)) == value
        for at, found in enumerate(least):
            if found:
                fewer = [*least[:at], found - 1, *least[at + 1 :]]
                with pytest.raises(ValueError, match=("containers", "values", "texts", "nested more")[at]):
                    check_structure(data, JsonLimits(len(data), *fewer))
    with pytest.raises(ValueError, match=f"{len(data)} bytes, more than the limit of {len(data) - 1}"):
        load_strict_json(data, JsonLimits(len(data) - 1, *least))


@pytest.mark.parametrize("data", [b"[", b"]", b"[[]", b"]][[", b"[]]", b'{"a": [}', b'{"[": ]}', b"[" * 100_000])
def test_brackets_without_a_partner(data: bytes) -> None:
    with pytest.raises(ValueError, match="a bracket has no partner"):
        load_strict_json(data, WIDE)


@pytest.mark.parametrize(
    "data", [b"", b"[}", b'"', b'"[', b"[1,]", b'{"a": 1, "a": 1}', b"[1e999]", b"9" * 4001, b"NaN", b'"\xff"']
)
def test_what_is_not_strict_json(data: bytes) -> None:
    with pytest.raises(ValueError):
        load_strict_json(data, WIDE)


def test_a_message_never_looks_inside() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert (shown(deep), shown({"a": deep}), shown(None), shown(4)) == ("a list", "an object", "None", "4")
    assert shown("x" * 1000) == repr("x" * 40) and len(shown(10**4000)) == 40
    while deep:  # freed from the outside, not by recursion
        deep = deep[0]


@pytest.mark.parametrize("depth", [1, 20, 24])
def test_a_nested_list_where_one_of_a_few_texts_is_due(depth: int) -> None:
    plain, nested = plain_example(), json.loads("[" * depth + "]" * depth)
    plain["model"]["layers"][0]["experts"]["activation"] = nested
    with pytest.raises(ManifestInvalid, match=r"experts.activation`: expected one of .*, found a list") as caught:
        codec.decode_manifest(seal(plain), "moec.json")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("depth", [30, 972, 5000, 200_000])
def test_deep_nesting_is_refused_before_it_is_parsed(depth: int) -> None:
    data = seal(plain_example()).replace(b'"silu"', b"[" * depth + b"]" * depth, 1)
    with pytest.raises(ManifestInvalid, match="nested more than 32 deep"):
        codec.decode_manifest(data, "moec.json")


BOMBS = {
    "lists": b"[],",
    "objects": b"{},",
    "numbers": b"1000,",
    "floats": b"1.5,",
    "text": b"x",
    "texts": b'"",',
    "fields": b'"a":"b",',
    "nested": b"[",
    "blanks": b" ",
}
DECODE = """
import resource, sys
from moec.manifests.codec import decode_manifest
from moec.manifests.errors import ManifestInvalid
piece, size = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
data = piece * (size // len(piece))
if piece == b"x":
    data = b'"' + data + b'"'
elif piece != b" ":
    data = b"[" + data + b"0]"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode_manifest(data, "moec.json")
except ManifestInvalid:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before >> 10)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_the_largest_manifest_takes_little_memory(name: str) -> None:
    """The largest manifest with one kind of value is refused, with a few times its size of memory at most."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    command = [sys.executable, "-c", DECODE, BOMBS[name].hex(), str(MAX_MANIFEST_BYTES - 3)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 4 * MAX_MANIFEST_BYTES >> 20


def test_a_header_is_bounded_by_the_tensors_it_may_hold() -> None:
    few, many = header_json(7), header_json(1000)
    assert few.size_bytes < 32 << 10 and many.size_bytes < 1 << 20
    assert header_json(1 << 30).size_bytes == header_json().size_bytes == 32 << 20
    names = {
        f"{'n' * 200}{at}": {"dtype": "F8_E4M3", "shape": [1 << 40] * 16, "data_offsets": [1 << 46] * 2}
        for at in range(7)
    }
    assert load_strict_json(json.dumps({**names, "__metadata__": {"format": "pt"}}).encode(), header_json(7))
    with pytest.raises(ValueError, match="more than 23 containers"):
        load_strict_json(b"[" + b"[]," * 30 + b"0]", few)
    assert MANIFEST_JSON.size_bytes == MAX_MANIFEST_BYTES


def test_the_page_lists_the_limits() -> None:
    """Every bound that a bundle or an archive meets is in docs/format.md, by its name."""
    page = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    own = {"MAX_WORK_BYTES"}  # of work folders, which no stranger makes
    names = {name for name in vars(limits) if name.startswith(("MAX_", "HEADER_"))} - own
    assert len(names) > 12 and all(f"`{name}`" in page for name in names), sorted(names)
    assert f"| {limits.MAX_MANIFEST_BYTES >> 20} MiB |" in page and f"| {limits.MAX_MANIFEST_CONTAINERS:,} |" in page


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEEP = "{a.a.a.a.a.a.a.a.a.a = 1}"
MOST_MEMORY_BYTES = 48 << 20
gate = pytest.mark.gate("G10")


@gate
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


@gate
def test_what_stands_in_texts_and_comments_is_not_counted() -> None:
    text = f'# [[[[[[[[[[ {DEEP}\na = "[[[[[[[[[[ #"\nb = \'{{{{{{{{{{{{\'\nc = """\n[[[[[[[[[[[\n"""\n'
    assert load_strict_toml(text.encode()) == {"a": "[[[[[[[[[[ #", "b": "{{{{{{", "c": "[[[[[[[[[[[\n"}


@gate
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


@gate
@given(st.lists(PIECES, max_size=14).map("".join) | st.lists(PIECES, max_size=6).map(lambda few: f"a=[{''.join(few)}]"))
def test_any_text_is_parsed_as_by_the_library_or_refused(text: str) -> None:
    try:
        found = load_strict_toml(text.encode())
    except ValueError:
        return
    assert found == tomllib.loads(text)
    assert depth(found) <= 2 * MAX_TOML_DEPTH
