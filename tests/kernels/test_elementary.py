"""Elementary functions: close to the exact values, and the same bits on every processor."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime import kernels
from moec.runtime.kernels.elementary import exp, natural_log, power, sigmoid, sine_cosine, softmax

PARITY = """
import hashlib, sys
import numpy as np
from moec.runtime import load
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.modes.decoder import confidence
from moec.runtime.text.sampling import Sampler, SamplingOptions

seen = hashlib.sha256()
for path in sys.argv[1:]:
    with load(path, slots=2, context=100) as engine:
        logits = engine.logits(range(5, 95), prompt=range(3, 40))
        seen.update(logits.tobytes() + confidence(logits).tobytes())
        for beam in beam_search(engine, [7, 9, 11], 4, BeamOptions(2)):
            seen.update(np.array([*beam.tokens, beam.score]).tobytes())
        order, weights = Sampler(SamplingOptions(temperature=0.8, top_p=0.9)).distribution(logits[-1])
        seen.update(order.tobytes() + weights.tobytes())
print(seen.hexdigest())
"""
"""Prints a digest of all that numpy computes with functions that are no basic arithmetic."""


@given(st.floats(1e-300, 1e300))
def test_logarithms(x: float) -> None:
    assert float(natural_log(x)) == pytest.approx(math.log(x), rel=4e-16, abs=4e-16)


@given(st.floats(1.0, 1e7), st.floats(0.0, 1.0))
def test_powers(base: float, exponent: float) -> None:
    assert float(power(base, np.float64(exponent))) == pytest.approx(base**exponent, rel=1e-14)


@given(st.lists(st.floats(-(2.0**29), 2.0**29, width=32), min_size=1, max_size=50))
def test_sines_and_cosines(angles: list[float]) -> None:
    sine, cosine = sine_cosine(np.array(angles, np.float32))
    assert sine.dtype == cosine.dtype == np.float32
    for at, angle in enumerate(angles):
        assert abs(float(sine[at]) - math.sin(angle)) <= 2.0**-25 * (1 + 1e-6)
        assert abs(float(cosine[at]) - math.cos(angle)) <= 2.0**-25 * (1 + 1e-6)


def test_angles_of_any_number_and_shape() -> None:
    angles = np.linspace(0, 1000, 40_000, dtype=np.float32).reshape(20, 2000)
    sine, _ = sine_cosine(angles)
    assert np.array_equal(sine.reshape(-1)[::7], sine_cosine(angles.reshape(-1)[::7])[0])
    assert sine_cosine(np.empty((0, 4), np.float32))[0].shape == (0, 4)


def test_the_kernels_and_numpy_agree() -> None:
    x = np.random.default_rng(0).uniform(-60, 60, (7, 33)).astype(np.float32)
    assert np.allclose(exp(x), np.exp(x), rtol=3e-7, atol=0)
    assert np.allclose(sigmoid(x), 1 / (1 + np.exp(-x.astype(np.float64))), rtol=1e-6)
    assert np.allclose(softmax(x).sum(axis=1), 1, rtol=1e-6)
    assert exp(np.array([-np.inf, 0], np.float32)).tolist() == [0, 1]


def test_tables_have_one_result() -> None:
    """These digests hold on every processor."""
    angles = np.arange(5000, dtype=np.float32)[:, None] * np.linspace(1e-4, 1, 16, dtype=np.float32)
    found = [*sine_cosine(angles), power(10_000.0, np.linspace(0, 1, 64)), natural_log(np.linspace(0.01, 900, 4096))]
    digests = [hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest()[:16] for each in found]
    assert digests == ["8700b2412904b235", "41ff95fdc87d37b0", "6c47d9a6f83831bb", "7b296c97d9e98358"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Routers with a softmax, sigmoids in groups, SparseMixer; a weighed shared expert; relative positions."""
    pytest.importorskip("torch", reason="NOT RUN: no bundle can be compiled without torch, as next to a wheel")
    from tests.gates.bundles import emit_bundle
    from tests.tiny_families import TINY_FAMILIES, save_tiny_family
    from tests.tiny_switch import save_tiny_switch

    root = tmp_path_factory.mktemp("elementary")
    folders = {name: save_tiny_family(root / name, TINY_FAMILIES[name]) for name in ("qwen2", "deepseek-v3", "phimoe")}
    folders["switch"] = save_tiny_switch(root / "switch")
    return [emit_bundle(folder, root / f"{name}-moec", bitwidth=4) for name, folder in folders.items()]


def digest(bundles: list[Path], **environment: str) -> str:
    command = [sys.executable, "-c", PARITY, *map(str, bundles)]
    found = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return found.stdout


@pytest.mark.gate("G1")
@pytest.mark.skipif(kernels.loaded() is None, reason="NOT RUN: the extension is not built")
def test_no_logit_depends_on_the_instruction_sets_that_numpy_uses(bundles: list[Path]) -> None:
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    here = [name for name in __cpu_dispatch__ if __cpu_features__.get(name)]
    if not here:
        pytest.skip("NOT RUN: numpy has no other instruction sets here")
    assert digest(bundles, NPY_DISABLE_CPU_FEATURES=" ".join(here)) == digest(bundles)
