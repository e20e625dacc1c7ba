"""Bundles with experts left out: nothing of them is stored, read or computed, and routers choose among the others."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import MixtralForCausalLM

from moec.cli.main import cli
from moec.manifests.model import ExpertKey, ExpertsSpec, RouterSpec
from moec.manifests.quant import QuantSpec
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
from moec.runtime.layers.routing import RoutingRule
from tests.gates.bundles import emit_bundle
from tests.pruned_mixtral import PRUNED, save_whole, save_without

TOKENS = np.random.default_rng(7).integers(4, 260, 48).tolist()
PROMPT_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whole(tmp_path_factory.mktemp("pruned") / "model")


@pytest.fixture(scope="module")
def pruned(checkpoint: Path) -> Path:
    return emit_bundle(checkpoint, checkpoint.parent / "bundle", pruned=PRUNED)


def run(bundle: Path, **options: Any) -> tuple[np.ndarray, Any]:
    """Return the logits of forced tokens after a prompt, and the counts of the cache."""
    with load(bundle, context=64, **options) as engine:
        engine.cache.finish_warming()
        engine.begin_sequence()
        rows = [engine.model.logits(engine.prefill(TOKENS[:PROMPT_TOKENS])[-1:])]
        rows += [engine.decode([TOKENS[at]], [0], [at]) for at in range(PROMPT_TOKENS, len(TOKENS))]
        engine.cache.check_invariants()
        return np.concatenate(rows), engine.cache.stats


@pytest.mark.gate("G9")
def test_logits_are_those_of_a_model_that_never_had_them(pruned: Path, tmp_path: Path) -> None:
    model = MixtralForCausalLM.from_pretrained(save_without(tmp_path / "fewer"), dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, PROMPT_TOKENS - 1 :].numpy()
    logits, _ = run(pruned, expert_cache="100%")
    assert np.abs(logits - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.gate("G2")
@pytest.mark.parametrize("prefetch", ["lookahead", "path", "popularity", "off"])
def test_what_is_left_out_is_never_read(pruned: Path, prefetch: str) -> None:
    expected, _ = run(pruned, expert_cache="100%", prefetch="off")
    manifest = open_bundle(pruned).manifest
    assert [entry.key for entry in manifest.experts if entry.size_bytes == 0] == sorted(PRUNED)
    logits, stats = run(pruned, expert_cache=str(manifest.cost.minimum_expert_bytes), prefetch=prefetch)
    assert np.array_equal(logits.view(np.uint32), expected.view(np.uint32))
    assert stats.misses > 0 and stats.bytes_read % max(entry.size_bytes for entry in manifest.experts) == 0
    assert stats.bytes_read // max(entry.size_bytes for entry in manifest.experts) == stats.reads, "of whole experts"


def test_files_hold_what_is_kept(pruned: Path) -> None:
    opened = open_bundle(pruned)
    verify_bundle(opened)
    sizes = [tensor.size_bytes for tensor in opened.headers["experts-00001.safetensors"].values()]
    assert sizes[:3] == [0, 0, 0] and min(sizes[3:]) > 0
    assert opened.manifest.cost.expert_bits_per_weight == pytest.approx(16 * 5 / 8)


def test_lossy_modes_never_see_what_is_left_out(checkpoint: Path) -> None:
    bundle = emit_bundle(checkpoint, checkpoint.parent / "versions", bitwidth=8, low="q2g32", pruned=PRUNED)
    manifest = open_bundle(bundle).manifest
    assert not {entry.key for entry in manifest.low_experts} & set(PRUNED) and len(manifest.low_experts) == 15
    half: dict[str, Any] = {"expert_cache": "60%", "cache_state": "cold", "prefetch": "off"}
    for modes in (
        {"lossy": "dynamic-precision 0,0.4"},
        {"lossy": "cache-routing margin=0.9"},
        {"lossy": "big-little gamma=0.9"},
    ):
        with load(bundle, context=64, **half, **modes) as engine:
            engine.begin_sequence()
            engine.prefill(TOKENS[:PROMPT_TOKENS])
            for at in range(PROMPT_TOKENS, len(TOKENS)):
                engine.decode([TOKENS[at]], [0], [at])
            counts, resident = engine.mode_counts, engine.cache.resident()
            assert counts is not None and counts.ranks > 0
            assert counts.low + counts.skipped + counts.replaced + counts.fallback_tokens > 0
            is_asked = engine.cache.stats.lookups
        assert is_asked > 0 and len(resident)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_rule_chooses_as_if_the_others_were_all(scoring: Any, renormalize: bool) -> None:
    router, left_out = RouterSpec(scoring, renormalize), [0, 3, 6]
    kept = [e for e in range(8) if e not in left_out]
    logits = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32) * 4
    rule = RoutingRule(ExpertsSpec(8, 3, 32, "silu", router), left_out)
    fewer = RoutingRule(ExpertsSpec(5, 3, 32, "silu", router))
    chosen, weights = rule.route(logits)
    expected, expected_weights = fewer.route(logits[:, kept].copy())
    assert np.array_equal(chosen, np.array(kept)[expected])
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-6)
    logits[:, kept] = [1.0, -95.0, -96.0, -97.0, -98.0]  # whose sigmoids are 0, too
    assert not set(rule.route(logits)[0].ravel().tolist()) & set(left_out)
    np.testing.assert_allclose(rule.demand(logits)[kept], fewer.demand(logits[:, kept].copy()), rtol=1e-5)
    assert not rule.demand(logits)[left_out].any() and not rule.scores(logits)[:, left_out].any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kernel", ["reference", "compiled"])
def test_what_is_left_out_is_never_chosen_whatever_the_logits_are(
    scoring: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN and -inf rank before nothing but themselves; rows without them keep their bits."""
    if kernel == "reference":
        monkeypatch.setattr("moec.runtime.kernels.compiled", lambda: None)
    left_out, kept = [0, 3, 6], [1, 2, 4, 5, 7]
    for renormalize in (True, False):
        rule = RoutingRule(ExpertsSpec(8, 3, 32, "silu", RouterSpec(scoring, renormalize)), left_out)
        logits = np.random.default_rng(1).normal(size=(7, 8)).astype(np.float32)
        alone = rule.route(logits[:1])
        logits[1] = np.nan
        logits[2, kept[:4]] = np.nan
        logits[3] = -np.inf
        logits[4, kept[:4]] = -np.inf
        logits[5, kept[0]], logits[5, kept[1:]] = np.inf, np.nan
        logits[6, kept] = [1.0, -np.inf, np.nan, np.nan, np.nan]
        with np.errstate(all="ignore"):
            chosen, weights = rule.route(logits)
        assert set(chosen.ravel().tolist()) <= set(kept)
        assert all(len(set(row)) == 3 for row in chosen.tolist())
        assert np.isnan(weights[[1, 2, 6]]).any(axis=1).all(), "what is no number must be seen in the end"
        assert np.array_equal(chosen[:1], alone[0]) and np.array_equal(weights[:1], alone[1])


