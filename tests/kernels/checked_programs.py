"""Programs that check the kernels of instruction sets without Python: `instruction_sets.cpp` with compiled kernels.

The newest of each name is kept in `build/instruction-sets`, in a folder with a digest of its sources and options.
`.ci/run` compiles the one for NEON while packages are fetched, with the Python of the system:

    python3 -m tests.kernels.checked_programs
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "runtime" / "kernels" / "native"
KEPT = ROOT / "build" / "instruction-sets"
CHECK = Path(__file__).with_name("instruction_sets.cpp")
BFLOATS = Path(__file__).with_name("bfloat_products.cpp")
STAND_INS = {name: CHECK.with_name(f"no_{name}.cpp") for name in ("avx512vnni", "scalar")}
COMMON = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-DMOEC_COMPACT", "-Wall", "-Wextra", "-Werror")
AARCH64, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
IS_FULL = os.environ.get("MOEC_FULL_GATES") == "1"


def sources(*names: str) -> list[str]:
    """Return the files of instruction sets."""
    return [f"kernels_{name}.cpp" for name in names]


def _compile(compiler: str, folder: Path, paths: Mapping[Path, Sequence[str]], link: Sequence[str | Path]) -> None:
    """Compile each file with its own options, two at a time, and link them to the program `check`."""

    def compile_one(item: tuple[Path, Sequence[str]]) -> str:
        source, options = item
        target = folder / f"{source.stem}.o"
        subprocess.run([compiler, *COMMON, *options, f"-I{SOURCES}", "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, paths.items()))
    subprocess.run([compiler, *link, *objects, "-o", folder / "check"], check=True)


def _digest(compiler: str, paths: Mapping[Path, Sequence[str]], link: Sequence[str | Path]) -> str:
    """Return a digest of everything that a program is made of."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    told = [version, *COMMON, *(f"{path} {options}" for path, options in paths.items()), *map(str, link)]
    read = {path for folder in (SOURCES, CHECK.parent) for path in folder.rglob("*") if path.suffix in (".cpp", ".h")}
    read |= {Path(item) for item in link if Path(item).is_file()}
    found = hashlib.sha256("\n".join(told).encode())
    for path in sorted(read):
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def build(
    name: str,
    compiler: str,
    files: Mapping[str, Sequence[str]],
    link: Sequence[str | Path] = (),
    check: Path = CHECK,
    without: Collection[str] = (),
) -> Path:
    """Return the program with these kernels, and compile it unless it is kept from before.

    name: programs of the same name replace each other.
    files: options of each file of kernels.
    link: options and objects of the linker.
    without: instruction sets whose place a stand-in takes.
    """
    common = ("detect.cpp", "choose_kernels.cpp") if check == CHECK else ("detect.cpp",)
    paths = {SOURCES / "targets" / name: options for name, options in (dict.fromkeys(common, ()) | dict(files)).items()}
    paths |= {check: (), **{STAND_INS[name]: () for name in without}}
    kept = KEPT / f"{name}-{_digest(compiler, paths, link)}"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=KEPT))
        try:
            _compile(compiler, made, paths, link)
            made.rename(kept)
        except OSError:  # another process was faster
            if not kept.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
        for other in KEPT.glob(f"{name}-*"):
            if other != kept:
                shutil.rmtree(other, ignore_errors=True)
    return kept / "check"


def neon_program() -> Path:
    """Return the program with the three sets of NEON; with full counts, with the scalar kernels, too."""
    nothing = sources("avx2", "avxvnni", "avx512vnni", "amx", "avx512bf16", "amx_bf16")
    files: dict[str, Sequence[str]] = dict.fromkeys((*sources("neon"), *nothing), ())
    files["kernels_neon_dot.cpp"] = ("-march=armv8.2-a+dotprod",)
    files["kernels_neon_i8mm.cpp"] = ("-march=armv8.2-a+dotprod+i8mm",)
    if IS_FULL:
        files["kernels_scalar.cpp"] = ()
    return build("neon", AARCH64, files, ["-static"], without=[] if IS_FULL else ["scalar"])


if __name__ == "__main__":
    print(neon_program())
