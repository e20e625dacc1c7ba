"""Every command on bundles of three families: plain layers, shared experts, layer norms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.tiny_compile import compile_tiny, save_texts
from tests.tiny_families import TINY_FAMILIES, save_tiny_family

from .conftest import InvokeIn


@pytest.fixture(scope="module", params=["deepseek", "deepseek-v3", "qwen2-plain-between", "gpt-oss", "phimoe"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    if request.param in OWN_FAMILIES:
        folder = save_own_family(root / "model", OWN_FAMILIES[request.param])
    else:
        folder = save_tiny_family(root / "model", TINY_FAMILIES[request.param])
    texts = save_texts(root / "texts", test=8)
    compile_tiny(
        folder, root / "bundle", "bits_per_weight", 4.5, data=str(texts), tasks=("perplexity",), bits=(3, 4, 16)
    )
    return root


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--prompt", "a lamp", "--max-new-tokens", 4, "--expert-cache", "50%"),
        ("inspect",), ("inspect", "--json"), ("verify",),
        ("bench", "--expert-cache", "50%", "--tokens", 4), ("bench", "--expert-cache", "50%", "--tokens", 4, "--json"),
        ("eval", "--task", "perplexity", "--data", "texts"),
        ("compile", "--data", "texts", "--bits-per-weight", 4.5, "--bits", "3,4,16", "--group-size", "32",
         "--dense-bits", 8, "--no-comparisons", "--plan-only"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)  # fmt: skip
def test_commands(invoke_in: InvokeIn, made: Path, arguments: tuple[object, ...]) -> None:
    result = invoke_in(made, arguments)
    is_told = arguments[0] in ("inspect", "compile") and "--json" not in arguments
    if is_told and not made.name.startswith(("gpt-oss", "phimoe")):
        assert "layer 0  no routed experts" in result.stdout.replace("layer   0", "layer 0")
