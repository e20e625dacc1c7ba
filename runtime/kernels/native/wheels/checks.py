"""Checks of a wheel: its size, its platform, and the stable ABI that its name promises."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .compiling import CompileFailed
from .targets import Target

MAX_BYTES = 5_000_000


class WheelRefused(RuntimeError):
    """A wheel breaks a promise."""


def check_wheel(wheel: Path, target: Target) -> Iterator[str]:
    """Check one wheel, and yield a sentence for each check that it passed.

    The symbols of the C library are checked by auditwheel, the stable ABI by abi3audit.
    Raises WheelRefused, and CompileFailed if a tool is missing.
    """
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        raise WheelRefused(f"`{wheel.name}` has {size} bytes, expected at most {MAX_BYTES}")
    platform = target.tag.split("-")[2]
    platform_of_wheel = json.loads(_output("auditwheel", "show", "--json", str(wheel)))["overall_tag"]
    if _glibc(platform_of_wheel) > _glibc(platform):
        raise WheelRefused(f"`{wheel.name}` needs {platform_of_wheel}")
    yield f"auditwheel: {platform_of_wheel}"
    if target.is_stable:
        last = _output("abi3audit", "--strict", "--summary", str(wheel)).strip().splitlines()[-1]
        yield f"abi3audit: {last.strip()}"


def _glibc(platform: str) -> tuple[int, ...]:
    """Return the version of glibc in a platform like manylinux_2_28_x86_64; a large one if it is none."""
    words = platform.split("_")
    return (int(words[1]), int(words[2])) if words[0] == "manylinux" else (999,)


def _output(module: str, *words: str) -> str:
    """Run a tool of the environment. Raises WheelRefused if it fails, CompileFailed if it is missing."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, check=False)
    if f"No module named {module}" in done.stderr:
        raise CompileFailed(f"the package `{module}` is missing: pip install {module}")
    if done.returncode:
        raise WheelRefused(f"{module} refuses the wheel: {(done.stderr or done.stdout).strip()}")
    return done.stdout or done.stderr
