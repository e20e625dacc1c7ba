"""Seeds of files that a command reads next to a bundle: task files, device profiles, and data of tasks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.hostile.seed import Seed

REFUSED = frozenset({1})
ROW = b'{"q": "a b", "a": "b"}\n'
TASK = b'prompt = "{q}"\nanswer = "a"\nmax_new_tokens = 4\n'
DEEP = b"a" + b".a" * 30_000 + b" = 1"


def _write(files: dict[str, bytes], bundle: Path) -> None:
    for name, content in files.items():
        bundle.with_name(name).write_bytes(content)


def _task(name: str, content: bytes, codes: frozenset[int] = REFUSED) -> Seed:
    arguments = ("eval", "{bundle}", "--data", "{bundle}/../rows.jsonl", "--task", "{bundle}/../words.toml")
    return Seed(f"task file: {name}", arguments, codes, partial(_write, {"rows.jsonl": ROW, "words.toml": content}))


def _filter(name: str, pattern: bytes, codes: frozenset[int]) -> Seed:
    return _task(f"filter {name}", TASK + b"filter = '" + pattern + b"'", codes)


def _profile(name: str, content: bytes) -> Seed:
    arguments = ("compile", "{bundle}", "--uniform", "4", "-o", "{work}/x", "--device", "{bundle}/../board.toml")
    return Seed(f"profile: {name}", arguments, REFUSED, partial(_write, {"board.toml": content}))


SEEDS: tuple[Seed, ...] = (
    _task("30,000 parts of a key", DEEP),
    _task("30,000 parts of a table's name", b"[" + DEEP[:-4] + b"]"),
    _task("30,000 brackets", b"a = " + b"[" * 30_000),
    _task("tables of 8 parts", b"".join(b"%x.b.c.d.e.f.g.h=1\n" % at for at in range(3200))),
    _task("a number of 5,000 digits", TASK + b"stop = " + b"9" * 5000),
    _task("a hexadecimal number of 60,000 digits", TASK + b"stop = 0x" + b"f" * 60_000),
    _task("60,000 zero bytes", b"\0" * 60_000),
    _filter("of 5,000 parentheses", b"(" * 5000, REFUSED),
    _filter("of a huge repetition", b"a{4294967296}", frozenset({0})),
    _filter("of nested repetitions", b"(?:a{999}){999}", REFUSED),
    _filter("of no character", rb"\U99999999", REFUSED),
    _filter("with a backreference", rb"(a)\1", REFUSED),
    _filter("that backtracks", rb"(?:[\s\S]+)+\x01", frozenset({0})),
    _profile("30,000 parts of a key", DEEP),
    _profile("a number of 5,000 digits", b"threads = " + b"9" * 5000),
)
