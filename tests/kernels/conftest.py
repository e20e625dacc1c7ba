"""Selection of kernels for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moec.runtime import kernels


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


@pytest.fixture(params=["scalar", "avx2"])
def native(request: pytest.FixtureRequest) -> str:
    """Each native instruction set, selected and confirmed."""
    need(request.param)
    kernels.select(request.param)
    assert kernels.active() == request.param
    return str(request.param)


@pytest.fixture(params=["numpy", "scalar", "avx2"])
def every(request: pytest.FixtureRequest) -> str:
    """Each set of kernels, selected and confirmed."""
    if request.param != "numpy":
        need(request.param)
    kernels.select(request.param)
    assert kernels.active() == request.param
    return str(request.param)


@pytest.fixture
def pair() -> tuple[str, str]:
    """Two instruction sets that must agree bit for bit."""
    need("avx2")
    return ("scalar", "avx2")
