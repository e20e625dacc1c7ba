"""Write a wheel: moec's own files, and the extension for one processor and one version of Python."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from .compiling import CompileFailed

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