def test_an_expert_is_left_out_as_a_whole(pruned: Path) -> None:
    entry = next(entry for entry in open_bundle(pruned).manifest.experts if not entry.is_pruned)
    for projection in ("gate", "up", "down"):
        with pytest.raises(ValueError, match="left out as a whole"):
            dataclasses.replace(entry, **{projection: QuantSpec(0)})


def _more_than_it_does_without(checkpoint: Path, target: Path) -> None:
    emit_bundle(checkpoint, target, pruned=[ExpertKey(1, expert) for expert in range(5)])


def _a_dense_weight(checkpoint: Path, target: Path) -> None:
    manifest = open_bundle(emit_bundle(checkpoint, target)).manifest
    dense = [dataclasses.replace(e, spec=QuantSpec(0)) if e.name == "lm_head" else e for e in manifest.dense]
    dataclasses.replace(manifest, dense=tuple(dense))


def _a_low_version(checkpoint: Path, target: Path) -> None:
    manifest = open_bundle(emit_bundle(checkpoint, target, bitwidth=8, low="q2g32")).manifest
    low = manifest.low_experts[0]
    nothing = dataclasses.replace(low, gate=QuantSpec(0), up=QuantSpec(0), down=QuantSpec(0), size_bytes=0)
    dataclasses.replace(manifest, low_experts=(nothing, *manifest.low_experts[1:]))


def _where_groups_decide(checkpoint: Path, target: Path) -> None:
    manifest = open_bundle(emit_bundle(checkpoint, target, pruned=PRUNED)).manifest
    router = dataclasses.replace(manifest.model.layers[0].experts.router, groups=2)
    layers = [
        dataclasses.replace(x, experts=dataclasses.replace(x.experts, router=router)) for x in manifest.model.layers
    ]
    dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, layers=tuple(layers)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_more_than_it_does_without, "layer 1 leaves 5 of 8 out, and its router needs 4"),
        (_a_low_version, r"low_experts\[0, 0\]: a version must have bytes"),
        (_a_dense_weight, r"dense\[lm_head\]: format q0 cannot hold"),
        (_where_groups_decide, "layer 0 leaves 3 of 8 out, and its router needs all of them"),
    ],
)
def test_what_cannot_be_left_out(
    checkpoint: Path, tmp_path: Path, make: Callable[[Path, Path], None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(checkpoint, tmp_path / "bundle")


def test_inspect_says_what_is_left_out(pruned: Path) -> None:
    page = CliRunner().invoke(cli, ["inspect", str(pruned)])
    assert page.exit_code == 0 and "9 of 24" in page.stdout
    told = json.loads(CliRunner().invoke(cli, ["inspect", str(pruned), "--json"]).stdout)
    assert told["formats"]["pruned_experts"] == 9
