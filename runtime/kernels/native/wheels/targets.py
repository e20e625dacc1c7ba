"""The wheels that `make wheels` builds: processors, versions of Python, and where their headers are."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's names of processors."""
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class PackagesUnavailable(RuntimeError):
    """There is no apt-get here, or it cannot fetch the packages."""


def unpack_packages(packages: Sequence[str], release: str, processor: str, folder: Path, with_needs: bool) -> Path:
    """Unpack packages into a folder of their own, once. Later calls return at once.

    packages: names.
    release: for example `bookworm`.
    processor: a key of ARCHITECTURES.
    folder: gets a folder for each list of packages.
    with_needs: also unpack what the packages depend on.
    Returns the folder that stands for `/`. Raises PackagesUnavailable.
    """
    named = " ".join([release, processor, str(with_needs), *packages])
    root = folder / f"{release}-{processor}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"
    if (root / ".complete").exists():
        return root / "root"
    environment = _private_apt(release, processor, root / "apt")
    try:
        _run(["apt-get", "update"], environment, root)
        if with_needs:
            command = ["apt-get", "install", "--download-only", "--no-install-recommends", "--yes", *packages]
            _run(command, environment, root)
        else:
            archives = root / "apt" / "cache" / "archives"
            _run(["apt-get", "download", *packages], environment, archives)
        for archive in sorted((root / "apt" / "cache" / "archives").glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(archive), str(root / "root")], environment, root)
    except FileNotFoundError as error:
        raise PackagesUnavailable(f"{error.filename} is missing: packages of Debian need Debian's tools") from error
    (root / ".complete").touch()
    return root / "root"


def _private_apt(release: str, processor: str, folder: Path) -> dict[str, str]:
    """Write settings of apt that read and write one folder alone. Returns the environment that selects them."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state" / "status").touch()
    source = f"deb [signed-by={_KEYRING}] {_mirror()} {release} main\n"
    (folder / "sources.list").write_text(source)
    settings = {
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "state" / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "APT::Sandbox::User": "root",
        "APT::Architecture": ARCHITECTURES[processor],
    }
    lines = [f'{name} "{value}";' for name, value in settings.items()]
    lines.append(f'#clear APT::Architectures;\nAPT::Architectures {{ "{ARCHITECTURES[processor]}"; }};')
    (folder / "apt.conf").write_text("\n".join(lines) + "\n")
    return {**os.environ, "APT_CONFIG": str(folder / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}


def _mirror() -> str:
    """Return the address from which this system has its packages. Raises PackagesUnavailable."""
    try:
        command = ["apt-get", "indextargets", "--format", "$(CODENAME) $(REPO_URI)", "Created-By: Packages"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise PackagesUnavailable("apt-get is missing: packages of Debian need Debian's tools") from error
    mirrors = [
        line.split()[1] for line in listing.splitlines() if "security" not in line and "-" not in line.split()[0]
    ]
    if not mirrors or not Path(_KEYRING).exists():
        raise PackagesUnavailable("this system is not Debian: it has neither its mirror nor its keys")
    return mirrors[0]


def _run(command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise PackagesUnavailable(f"{' '.join(command[:2])} failed: {reason}")


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
