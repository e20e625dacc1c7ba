"""Instruction sets that this processor lacks, through the compiler and an emulator (G8).

The kernels are compiled without Python together with `instruction_sets.cpp`, which compares the instruction sets it is
told with the scalar kernels bit for bit. NEON runs under qemu-user; AVX-512, the dot products of VNNI and the tiles of
AMX, which qemu does not know, are replaced by pairs of AVX2 registers, by the instructions that make the same sums and
by loops over memory, so that what the kernels do with sixteen lanes and with tiles is checked on any processor.
MOEC_REQUIRE_QEMU=1 turns the skips into failures.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moec.runtime import kernels

SOURCES = Path(__file__).parents[2] / "runtime" / "kernels" / "native"
CHECK = Path(__file__).with_name("instruction_sets.cpp")
COMMON = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-math-errno", "-DMOEC_COMPACT", "-Wall", "-Wextra", "-Werror")
AARCH64, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
AVX2 = ("-mavx2", "-mfma", "-mf16c")

gate = pytest.mark.gate("G8")


def build(compiler: str, folder: Path, files: dict[str, Sequence[str]], link: Sequence[str] = ()) -> Path:
    """Compile files with options of their own, two at a time, and link them with the check."""
    listed = {CHECK.name: (), "detect.cpp": (), "registry.cpp": (), "kernels_scalar.cpp": (), **files}

    def compile_one(item: tuple[str, Sequence[str]]) -> str:
        name, options = item
        source = CHECK if name == CHECK.name else SOURCES / "targets" / name
        target = folder / f"{source.stem}.o"
        subprocess.run([compiler, *COMMON, *options, f"-I{SOURCES}", "-c", source, "-o", target], check=True)
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, listed.items()))
    program = folder / "check"
    subprocess.run([compiler, *link, *objects, "-o", program], check=True)
    return program


def equal_sets(command: Sequence[str | Path]) -> set[str]:
    """The instruction sets that a check found equal to scalar."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return {line.partition(":")[0] for line in done.stdout.splitlines() if line.endswith("equal to scalar")}


def need_tool(*names: str) -> None:
    """Skip, or fail where MOEC_REQUIRE_QEMU says so, if a program is missing."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing and os.environ.get("MOEC_REQUIRE_QEMU") == "1":
        pytest.fail(f"{missing[0]} is missing: apt-get install g++-aarch64-linux-gnu qemu-user")
    if missing:
        pytest.skip(f"no {missing[0]} here: apt-get install g++-aarch64-linux-gnu qemu-user")


@gate
def test_neon_equals_scalar(tmp_path: Path) -> None:
    need_tool(AARCH64, EMULATOR)
    files = {"kernels_neon.cpp": (), "kernels_neon_dot.cpp": ("-march=armv8.2-a+dotprod",)}
    files["kernels_neon_i8mm.cpp"] = ("-march=armv8.2-a+dotprod+i8mm",)
    nothing = {"kernels_avx2.cpp": (), "kernels_avxvnni.cpp": (), "kernels_avx512vnni.cpp": ()}
    nothing["kernels_amx.cpp"] = ()
    program = build(AARCH64, tmp_path, {**files, **nothing}, ["-static"])
    assert equal_sets([EMULATOR, "-cpu", "max", program, "neon-dot", "neon-i8mm"]) == {"neon-dot", "neon-i8mm"}
    # A Neoverse N1 multiplies no matrices, a Cortex-A72, the processor of a Raspberry Pi 4, has no dot product either:
    # detection must say so.
    assert equal_sets([EMULATOR, "-cpu", "cortex-a72", program, "neon"]) == {"neon"}
    for processor, lacks in (("cortex-a72", "neon-dot"), ("neoverse-n1", "neon-i8mm")):
        without = subprocess.run([EMULATOR, "-cpu", processor, program, lacks], capture_output=True, check=False)
        assert (without.returncode, without.stdout) == (2, f"{lacks} does not run here\n".encode())


@gate
def test_vnni_equals_scalar(tmp_path: Path) -> None:
    need_tool("g++")
    if "avx2" not in kernels.available():
        pytest.skip("no AVX2 here")
    # Without an emulator slower scalar kernels cost less than their compiler takes to make them fast.
    files = {"kernels_scalar.cpp": ("-Og",), "kernels_avx2.cpp": AVX2}
    emulated = (*AVX2, "-DMOEC_EMULATE_VNNI", f"-I{CHECK.parent}")
    files |= {"kernels_avxvnni.cpp": emulated, "kernels_avx512vnni.cpp": emulated, "kernels_amx.cpp": emulated}
    program = build(
        "g++", tmp_path, {**files, "kernels_neon.cpp": (), "kernels_neon_dot.cpp": (), "kernels_neon_i8mm.cpp": ()}
    )
    every = ["amx", "avx512vnni", "avxvnni", "avx2"]
    assert equal_sets([program, *every]) == set(every)


def test_lines_are_asked_for_ahead() -> None:
    """In the machine code: a compiler may take what only prefetches for nothing, and drop it."""
    need_tool("objdump")
    extension = importlib.util.find_spec("moec.runtime.kernels._native")
    if extension is None or extension.origin is None:
        pytest.skip("the kernel extension is not built")
    listing = subprocess.run(["objdump", "-d", extension.origin], capture_output=True, text=True, check=True).stdout
    instruction = "prfm" if platform.machine() == "aarch64" else "prefetcht1"
    sets = set(kernels.available()) - {"scalar", "numpy"}
    assert ("amx" in sets) <= ("tdpbssd" in listing and "tdpbsud" in listing)  # equal sums could come without tiles
    # Some seventy in each set: one for every line of a tile in every format, twenty in attention, one loop for panels.
    assert sum(instruction in line for line in listing.splitlines()) >= 60 * len(sets)
