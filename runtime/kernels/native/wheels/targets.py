"""The wheels that `make wheels` builds: processors, versions of Python, and where their headers are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .debian_packages import ARCHITECTURES, PackagesUnavailable, unpack_packages

PROCESSORS = tuple(ARCHITECTURES)
PYTHONS = ("3.10", "3.11", "3.12")
STABLE = (3, 12)
"""From this version on, one extension serves all later ones: nanobind's stable ABI."""
GLIBC = "2.28"
_NEWER = ("3.13", "3.14")
"""Versions whose headers serve as well for the stable ABI."""
_DEBIAN_RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
_PRINT_HEADERS = "import sysconfig; print(sysconfig.get_path('include'))"


@dataclass(frozen=True)
class Target:
    """One wheel.

    python: oldest version that takes it, for example 3.10.
    processor: x86_64 or aarch64.
    """

    python: str
    processor: str

    @property
    def is_stable(self) -> bool:
        """Return whether all later versions of Python take it, too."""
        return tuple(map(int, self.python.split("."))) >= STABLE

    @property
    def tag(self) -> str:
        """Return the tag of the wheel, for example cp312-abi3-manylinux_2_28_aarch64."""
        version = f"cp{self.python.replace('.', '')}"
        platform = f"manylinux_{GLIBC.replace('.', '_')}_{self.processor}"
        return f"{version}-{'abi3' if self.is_stable else version}-{platform}"

    @property
    def extension(self) -> str:
        """Return the file name of the extension."""
        middle = "abi3" if self.is_stable else f"cpython-{self.python.replace('.', '')}-{self.processor}-linux-gnu"
        return f"_native.{middle}.so"


@dataclass(frozen=True)
class Headers:
    """Headers of a Python.

    folder: with Python.h and pyconfig.h.
    version: for example 3.13.
    source: where they come from, for people.
    """

    folder: Path
    version: str
    source: str


def find_headers(target: Target, given: dict[str, Path], debian: Path | None) -> Headers | None:
    """Return headers for a wheel; None if there are none here.

    The first of: a given folder, an interpreter on the path, a package of Debian.
    given: folders by version.
    debian: folder for unpacked packages; None to fetch none.
    Raises PackagesUnavailable if a package of Debian cannot be had.
    """
    versions = (target.python, *_NEWER) if target.is_stable else (target.python,)
    for version in versions:
        if version in given:
            return _checked(Headers(given[version], version, str(given[version])), target.processor)
    for version in versions:
        headers = _of_interpreter(version)
        if headers is not None and _fits(headers.folder, target.processor):
            return headers
    for version in versions:
        if version in _DEBIAN_RELEASES and debian is not None:
            release, package = _DEBIAN_RELEASES[version], f"libpython{version}-dev"
            root = unpack_packages([package], release, target.processor, debian, with_needs=False)
            folder = root / "usr" / "include" / f"python{version}"
            return _checked(Headers(folder, version, f"{package} of Debian {release}"), target.processor)
    return None


def _of_interpreter(version: str) -> Headers | None:
    """Return the headers of an interpreter on the path; None without one."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    program = sys.executable if version == here else shutil.which(f"python{version}")
    if program is None:
        return None
    printed = subprocess.run([program, "-c", _PRINT_HEADERS], capture_output=True, text=True, check=False).stdout
    return Headers(Path(printed.strip()), version, program)


def _checked(headers: Headers, processor: str) -> Headers:
    """Return the headers. Raises PackagesUnavailable if they do not serve a processor."""
    if not _fits(headers.folder, processor):
        raise PackagesUnavailable(f"`{headers.folder}` holds no Python.h and pyconfig.h for {processor}")
    return headers


def _fits(folder: Path, processor: str) -> bool:
    """Return whether a folder holds Python.h, and pyconfig.h for a processor.

    Debian's pyconfig.h includes another one for each processor. All others serve every processor with 64 bits.
    """
    config = folder / "pyconfig.h"
    if not (folder / "Python.h").exists() or not config.exists():
        return False
    is_divided = "-linux-gnu" in config.read_text(errors="replace")
    return not is_divided or (folder.parent / f"{processor}-linux-gnu" / folder.name / "pyconfig.h").exists()
