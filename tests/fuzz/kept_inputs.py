"""The kept inputs of each target: one archive, `kept/TARGET.zip`. Equal inputs give equal bytes.

As a program, it adds inputs: python -m tests.fuzz.kept_inputs TARGET FILE...
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).with_name("kept")


def kept_inputs(name: str) -> list[bytes]:
    """Return the kept inputs of a target, in the order of their names."""
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
        return [archive.read(member) for member in sorted(archive.namelist())]


def unpack(name: str, folder: Path) -> None:
    """Write the kept inputs of a target into a new folder, one file each. An old folder is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
        archive.extractall(folder)


def pack(name: str, folder: Path) -> None:
    """Replace the kept inputs of a target by the files of a folder."""
    with zipfile.ZipFile(FOLDER / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.iterdir()):
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)


def main(name: str, *paths: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "kept"
        unpack(name, kept)
        for path in paths:
            shutil.copy(path, kept)
        pack(name, kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
