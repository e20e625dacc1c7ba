"""Compile the extension for one wheel, with two compilers.

Clang of the package `ziglang` compiles and links. The package brings the C library of each processor, and links against
the symbols that glibc 2.28 has. Its C++ library becomes part of the extension, so a wheel needs nothing but glibc.

GCC compiles the vector kernels. Their objects call nothing but memcpy and memset, so clang's linker takes them. With
AVX2 they are a quarter faster for prompts than clang's (docs/experiments/2026-11.md, 26: Compilers of the wheels).
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
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
