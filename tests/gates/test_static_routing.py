"""Routing that follows from the token: a tiny random model with given experts, here and in transformers.

Its experts are read before any other work of a pass.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from moec.cli.commands.measuring.simulate import with_prefetch_rule
from moec.cli.measuring.decode_speed import measure_decode, new_tracer
from moec.cli.simulation.predictions import Simulation
from moec.cli.simulation.traces import recorded_trace, replayed_bundle
from moec.compiler.bundle.emit import BundleContent
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import Lowering, lower
from moec.compiler.request.uniform import uniform_plan
from moec.manifests.errors import OptionError
from moec.manifests.model import RouterSpec, StaticRouting
from moec.profiles.loading import load_profile
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.simulation.recorded_advice import recorded_advice
from moec.runtime.simulation.timeline import DeviceRates
from tests.gates.bundles import DEVICE, publish_plan, stepwise_logits
from tests.tiny_models import VOCABULARY, TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.oracle

EXPERTS, TOP_K, LAYERS = 6, 2, 4
LEARNED = 2  # the layer that keeps its router
TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, 60).tolist()
# Two different experts for each layer and token.
TABLES = np.random.default_rng(6).permuted(np.tile(np.arange(EXPERTS), (LAYERS, VOCABULARY, 1)), axis=2)[:, :, :TOP_K]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyMixtral(layers=LAYERS, experts=EXPERTS, top_k=TOP_K, width=64)
    return save_tiny_mixtral(tmp_path_factory.mktemp("static") / "model", tiny)


def _static(lowering: Lowering, scoring: str) -> Lowering:
    """Return the checkpoint with given experts in all layers but one."""
    layers = list(lowering.model.layers)
    for at in range(LAYERS):
        if at != LEARNED:
            routing = StaticRouting(tuple(TABLES[at].reshape(-1).tolist()))
            router = RouterSpec(scoring, scoring == "softmax", static=routing)  # type: ignore[arg-type]
            layers[at] = replace(layers[at], experts=replace(layers[at].experts, router=router))
    model = replace(lowering.model, layers=tuple(layers))
    names = model.dense_shapes()
    unread = frozenset(source.name for name, source in lowering.dense.items() if name not in names)
    dense = {name: source for name, source in lowering.dense.items() if name in names}
    return replace(lowering, model=model, dense=dense, ignored=lowering.ignored | unread)


@pytest.fixture(scope="module", params=["softmax", "uniform"])
def scoring(request: pytest.FixtureRequest) -> str:
    """Chosen experts with weights of a router, or with equal weights."""
    return str(request.param)


@pytest.fixture(scope="module")
def bundle(folder: Path, scoring: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    lowering = _static(lower(open_checkpoint(str(folder))), scoring)
    plan = uniform_plan(lowering.model, lowering.spec_16bit, lowering.spec_16bit, lowering.float_type)
    return publish_plan(lowering, BundleContent(plan, DEVICE), tmp_path_factory.mktemp("static") / "bundle")


def oracle(folder: Path, scoring: str, tokens: list[int]) -> np.ndarray:
    """Return the logits of transformers' model with the given experts of these tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for at in (layer for layer in range(LAYERS) if layer != LEARNED):
        chosen = torch.from_numpy(TABLES[at][tokens])

        def told(module: Any, given: Any, found: Any, chosen: torch.Tensor = chosen) -> Any:
            logits = found[0]
            weights = logits.float().softmax(-1).gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights if scoring == "softmax" else torch.full_like(weights, 1 / TOP_K), chosen

        model.model.layers[at].mlp.gate.register_forward_hook(told)
    with torch.no_grad():
        return np.asarray(model(torch.tensor([tokens])).logits[0].numpy())


def run(bundle: Path, cache: str, prefetch: str) -> tuple[np.ndarray, Any]:
    """Return the logits of a prompt and of 32 tokens after it, and the engine's statistics."""
    with load(bundle, expert_cache=cache, prefetch=prefetch, context=64) as engine:
        engine.cache.finish_warming()
        logits = stepwise_logits(engine, TOKENS, 28)
        return logits, (engine.cache.stats, engine.model.advice_by_layer())


@pytest.mark.gate("G9")
def test_logits_are_those_of_the_model_with_the_same_experts(bundle: Path, folder: Path, scoring: str) -> None:
    found, expected = run(bundle, "100%", "off")[0], oracle(folder, scoring, TOKENS)
    assert np.abs(found - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.gate("G3")
@pytest.mark.parametrize("prefetch", ["lookahead", "path", "popularity"])
def test_experts_are_known_ahead_and_change_nothing(bundle: Path, prefetch: str) -> None:
    whole, _ = run(bundle, "100%", "off")
    least = open_bundle(bundle).manifest.cost.minimum_expert_bytes
    none, (off, _) = run(bundle, str(3 * least), "off")
    part, (stats, layers) = run(bundle, str(3 * least), prefetch)
    assert np.array_equal(none, whole) and np.array_equal(part, whole)
    assert stats.evictions > 0 and stats.prefetch_used > 0 == off.prefetch_used
    # The advice names every expert of the layers after the first, and no other expert.
    for at in range(1, LAYERS):
        if at != LEARNED:
            assert layers[at].demanded == layers[at].predicted > 0, at


def test_a_pass_begins_with_the_experts_of_its_first_layer(bundle: Path) -> None:
    with load(bundle, expert_cache="50%", prefetch="path", context=64) as engine:
        advisor, token = engine.model.advisor, np.array([TOKENS[0]], np.int64)
        first = set(TABLES[0][TOKENS[0]].tolist())
        second = {EXPERTS + expert for expert in TABLES[1][TOKENS[0]].tolist()}
        found = advisor.preload(token, range(LAYERS))
        assert set(found[:TOP_K]) == first and set(found[TOP_K:]) == second
        asked: list[list[int]] = []
        own = engine.cache.prefetch
        engine.cache.prefetch = lambda indices: (asked.append(list(indices)), own(indices))[1]  # type: ignore[method-assign]
        engine.step([TOKENS[0]], [0], [0])
        assert asked[0] == found
        advisor.predictor = None
        assert advisor.preload(token, range(LAYERS)) == []


def test_a_trace_recorded_to_the_first_miss_is_replayed_as_it_was(bundle: Path) -> None:
    """A trace does not contain the tokens, so its lookahead is not decided again."""
    options = RuntimeOptions(expert_cache="50%", prefetch_rule="first-miss", context=64)
    opened = open_bundle(bundle)
    with Engine(opened, options) as engine:
        engine.cache.finish_warming()
        tracer = new_tracer(engine)
        measure_decode(engine, TOKENS[:40], 20, tracer=tracer)
        trace = recorded_trace(engine, tracer, 20, load_profile("laptop"))
    replayed = replayed_bundle(opened)
    assert any(each.scores is not None for each in trace.passes) and trace.header.prefetch_rule == "first-miss"
    rates = DeviceRates(10**8, 1000, 1, 1.0)
    simulation = Simulation(opened, trace, replayed, rates, "lookahead", recorded_advice)
    (row,) = simulation.rows([replayed.total_bytes // 2], {"lrfu": "lrfu"}, [{}])
    assert row.timeline.tokens_per_s and row.timeline.cache.prefetch_reads > 0
    spread = replace(trace, header=replace(trace.header, prefetch_rule="spread"))
    with pytest.raises(OptionError, match="experts follow from the token"):
        with_prefetch_rule(spread, Path("a.trace"), opened, "lookahead", "first-miss")
