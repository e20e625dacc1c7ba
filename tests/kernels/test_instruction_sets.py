"""Kernels of instruction sets that this processor lacks, checked with a cross compiler and emulation (G8).

The kernels are compiled without Python, together with `instruction_sets.cpp`. That program runs the named instruction
sets on given operands, and prints a digest of each result. The digests must be those of the scalar kernels of this
processor. NEON runs under qemu-user. qemu cannot run the other sets, so `emulated_*.h` replace their instructions. The
kernels then run on any processor with AVX2:

* `emulated_avx512_lanes.h`: pairs of AVX2 registers for AVX-512.
* `emulated_vnni.h`: AVX2 instructions that make the same sums as the dot products of VNNI.
* `emulated_amx_tiles.h`: loops over memory for the tiles of AMX.
* `emulated_bfloat_lanes.h`, `emulated_bfloats.h`: loops in float64 for the products of bfloat16. They have no scalar
  kernels; `bfloat_products.cpp` runs them on given numbers, and the numpy kernels say what must come out.

The other tests of this folder compare the sets that the processor has with the scalar kernels. AMX is emulated on every
processor, because few have it.

MOEC_REQUIRE_QEMU=1 turns the skips into failures. MOEC_FULL_GATES=1 also runs the scalar kernels under qemu.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.kernels import reference
from tests.kernels.checked_programs import (
    AARCH64,
    BFLOATS,
    CHECK,
    EMULATOR,
    IS_FULL,
    ROOT,
    SOURCES,
    build,
    neon_program,
    sources,
)
from tests.kernels.packer import bits, pack_16_bit
from tests.kernels.products import gate

AVX2 = ("-mavx2", "-mfma", "-mf16c")


def scalar_object() -> Path | None:
    """Return the scalar kernels as the extension was built with them, or None if a source has changed since."""
    newest = max(path.stat().st_mtime for path in SOURCES.rglob("*") if path.suffix in (".cpp", ".h", ".txt"))
    built = ROOT.glob("build/*/CMakeFiles/operations.dir/targets/kernels_scalar.cpp.o")
    return next((path for path in built if path.stat().st_mtime > newest), None)


def results(command: Sequence[str | Path]) -> dict[str, list[str]]:
    """Run the check. Returns what it computed with each instruction set: lines of a name and a digest."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, result = line.partition("\t")
        found.setdefault(name, []).append(result)
    return found


def assert_equal(found: dict[str, list[str]], expected: list[str]) -> None:
    """Fail with the first result of a set that is not the expected one."""
    for name, lines in found.items():
        different = [f"{line}, expected {other}" for line, other in zip(lines, expected, strict=True) if line != other]
        assert not different, f"{name} differs in {len(different)} of {len(expected)} results: {different[0]}"


