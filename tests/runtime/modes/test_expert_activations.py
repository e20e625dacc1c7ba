"""Activations of experts in bfloat16: opt-in, LOSSY, the same bits for any batch, refused where they mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import OptionError
from moec.runtime import RuntimeOptions, kernels, load
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

TOKENS = np.random.default_rng(8).integers(3, 250, 40).tolist()
ON = {"lossy": "expert-activations bfloat16"}
UNIT = 2.0**-8


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """16-bit experts; experts in many formats, one of them bfloat16; 8-bit experts."""
    root = tmp_path_factory.mktemp("activations")
    model = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, seed=3))
    return (
        emit_bundle(model, root / "wide"),
        emit_bundle(model, root / "mixed", mixed=True),
        emit_bundle(model, root / "quantized", bitwidth=8),
    )


@pytest.fixture
def has_products() -> None:
    if not kernels.bfloat_kernels():
        pytest.skip(f"the kernels {kernels.active()} have no products of bfloat16")


def test_logits_differ_by_the_rounding_of_activations(bundles: tuple[Path, ...], has_products: None) -> None:
    few = TOKENS[:2]  # so few that none is close to the choice of another expert
    for path in bundles[:2]:
        with load(path, context=64) as floats, load(path, context=64, **ON) as rounded:
            expected, found = floats.logits(few), rounded.logits(few)
            assert 0 < np.abs(found - expected).max() < 4 * UNIT * np.abs(expected).max()
            assert "exact" in floats.mode and "LOSSY (expert-activations bfloat16)" in rounded.mode


@pytest.mark.parametrize("options", [{}, {"expert_cache": "60%", "io": "buffered"}, {"threads": 1, "prefetch": "off"}])
def test_a_pass_computes_what_its_tokens_compute_one_by_one(
    bundles: tuple[Path, ...], has_products: None, options: dict[str, Any]
) -> None:
    for path in bundles[:2]:
        with load(path, context=64, **ON) as engine:
            together = engine.logits(TOKENS)
        with load(path, context=64, **ON, **options) as engine:
            engine.begin_texts([0], [TOKENS])
            alone = [engine.decode([token], [0], [position]) for position, token in enumerate(TOKENS)]
            logits = np.concatenate([np.asarray(row).reshape(1, -1) for row in alone])
            assert np.array_equal(logits.view(np.uint32), together.view(np.uint32))
            assert "layers in one call" in engine.mode


def test_it_goes_together_with_modes_that_decide(bundles: tuple[Path, ...], has_products: None) -> None:
    with load(bundles[0], context=64, lossy=f"big-little gamma=0.5,k=1 + {ON['lossy']}") as engine:
        engine.logits(TOKENS)
        assert "LOSSY (big-little gamma=0.5,k=1 + expert-activations bfloat16)" in engine.mode


def test_it_is_refused_where_it_would_change_nothing(bundles: tuple[Path, ...]) -> None:
    with pytest.raises(OptionError, match="no expert of the bundle has bfloat16 weights"):
        load(bundles[2], **ON)


@pytest.mark.parametrize("name", ["numpy", "scalar"])
def test_it_is_refused_by_kernels_that_lack_it(bundles: tuple[Path, ...], name: str) -> None:
    if name not in kernels.available():
        pytest.skip("the kernel extension is not built")
    before = kernels.active()
    kernels.select(name)
    try:
        with pytest.raises(OptionError, match=f"the kernels `{name}` have no products of bfloat16"):
            load(bundles[0], **ON)
    finally:
        kernels.select(before)


def test_options_that_do_not_fit_are_refused(bundles: tuple[Path, ...]) -> None:
    with pytest.raises(OptionError, match="an accelerator reads the activations of experts as float32"):
        load(bundles[0], accelerator="torch-cpu", accelerator_memory="1MiB", **ON)
    with pytest.raises(OptionError, match="is not a type"):
        RuntimeOptions(lossy="expert-activations float16")


def test_it_is_off_by_default_and_in_exact_options() -> None:
    assert RuntimeOptions().modes.is_exact
    on = RuntimeOptions(lossy=ON["lossy"])
    assert not on.modes.is_exact and not on.modes.decides and on.modes.to_text() == "expert-activations bfloat16"
    assert on.exact() == RuntimeOptions()
