"""Unpack Debian's packages of any release and processor into a folder, and leave the system as it is.

The wheels take headers of other versions of Python from there. The test of the ARM wheel takes an ARM Python.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
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
