"""Compile the extension, write a wheel with it for one processor and one version of Python, and check the wheel."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .targets import GLIBC, Headers, Target

SOURCES = Path(__file__).resolve().parents[1]


class CompileFailed(RuntimeError):
    """A tool is missing, or a command failed."""


def compile_extension(target: Target, headers: Headers, folder: Path, tools: Path) -> Path:
    """Compile the extension of a wheel.

    folder: of objects. The wheels of one processor share all objects that do not know Python.
    tools: folder with the programs cmake, ninja and python.
    Returns the path of the extension. Raises CompileFailed.
    """
    settings: dict[str, str | Path] = {
        "CMAKE_MAKE_PROGRAM": tools / "ninja",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": target.processor,
        "Python_EXECUTABLE": tools / "python",
        "MOEC_PYTHON_HEADERS": headers.folder,
        "MOEC_PYTHON_VERSION": headers.version,
        "SKBUILD_SOABI": f"cpython-{target.python.replace('.', '')}-{target.processor}-linux-gnu",
    }
    kernels, extension = folder / f"kernels-{target.processor}", folder / f"extension-{target.processor}"
    _build(kernels, "kernels", {**settings, "CMAKE_CXX_COMPILER": find_gcc(target.processor)}, tools)
    programs = extension / "programs"
    settings |= {
        "CMAKE_CXX_COMPILER": _zig(programs / "c++", "c++", "-target", f"{target.processor}-linux-gnu.{GLIBC}"),
        "CMAKE_AR": _zig(programs / "ar", "ar"),
        "MOEC_KERNEL_OBJECTS": kernels / "CMakeFiles" / "kernels.dir",
    }
    _build(extension, "_native", settings, tools)
    return extension / target.extension


def _build(folder: Path, product: str, settings: Mapping[str, str | Path], tools: Path) -> None:
    """Let CMake build one product in a folder. Raises CompileFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    _run([tools / "cmake", "-G", "Ninja", "-S", SOURCES, "-B", folder, *defined], folder / "configure.log")
    _run([tools / "cmake", "--build", folder, "--parallel", "1", "--target", product], folder / "build.log")


def find_gcc(processor: str) -> str:
    """Return the path of GCC for a processor. Raises CompileFailed."""
    names = [f"{processor}-linux-gnu-g++", *(["g++"] if platform.machine() == processor else [])]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        package = f"g++-{processor.replace('_', '-')}-linux-gnu"
        raise CompileFailed(f"{names[0]} is missing; on Debian: apt-get install {package}")
    return compiler


def _zig(path: Path, *words: str) -> Path:
    """Write a program that calls zig with these words, and then with its own. Raises CompileFailed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise CompileFailed("the package `ziglang` is missing: pip install ziglang")
    zig = Path(spec.origin).parent / "zig"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec "{zig}" {" ".join(words)} "$@"\n')
    path.chmod(0o755)
    return path


def _run(command: Sequence[str | Path], log: Path) -> None:
    """Run a command with its output in a file. Raises CompileFailed."""
    with log.open("w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise CompileFailed(f"`{Path(command[0]).name}` failed, see {log}:\n{last}")


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
