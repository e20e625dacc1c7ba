"""Fixtures that select kernels for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moec.runtime import kernels

NATIVE = [name for name in reversed(kernels.available()) if name != "numpy"]  # scalar first: it is the specification
VECTORS = NATIVE[1:] or ["avx2"]  # none: one skipped test says so


def need(name: str) -> None:
    """Skip the test, with the reason, if these kernels cannot run."""
    names = kernels.available()
    if "scalar" not in names:
        pytest.skip("the kernel extension is not built")
    if name not in names:
        pytest.skip(f"this processor has no {name}")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    kernels.select(kernels.available()[0])
    kernels.set_threads(1)


@pytest.fixture(params=NATIVE or ["scalar"])
def native(request: pytest.FixtureRequest) -> str:
    """Select each native instruction set in turn, and return its name."""
    need(request.param)
    kernels.select(request.param)
    assert kernels.active() == request.param
    return str(request.param)


@pytest.fixture(params=["numpy", *(NATIVE or ["scalar"])])
def every(request: pytest.FixtureRequest) -> str:
    """Select each set of kernels in turn, numpy included, and return its name."""
    if request.param != "numpy":
        need(request.param)
    kernels.select(request.param)
    assert kernels.active() == request.param
    return str(request.param)


@pytest.fixture(params=VECTORS)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Return two instruction sets that must agree bit for bit: scalar, and each other one in turn."""
    need(request.param)
    return ("scalar", str(request.param))
