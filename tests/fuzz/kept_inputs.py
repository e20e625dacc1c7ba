"""The kept inputs of all targets: one archive, `kept.tar.xz`, with a folder each. Equal inputs give equal bytes.

As a program, it adds inputs: python -m tests.fuzz.kept_inputs TARGET FILE...
"""

from __future__ import annotations

import io
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = Path(__file__).with_name("kept.tar.xz")


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


def main(name: str, *paths: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        unpack(name, kept)
        for path in paths:
            shutil.copy(path, kept)
        pack(name, kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
