"""Timing of kernels: it covers every kernel, leaves no change, and gives the same results."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.kernels.profile import TIMED, timed_kernels
from tests.kernels.packer import random_matrix
from tests.kernels.products import inputs, matrix_of

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
