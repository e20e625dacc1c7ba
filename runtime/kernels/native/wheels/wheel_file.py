"""Write and check a wheel: moec's own files, and the extension for one processor and one version of Python."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .compiling import CompileFailed
from .targets import Target

EXTENSION_FOLDER = "moec/runtime/kernels"
_OLDEST_TIME = (1980, 1, 1, 0, 0, 0)
"""Time of each file in a wheel: equal sources give equal bytes."""


def plain_wheel(project: Path, folder: Path) -> Path:
    """Build the wheel without an extension. Returns its path. Raises CompileFailed."""
    settings = ("wheel.cmake=false", "wheel.py-api=py3", f"build-dir={folder / 'plain-build'}")
    options = [word for setting in settings for word in ("--config-settings", setting)]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", *options]
    command += ["--wheel-dir", str(folder / "plain")]
    done = subprocess.run([*command, str(project)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileFailed(f"pip could not build the wheel: {done.stderr.strip()}")
    (wheel,) = (folder / "plain").glob("moec-*-py3-none-any.whl")
    return wheel


def add_extension(plain: Path, extension: Path, tag: str, name: str, folder: Path) -> Path:
    """Write a wheel with an extension.

    plain: the wheel without one.
    extension: the compiled file.
    tag: for example cp311-cp311-manylinux_2_28_aarch64.
    name: file name that the extension gets.
    folder: where the wheel is written.
    Returns the path of the wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = plain.name.removesuffix("-py3-none-any.whl")
    wheel = folder / f"{stem}-{tag}.whl"
    partial = wheel.with_suffix(".partial")
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        files = {entry: source.read(entry) for entry in source.namelist() if not entry.endswith(("/", "/RECORD"))}
        files[f"{EXTENSION_FOLDER}/{name}"] = extension.read_bytes()
        about = f"{stem}.dist-info"
        files[f"{about}/WHEEL"] = _tagged(files[f"{about}/WHEEL"], tag)
        files[f"{about}/RECORD"] = _record(files, f"{about}/RECORD")
        for entry, data in files.items():
            info = zipfile.ZipInfo(entry, _OLDEST_TIME)
            info.external_attr = 0o100644 << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(info, data)
    partial.replace(wheel)
    return wheel


def _tagged(text: bytes, tag: str) -> bytes:
    """Return the file WHEEL of a plain wheel with another tag."""
    python, abi, platforms = tag.split("-")
    lines = [line for line in text.decode().splitlines() if line and not line.startswith(("Tag:", "Root-Is-Purelib:"))]
    lines.append("Root-Is-Purelib: false")
    lines += [f"Tag: {python}-{abi}-{platform}" for platform in platforms.split(".")]
    return ("\n".join(lines) + "\n").encode()


def _record(files: dict[str, bytes], name: str) -> bytes:
    """Return the file RECORD: the digest of every file but itself."""
    lines = []
    for entry, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{entry},sha256={digest},{len(data)}")
    return ("\n".join([*lines, f"{name},,"]) + "\n").encode()


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
