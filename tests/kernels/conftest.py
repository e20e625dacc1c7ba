"""Selection of kernels for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moec.runtime import kernels

NATIVE = [name for name in reversed(kernels.available()) if name != "numpy"]  # scalar, their specification, first
VECTORS = NATIVE[1:] or ["avx2"]  # without any: one test that says so


def need(name: str) -> None:
    """Skip, with the reason, where these kernels cannot run."""
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
    """Each native instruction set, selected and confirmed."""
    need(request.param)
    kernels.select(request.param)
    assert kernels.active() == request.param
    return str(request.param)


@pytest.fixture(params=["numpy", *(NATIVE or ["scalar"])])
def every(request: pytest.FixtureRequest) -> str:
    """Each set of kernels, selected and confirmed."""
    if request.param != "numpy":
        need(request.param)
    kernels.select(request.param)
    assert kernels.active() == request.param
    return str(request.param)


@pytest.fixture(params=VECTORS)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Two instruction sets that must agree bit for bit."""
    need(request.param)
    return ("scalar", str(request.param))
