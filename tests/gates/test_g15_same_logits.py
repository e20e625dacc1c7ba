"""G15: a device computes what was certified: the self-test has the digest of the compile with every instruction set.

Sets that the processor lacks are emulated: AMX, AVX-512 and AVX-VNNI by instructions of AVX2, in an extension of their
own (MOEC_FULL_GATES=1); NEON by qemu, on the wheel (test_g15_wheels.py). Bundles of other families are in
tests/cli/test_self_test.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from moec.runtime import kernels, load
from moec.runtime.engine.self_test import run_self_test, self_test_of

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "examples" / "bundle"
EMULATED = ("amx", "avx512vnni", "avxvnni")
SETTINGS: tuple[dict[str, object], ...] = ({}, {"expert_cache": "512KiB", "threads": 1}, {"prefetch": "off"})
ALL_KERNELS = """
import importlib.util, json, sys
from moec.runtime import kernels, load
from moec.runtime.engine.self_test import run_self_test, self_test_of
from moec.runtime.kernels import extension
bundle, library = sys.argv[1:]
spec = importlib.util.spec_from_file_location("_native", library)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
extension.state.extension, extension.state.is_loaded = module, True
passed = []
for name in kernels.available()[:-1]:
    kernels.select(name)
    with load(bundle) as engine:
        run_self_test(engine, self_test_of(engine.bundle))
    passed.append(kernels.active())
print(json.dumps(passed))
"""
PLAIN_NUMPY = """
import json, sys
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from moec.runtime import load
from moec.runtime.engine.self_test import run_self_test, self_test_of
with load(sys.argv[1]) as engine:
    run_self_test(engine, self_test_of(engine.bundle))
print(json.dumps([name for name in __cpu_dispatch__ if __cpu_features__[name]]))
"""

pytestmark = [
    pytest.mark.gate("G15"),
    pytest.mark.skipif(kernels.loaded() is None, reason="NOT RUN: the extension is not built"),
]


@pytest.fixture(autouse=True)
def best_kernels() -> Iterator[None]:
    yield
    kernels.select(kernels.available()[0])


@pytest.mark.parametrize("name", kernels.available()[:-1])
def test_every_instruction_set_computes_the_shipped_bundle(name: str) -> None:
    kernels.select(name)
    with load(BUNDLE) as engine:
        assert kernels.active() == name
        run_self_test(engine, self_test_of(engine.bundle))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_memory_threads_and_prefetch_change_nothing(settings: dict[str, object]) -> None:
    with load(BUNDLE, **settings) as engine:
        run_self_test(engine, self_test_of(engine.bundle))


def test_the_instruction_sets_of_numpy_change_nothing() -> None:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    here = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    if not here:
        pytest.skip("NOT RUN: numpy has no other instruction sets here")
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(here)}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_NUMPY, str(BUNDLE)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def emulating_extension(folder: Path) -> Path:
    """Compile the extension with the sets of EMULATED replaced by instructions of AVX2. Returns its path."""
    scripts = Path(sysconfig.get_path("scripts"))
    emulation = f"-DMOEC_EMULATE_VNNI -DMOEC_COMPACT -I{ROOT / 'tests' / 'kernels'}"
    configure: Sequence[str | Path] = [
        *(scripts / "cmake", "-G", "Ninja", "-S", ROOT / "runtime" / "kernels" / "native", "-B", folder),
        *(f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", f"-DPython_EXECUTABLE={sys.executable}"),
        f"-DCMAKE_CXX_FLAGS={emulation}",
    ]
    for command in (configure, [scripts / "cmake", "--build", folder, "--parallel", "1"]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    (library,) = folder.glob("_native*.so")
    return library


@pytest.mark.skipif(os.environ.get("MOEC_FULL_GATES") != "1", reason="compiles all kernels: MOEC_FULL_GATES=1")
def test_emulated_instruction_sets_compute_the_shipped_bundle(tmp_path: Path) -> None:
    if "avx512vnni" not in kernels.available():  # the options of the compiler let it use more than the emulation does
        pytest.skip("NOT RUN: emulated kernels, because this processor has no AVX-512")
    library = emulating_extension(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ALL_KERNELS, str(BUNDLE), str(library)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(EMULATED) <= set(json.loads(done.stdout))
