"""The `mode:` line says which cache and which layer path a run takes, and why not the faster ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from moec.runtime import kernels, load
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.options.runtime import POLICIES, IoMode
from tests.gates.bundles import emit_bundle
from tests.runtime.cache_kinds import kernels_of
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.tiny_switch import save_tiny_switch

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="the kernel extension is not built")
SMALL: dict[str, Any] = {"expert_cache": "50%", "context": 32}


@pytest.mark.parametrize(
    ("options", "cache", "layers"),
    [
        ({}, None, None),
        ({"prefetch": "off"}, None, None),
        *(({"policy": policy}, None, None) for policy in POLICIES),
        *(({"io": io}, None, None) for io in get_args(IoMode)),
        ({"prefetch": "popularity"}, None, None),
        ({"prefetch": "path", "policy": "hobbit", "io": "mmap"}, None, None),
        ({"prefetch_rule": "spread"}, None, None),
        ({"prefetch_rule": "until-routed"}, None, None),
        ({"prefetch_experts": 2}, None, None),
        ({"prefetch": "popularity", "expert_cache": "100%"}, None, None),
        ({"lossy": "big-little gamma=0.9,k=1"}, None, None),
        ({"accelerator": "torch-cpu", "accelerator_memory": "8MiB"}, "an accelerator", "an accelerator"),
    ],
)
def test_each_reason_is_the_one_of_the_run(
    tiny_bundle: Path, options: dict[str, Any], cache: str | None, layers: str | None
) -> None:
    with load(tiny_bundle, **SMALL | options) as engine:
        path = engine.code_path
        assert (path.why_not_native, path.why_not_one_call) == (cache, layers)
        assert isinstance(engine.cache, NativeCache) == (cache is None)
        assert (engine.model.pass_experts is None) == (layers is not None)
        assert engine.mode.partition(";")[0].startswith("mode: ") and path.to_text() in engine.mode


def test_an_encoder_other_kernels_and_a_plain_model(tmp_path: Path) -> None:
    switch = emit_bundle(save_tiny_switch(tmp_path / "switch"), tmp_path / "switch-moec")
    with load(switch, **SMALL) as engine:
        assert engine.code_path.to_text() == "cache native, layers in one call"
    model = save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=1, experts=3, top_k=1))
    bundle = emit_bundle(model, tmp_path / "bundle")
    with kernels_of("numpy"), load(bundle, **SMALL) as engine:
        assert engine.code_path.why_not_native == "kernels numpy"
    with load(bundle, **SMALL) as engine:
        assert engine.code_path.to_plain() == {
            "cache": "native",
            "layers": "one call",
            "why_not_native": None,
            "why_not_one_call": None,
        }
