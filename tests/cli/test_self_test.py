"""`moec verify --self-test`: equal logits with all kernels, and a bundle that computes others is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from moec.manifests.codec import canonical_json
from moec.manifests.self_test import SELF_TEST_NAME
from moec.runtime import kernels
from moec.runtime.engine.self_test import ARITHMETIC
from tests.cli.conftest import Invoke
from tests.listed_file import add_listed
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_switch import save_tiny_switch

pytestmark = [
    pytest.mark.gate("G1"),
    pytest.mark.gate("G15"),
    pytest.mark.skipif(kernels.loaded() is None, reason="NOT RUN: the extension is not built"),
]


@pytest.fixture(scope="module", params=["qwen2", "deepseek-v3", "switch"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that the command line compiled, with 4-bit experts."""
    from click.testing import CliRunner

    from moec.cli.main import cli

    root = tmp_path_factory.mktemp("self-test")
    name = request.param
    folder = root / "model"
    model = save_tiny_switch(folder) if name == "switch" else save_tiny_family(folder, TINY_FAMILIES[name])
    result = CliRunner().invoke(
        cli, ["compile", str(model), "--uniform", "4", "--group-size", "32", "-o", str(root / "out")]
    )
    assert result.exit_code == 0, result.output
    return root / "out"


@pytest.fixture(autouse=True)
def best_kernels() -> Iterator[None]:
    yield
    kernels.select(kernels.available()[0])


def test_all_kernels_compute_the_logits_of_the_compile(invoke: Invoke, compiled: Path) -> None:
    for name in kernels.available()[:-1]:
        result = invoke("verify", compiled, "--self-test", "--kernels", name)
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines()[-1].endswith(f"are those of the compile, with the kernels {name}")
    told = json.loads(invoke("verify", compiled, "--self-test", "--memory", "4GB", "--json").stdout)
    assert told["self_test"]["texts"] == 3 and told["self_test"]["tokens"] > 100


def test_the_numpy_kernels_make_no_promise(invoke: Invoke, compiled: Path) -> None:
    result = invoke("verify", compiled, "--self-test", "--kernels", "numpy")
    assert result.exit_code == 1 and "the self-test needs the extension" in result.stderr


def with_self_test(compiled: Path, folder: Path, **changes: object) -> Path:
    """Copy a bundle and change its self-test, its own digest in the manifest included."""
    plain = json.loads((compiled / SELF_TEST_NAME).read_bytes())
    return add_listed(Path(shutil.copytree(compiled, folder)), SELF_TEST_NAME, canonical_json({**plain, **changes}))


def test_other_logits_are_refused(invoke: Invoke, compiled: Path, tmp_path: Path) -> None:
    """Every digest of a file holds; the digest of the logits is of another bundle."""
    folder = with_self_test(compiled, tmp_path / "other", logits_sha256="0" * 64)
    assert invoke("verify", folder).exit_code == 0
    result = invoke("verify", folder, "--self-test")
    assert result.exit_code == 3 and "the logits of the self-test have the digest" in result.stderr


def test_another_arithmetic_is_not_compared(invoke: Invoke, compiled: Path, tmp_path: Path) -> None:
    folder = with_self_test(compiled, tmp_path / "later", arithmetic=ARITHMETIC + 1)
    result = invoke("verify", folder, "--self-test")
    assert result.exit_code == 1 and f"the self-test is for arithmetic {ARITHMETIC + 1}" in result.stderr
    assert "is whole" in result.stdout, "the bytes are right"


def test_a_bundle_without_a_self_test_says_so(invoke: Invoke, bundle: Path) -> None:
    result = invoke("verify", bundle, "--self-test")
    assert result.exit_code == 1 and f"has no `{SELF_TEST_NAME}`" in result.stderr


def test_options_of_the_self_test_alone_are_refused(invoke: Invoke, bundle: Path) -> None:
    result = invoke("verify", bundle, "--kernels", "scalar")
    assert result.exit_code == 1 and "belong to `--self-test`" in result.stderr
