"""Choice of kernels, a missing or damaged extension, threads with concurrent calls and fork, and timing."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.errors import KernelUnavailable
from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.kernels import extension
from moec.runtime.kernels.profile import TIMED, timed_kernels
from tests.kernels.conftest import need
from tests.kernels.packer import bits, random_matrix
from tests.kernels.products import gate, inputs, matrix_of

SPEC = QuantSpec.parse("q4g64")


@gate
def test_every_available_name_can_be_forced() -> None:
    names = kernels.available()
    assert names[-1] == "numpy" and len(set(names)) == len(names)
    for name in (*names, *reversed(names)):
        kernels.select(name)
        assert kernels.active() == name


@gate
@pytest.mark.parametrize("name", ["", "avx1024", "AVX2", "x" * 500])
def test_unknown_kernels_are_refused(name: str) -> None:
    before = kernels.active()
    with pytest.raises(KernelUnavailable) as caught:
        kernels.select(name)
    assert all(known in caught.value.message for known in kernels.available())
    assert len(caught.value.message) < 200
    assert kernels.active() == before


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Reset the state of the kernels to that of a new process."""
    monkeypatch.setattr(extension, "state", extension.KernelState())
    return monkeypatch


@pytest.mark.gate("G7")
def test_without_extension_numpy_runs(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(importlib.util, "find_spec", lambda name: None)
    fresh.setattr(extension, "FOLDER", tmp_path)
    assert kernels.available() == ("numpy",) and kernels.active() == "numpy"
    packed = random_matrix(33, 128, SPEC)
    out = np.empty((1, 33), np.float32)
    kernels.linear(matrix_of(packed), np.ones((1, 128), np.float32), out)
    assert np.allclose(out[0], packed.weights.sum(axis=1), atol=1e-3)
    kernels.set_threads(2)
    with pytest.raises(KernelUnavailable, match="available: numpy"):
        kernels.select("scalar")


def test_an_extension_of_another_python_is_an_error(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_native.cpython-27-somewhere.so").touch()
    fresh.setattr(importlib.util, "find_spec", lambda name: None)
    fresh.setattr(extension, "FOLDER", tmp_path)
    with pytest.raises(KernelUnavailable, match="cpython-27"):
        kernels.active()


def test_an_extension_that_does_not_load_is_an_error(fresh: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("undefined symbol: absent")

    fresh.setattr(importlib.util, "find_spec", lambda name: object())
    fresh.setattr(importlib, "import_module", fail)
    for _ in range(2):
        with pytest.raises(KernelUnavailable, match="undefined symbol: absent"):
            kernels.active()


@pytest.mark.parametrize("count", [0, -1, 257, 10**9])
def test_thread_counts_out_of_range_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        kernels.set_threads(count)


def product(threads: int = 1, calls: int = 1) -> np.ndarray:
    matrix = matrix_of(random_matrix(512, 1024, SPEC))
    x, out = np.ones((3, 1024), np.float32), np.empty((3, 512), np.float32)
    for _ in range(calls):
        kernels.linear(matrix, x, out)
    return out


@gate
def test_calls_from_several_threads_agree() -> None:
    need("scalar")
    expected = product()
    kernels.set_threads(3)
    with ThreadPoolExecutor(4) as executor:
        for out in executor.map(lambda _: product(calls=20), range(12)):
            assert np.array_equal(bits(out), bits(expected))


@gate
def test_thread_counts_change_while_calls_run() -> None:
    need("scalar")
    expected = product()
    with ThreadPoolExecutor(2) as executor:
        running = executor.submit(product, calls=300)
        for count in (2, 4, 1, 3) * 5:
            kernels.set_threads(count)
        assert np.array_equal(bits(running.result()), bits(expected))


PRODUCT = """
import os, signal, time
import numpy as np
from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
spec = QuantSpec.parse("bf16")
matrix = kernels.PackedMatrix(np.full(spec.packed_bytes(1024, 1024), 63, np.uint8), 1024, 1024, spec)
x, out = np.ones((4, 1024), np.float32), np.empty((4, 1024), np.float32)
"""
FORK = f"""{PRODUCT}
kernels.set_threads(3)
kernels.linear(matrix, x, out)
expected = out.copy()
child = os.fork()
if child == 0:
    signal.alarm(300)
    for count in (3, 2):
        kernels.linear(matrix, x, out)
        kernels.set_threads(count)
    kernels.linear(matrix, x, out)
    os._exit(0 if (out == expected).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
kernels.linear(matrix, x, out)
assert (out == expected).all()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork on this system")
def test_a_child_process_computes_too() -> None:
    need("scalar")
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=600, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stderr == ""


IDLE = f"""{PRODUCT}
kernels.linear(matrix, x, out)
before = len(os.listdir("/proc/self/task"))
kernels.set_threads(3)
kernels.linear(matrix, x, out)
assert len(os.listdir("/proc/self/task")) == before + 2, "two threads help"
spent = []
for _ in range(5):  # on a busy machine, threads may watch in the first of them
    start = time.process_time()
    time.sleep(0.2)
    spent.append(time.process_time() - start)
print(min(spent))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted as Linux lists them")
def test_threads_without_work_sleep() -> None:
    """Idle threads watch for the next product for a fraction of a millisecond, then sleep."""
    need("scalar")
    finished = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr
    assert float(finished.stdout) < 0.01, "seconds of a processor in 0.2 s without work"


STEERS = {"active", "available", "compiled", "require", "select", "set_threads", "threads"}


def test_every_function_that_computes_is_timed() -> None:
    own = {name for name, _ in inspect.getmembers(kernels, inspect.isfunction) if not name.startswith("_")}
    here = {name for name in own if getattr(kernels, name).__module__ == kernels.__name__}
    assert here - STEERS == set(TIMED)


def test_calls_are_counted_and_the_kernels_put_back() -> None:
    matrix, x = matrix_of(random_matrix(32, 64, QuantSpec.parse("q4g32"), 0)), inputs(3, 64)
    expected, out = np.empty((3, 32), np.float32), np.empty((3, 32), np.float32)
    kernels.linear(matrix, x, expected)
    before = {name: getattr(kernels, name) for name in TIMED}
    with pytest.raises(ValueError), timed_kernels() as times:
        kernels.linear(matrix, x, out)
        kernels.linear(matrix, x=x, out=out)
        assert times.calls == {"linear": 2} and times.total_ns == times.elapsed_ns["linear"] > 0
        assert np.array_equal(out, expected)
        times.clear()
        kernels.rms_norm(x, np.ones(3, np.float32), 1e-5, x)
    assert times.calls == {"rms_norm": 1}, "a call that fails counts too"
    assert {name: getattr(kernels, name) for name in TIMED} == before
