"""The kept inputs of each target, and changes to inputs.

One archive, `kept.tar.xz`, has a folder for each target. Equal inputs give equal bytes. Changes to JSON keep it JSON.
Of other inputs the parser of the standard library refuses nearly all.

As a program, it adds inputs: python -m tests.fuzz.kept_inputs TARGET FILE...
"""

from __future__ import annotations

import copy
import io
import json
import random
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ARCHIVE = Path(__file__).with_name("kept.tar.xz")
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 31, 32, 33, 255, 1 << 16, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 10**30, 0.5,
    -0.0, 1e308, 5e-324, "", "q4g64", "q0", "bf16", "../x", "a\x00b", "\ud800", "\x1b]0;x\x07", "x" * 300, [], {}, [[]],
    {"": 0},
)  # fmt: skip


def _members() -> dict[str, bytes]:
    """Return the content of the archive by TARGET/NAME, in the order of the names."""
    with tarfile.open(ARCHIVE) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def kept_inputs(name: str) -> list[bytes]:
    """Return the kept inputs of a target, in the order of their names."""
    return [data for member, data in _members().items() if member.startswith(f"{name}/")]


def unpack(name: str, folder: Path) -> None:
    """Write the kept inputs of a target into a new folder, one file each. An old folder is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for member, data in _members().items():
        if member.startswith(f"{name}/"):
            (folder / Path(member).name).write_bytes(data)


def pack(name: str, folder: Path) -> None:
    """Replace the kept inputs of a target by the files of a folder."""
    members = {member: data for member, data in _members().items() if not member.startswith(f"{name}/")}
    members |= {f"{name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for member in sorted(members):
            header = tarfile.TarInfo(member)
            header.size = len(members[member])
            archive.addfile(header, io.BytesIO(members[member]))


def containers(value: Any) -> Iterator[Any]:
    """Every list and object in a value that is not empty."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, (list, dict)) and found:
            yield found
            waiting += found.values() if isinstance(found, dict) else found


def change(plain: Any, source: random.Random) -> Any:
    """One change somewhere: another value, one gone, one twice, a value of another field, a number near by."""
    places = list(containers(plain))
    if not places:
        return source.choice(ODD_VALUES)
    place = source.choice(places)
    key = source.choice(list(place)) if isinstance(place, dict) else source.randrange(len(place))
    other = source.choice(places)
    kind = source.randrange(6)
    if kind == 0:
        place[key] = copy.deepcopy(source.choice(ODD_VALUES))
    elif kind == 1:
        del place[key]
    elif kind == 2 and isinstance(place, list):
        place.insert(key, copy.deepcopy(place[key]))
    elif kind == 3 and isinstance(place, dict):
        place[source.choice(("unknown", "", str(key) + "2"))] = copy.deepcopy(place[key])
    elif kind == 4:
        place[key] = copy.deepcopy(source.choice(list(other.values()) if isinstance(other, dict) else other))
    elif type(place[key]) in (int, float):
        place[key] = source.choice((place[key] + 1, place[key] - 1, -place[key], place[key] * 2))
    return plain


def changed_json(line: bytes, source: random.Random) -> bytes | None:
    """One text of JSON, changed once to four times; None if it is none."""
    try:
        plain = json.loads(line)
        for _ in range(source.choice((1, 1, 2, 4))):
            plain = change(plain, source)
        return json.dumps(plain, ensure_ascii=source.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None


def mutator_of(plain_mutation: Callable[[bytes, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """A custom mutator: half of the time bytes, half of the time the JSON of the text, or of one line of it."""

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        source = random.Random(seed)
        if source.random() < 0.5:
            return plain_mutation(data, max_size)
        whole = changed_json(data, source)
        if whole is None:
            lines = data.split(b"\n")
            at = source.randrange(len(lines))
            line = changed_json(lines[at], source)
            whole = None if line is None else b"\n".join([*lines[:at], line, *lines[at + 1 :]])
        return plain_mutation(data, max_size) if whole is None or len(whole) > max_size else whole

    return mutate


def main(name: str, *paths: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        unpack(name, kept)
        for path in paths:
            shutil.copy(path, kept)
        pack(name, kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