def need_tool(*names: str) -> None:
    """Skip the test if a program is missing; fail if MOEC_REQUIRE_QEMU is 1."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing and os.environ.get("MOEC_REQUIRE_QEMU") == "1":
        pytest.fail(f"{missing[0]} is missing: apt-get install g++-aarch64-linux-gnu qemu-user")
    if missing:
        pytest.skip(f"no {missing[0]} here: apt-get install g++-aarch64-linux-gnu qemu-user")


@pytest.fixture(scope="module")
def here() -> tuple[Path, list[str]]:
    """A program for this processor with the scalar kernels, and with those it lacks, emulated; and their names."""
    need_tool("g++")
    names = ("amx", "avx512vnni", "avxvnni") if "avx2" in kernels.available() else ()
    sets = [name for name in names if name == "amx" or name not in kernels.available()]
    files: dict[str, Sequence[str]] = {}
    built = scalar_object()
    if built is None:
        files["kernels_scalar.cpp"] = ("-Og",)  # slow kernels take less time than optimizing them would
    others = ("avx2", "avxvnni", "avx512vnni", "amx", "neon", "neon_dot", "neon_i8mm", "avx512bf16", "amx_bf16")
    files |= dict.fromkeys(sources(*others), ())
    files |= dict.fromkeys(sources(*sets), (*AVX2, "-DMOEC_EMULATE_VNNI", f"-I{CHECK.parent}"))
    is_stand_in = "amx" in sets and "avx512vnni" not in sets
    if is_stand_in:
        del files["kernels_avx512vnni.cpp"]
    program = build("here", "g++", files, [built] if built else [], without=["avx512vnni"] if is_stand_in else [])
    return program, sets


@pytest.fixture(scope="module")
def expected(here: tuple[Path, list[str]]) -> list[str]:
    """Results of the scalar kernels."""
    return results([here[0], "scalar"])["scalar"]


@gate
def test_neon_equals_scalar(expected: list[str]) -> None:
    need_tool(AARCH64, EMULATOR)
    program = neon_program()
    sets = ["neon-dot", "neon-i8mm", *(["scalar"] if IS_FULL else [])]
    found = results([EMULATOR, "-cpu", "max", program, *sets])
    assert list(found) == sets
    assert_equal(found, expected)
    # A Neoverse N1 has no matrix products. A Cortex-A72 (Raspberry Pi 4) has no dot product either. Detection must say
    # so.
    found = results([EMULATOR, "-cpu", "cortex-a72", program, "neon"])
    assert list(found) == ["neon"]
    assert_equal(found, expected)
    for processor, lacks in (("cortex-a72", "neon-dot"), ("neoverse-n1", "neon-i8mm")):
        without = subprocess.run([EMULATOR, "-cpu", processor, program, lacks], capture_output=True, check=False)
        assert (without.returncode, without.stdout) == (2, f"{lacks} does not run here\n".encode())


@gate
def test_vnni_equals_scalar(here: tuple[Path, list[str]], expected: list[str]) -> None:
    program, sets = here
    if not sets:
        pytest.skip("no AVX2 here")
    found = results([program, *sets])
    assert list(found) == sets
    assert_equal(found, expected)


def drawn(draw: np.random.Generator, rows: int, columns: int, is_wild: bool) -> np.ndarray:
    """Return floats around zero; wild: of any bits, so infinite, NaN and subnormal ones are among them."""
    if is_wild:
        return draw.integers(0, 2**32, (rows, columns), np.uint32).view(np.float32)
    return draw.standard_normal((rows, columns)).astype(np.float32)


@gate
def test_products_of_bfloat16_equal_their_specification() -> None:
    need_tool("g++")
    if "avx2" not in kernels.available():
        pytest.skip("no AVX2 here")
    emulated = ("-DMOEC_EMULATE_VNNI", f"-I{CHECK.parent}")
    files = {"kernels_avx512bf16.cpp": emulated, "kernels_amx_bf16.cpp": emulated}
    program, spec = build("bfloats", "g++", files, check=BFLOATS), QuantSpec.parse("bf16")
    draw = np.random.default_rng(4)
    for rows, columns, tokens in ((1, 1, 1), (17, 33, 2), (48, 64, 16), (33, 95, 17), (16, 290, 96), (40, 31, 50)):
        for is_wild in (False, True):
            weights, x = (drawn(draw, count, columns, is_wild) for count in (rows, tokens))
            weights = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
            given = pack_16_bit(weights, spec).tobytes() + x.tobytes()
            for order in ("avx512bf16", "amx-bf16"):
                words = [program, order, str(rows), str(columns), str(tokens)]
                told = subprocess.run(words, input=given, capture_output=True, check=True).stdout
                found = np.frombuffer(told, np.float32).reshape(tokens, rows)
                expected = reference.bfloat_product(weights, x, order)
                same = (bits(found) == bits(expected)) | (np.isnan(found) & np.isnan(expected))
                assert same.all(), f"{order}, {rows} x {columns}, {tokens} tokens, wild {is_wild}"


def test_lines_are_asked_for_ahead() -> None:
    """Count prefetches in the machine code: a compiler may drop a function that only prefetches."""
    need_tool("objdump")
    extension = kernels.loaded()
    if extension is None or extension.__file__ is None:
        pytest.skip("the kernel extension is not built")
    listing = subprocess.run(["objdump", "-d", extension.__file__], capture_output=True, text=True, check=True).stdout
    instruction = "prfm" if platform.machine() == "aarch64" else "prefetcht1"
    sets = set(kernels.available()) - {"scalar", "numpy"}
    assert ("amx" in sets) <= ("tdpbssd" in listing and "tdpbsud" in listing)  # sums are equal without tiles, too
    # About seventy per set: one per line of a tile in every format, twenty in attention, one loop for panels.
    assert sum(instruction in line for line in listing.splitlines()) >= 60 * len(sets)
