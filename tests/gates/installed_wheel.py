"""A wheel that is installed apart from the tree: in an environment, or for a Python of Debian, for ARM under qemu."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moec.runtime.kernels.native.wheels.targets import PackagesUnavailable, unpack_packages

ROOT = Path(__file__).parents[2]
EMULATOR = "qemu-aarch64"
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
"""Releases of Debian by their Python."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
TEST_TOOLS = ("pytest>=8.2", "hypothesis>=6.150")


@dataclass(frozen=True)
class Installed:
    """An installed wheel.

    python: words of a command that starts its interpreter.
    environment: variables of its processes; the path holds no compiler.
    """

    python: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Start the interpreter with these words, outside of the tree."""
        command = [*self.python, *map(str, words)]
        folder = self.environment["HOME"]
        return subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, check=False)

    def moec(self, *words: str | Path) -> str:
        """Run a command of moec. Returns its output. It must succeed."""
        done = self.run("-m", "moec.cli.main", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout


def bare_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment with an empty folder as path and home."""
    empty = folder / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    return {"PATH": str(empty), "HOME": str(empty), "MOEC_WARNINGS": "1", **more}


def install_here(wheel: Path, folder: Path, with_needs: bool) -> Installed:
    """Install a wheel in an environment of its own, with a path that holds no compiler.

    with_needs: also install what moec needs, from the package index; otherwise take it from the running environment.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python, environment = folder / "venv" / "bin" / "python", bare_environment(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--only-binary", ":all:"]
    if with_needs:
        pip += ["-c", str(ROOT / "constraints.txt")]
    else:
        pip += ["--no-deps", "--no-index"]
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        (site / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    without_compilers = {**os.environ, "PATH": environment["PATH"]}
    done = subprocess.run([*pip, str(wheel)], env=without_compilers, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Installed((str(python),), environment)


def install_on_debian(wheel: Path, folder: Path, python: str, processor: str, emulated: str = "max") -> Installed:
    """Install a wheel for a Python of Debian, which is unpacked apart from the system. ARM runs under qemu-user.

    python: a key of RELEASES.
    processor: x86_64 or aarch64.
    emulated: name of a processor that qemu has.
    Skips the test where a tool or the network is missing.
    """
    if processor == "aarch64" and shutil.which(EMULATOR) is None:
        pytest.skip(f"NOT RUN: wheels for ARM, because {EMULATOR} is missing: apt-get install qemu-user")
    try:
        packages = [f"python{python}-minimal", f"libpython{python}-stdlib", "libstdc++6"]  # numpy needs the last one
        kept = ROOT / "build" / "wheels" / "debian"
        root = unpack_packages(packages, RELEASES[python], processor, kept, with_needs=True)
    except PackagesUnavailable as error:
        pytest.skip(f"NOT RUN: wheels under Debian's Python, because it cannot be had: {error}")
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")  # in Debian 13 no package has this link
    site, program = folder / "site", root / "usr" / "bin" / f"python{python}"
    _install_into(site, python, processor, [str(wheel), *TEST_TOOLS])
    environment = bare_environment(folder, PYTHONPATH=str(site), PYTHONDONTWRITEBYTECODE="1")
    if processor == "aarch64":
        return Installed((str(shutil.which(EMULATOR)), "-cpu", emulated, "-L", str(root), str(program)), environment)
    libraries = ":".join(str(root / each / "x86_64-linux-gnu") for each in ("usr/lib", "lib"))
    loader = next(root.glob("**/lib64/ld-linux-x86-64.so.2"))  # below `usr` from Debian 13 on
    environment["PYTHONHOME"] = str(root / "usr")
    return Installed((str(loader), "--library-path", libraries, str(program)), environment)


def _install_into(site: Path, python: str, processor: str, packages: Sequence[str]) -> None:
    """Let pip install packages for a Python and a processor into a folder. Skips the test if it cannot fetch them."""
    version = f"cp{python.replace('.', '')}"
    chosen = [
        "--python-version",
        python,
        "--implementation",
        "cp",
        *(f"--abi={abi}" for abi in (version, "abi3", "none")),
    ]
    chosen += [f"--platform={name}_{processor}" for name in PLATFORMS]
    chosen += ["--only-binary", ":all:", "-c", str(ROOT / "constraints.txt")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), *chosen, *packages]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr and "Retrying" in done.stderr:
        pytest.skip(f"NOT RUN: wheels under Debian's Python, because pip cannot fetch: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
