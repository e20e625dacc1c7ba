"""Work as jobs, without Ray: equal bits for every division of the work and every worker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.calibration.layer_inputs import ExpertInputs, LayerInputs
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.cluster.jobs import CloseBundle
from moec.compiler.cluster.remote import RemoteEngine, experts_priced_by, experts_quantized_by
from moec.compiler.cluster.session import check_cluster, layer_worker_bytes
from moec.compiler.cluster.site import Site, checkpoint_identity
from moec.compiler.families import Lowering
from moec.compiler.quantization.layer_quantizer import ExpertQuantizer, LayerQuantizer, QuantizeElsewhere
from moec.compiler.quantization.quantized import LEFT_OUT
from moec.compiler.quantization.swept_store import SweptStore
from moec.compiler.sensitivity.gradients import LayerGradients, PriceElsewhere
from moec.compiler.stages.encode_texts import CompileTexts
from moec.compiler.stages.sweep import Sweep, Swept
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.memory import COMPILE_PROCESS_BYTES
from moec.compiler.walker.texts import AnswerTexts, TokenTexts, divided_pairs
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.compiler.workspace.parallel import workers
from moec.evaluation.engine import GenerationRequest, no_progress
from moec.evaluation.text_pairs import forced_rows
from moec.manifests.errors import CheckpointError, OptionError
from moec.manifests.model import ModelSpec
from tests.compiler.cluster.pool_here import (
    FAMILIES,
    SPECS,
    WORKERS,
    PoolHere,
    save_family,
    text_pairs,
)
from tests.compiler.configured import lowered
from tests.tiny_compile import compile_tiny


def random_inputs(model: ModelSpec, experts: Any) -> LayerInputs:
    """Return the inputs of random tokens. One expert has none."""
    generator, inputs = torch.Generator().manual_seed(3), LayerInputs(model.layers[0].experts, model.hidden_size)
    tokens = torch.randn(40, model.hidden_size, generator=generator)
    chosen = torch.randint(1, model.layers[0].experts.count, (40, 1), generator=generator)
    with workers(1) as pool, torch.inference_mode():
        inputs.add(experts, ExpertInputs(tokens, chosen, torch.rand(40, 1, generator=generator)), pool)
    return inputs


@pytest.mark.parametrize("with_texts", [True, False])
@pytest.mark.parametrize("quantizer", ["gptq", "rtn"])
@WORKERS
def test_experts_are_quantized_to_the_same_codes(
    folder: Path, lowering: Lowering, quantizer: str, with_texts: bool, count: int, threads: int
) -> None:
    slot, how = LoadedLayer(lowering), ExpertQuantizer(0, quantizer, SPECS)
    slot.load(0)
    inputs = random_inputs(lowering.model, slot.experts) if with_texts else None
    assert inputs is None or (inputs.tokens == 0).sum() >= 1
    pool = PoolHere(folder, count, threads)
    with workers(threads) as threads_here:
        here = list(LayerQuantizer(slot.experts, how).run(inputs, threads_here))
        there = list(LayerQuantizer(slot.experts, how, experts_quantized_by(pool)).run(inputs, threads_here))
    assert len(pool.jobs) >= min(count, 4) and len(here) == len(there) == 4
    for (expert, own, costs), (number, other, other_costs) in zip(here, there, strict=True):
        assert expert == number and costs == other_costs and own.keys() == other.keys()
        assert all(is_same(own[key], other[key]) for key in own)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two matrices have equal codes, scales and minima."""
    parts = [(getattr(one, name), getattr(other, name)) for name in ("codes", "scales", "minima")]
    return all(a is b if a is None else torch.equal(a, b) for a, b in parts)


def compile_texts(model: ModelSpec) -> CompileTexts:
    """Return a few texts for all stages."""
    pairs = [([5, 6, 200, 7], [90, 33]), ([1, 2], [3]), ([9, 8, 7, 6, 5], [4, 3])]
    prompts, decoded = divided_pairs(model, pairs)
    rows, answers, counts = forced_rows(decoded, model.eos_token_ids[:1])
    texts = TokenTexts([prompt + answer for prompt, answer in decoded], prompts)
    scored = AnswerTexts(TokenTexts(rows, prompts), counts, answers, pairs, [3])
    return CompileTexts(texts, texts.first(8), scored, scored, {"one": scored})


@pytest.mark.parametrize("quantizer", ["gptq", pytest.param("rtn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FAMILIES, "switch"])
def test_a_sweep_over_the_layers_is_the_same_with_experts_quantized_elsewhere(
    name: str, quantizer: str, tmp_path: Path
) -> None:
    """Codes, costs, gains and prices have equal bits. Some families store experts transposed, or have plain layers."""
    folder = save_family(tmp_path / "tiny", name)
    lowering, pool = lowered(folder), PoolHere(folder, 3, 2)
    model, texts = lowering.model, compile_texts(lowering.model)
    probe = dict.fromkeys(model.dense_shapes(), lowering.spec_16bit)

    def swept(
        work: Path, quantizes: QuantizeElsewhere | None, prices: PriceElsewhere | None
    ) -> tuple[Swept, SweptStore, np.ndarray]:
        journal, slot = Journal(work, "x", Disk()), LoadedLayer(lowering)
        store = SweptStore(lowering, quantizer, SPECS, journal)
        found = Sweep(slot, store, journal, probe, 0, quantizes).run(texts, 2, no_progress)
        gradients = LayerGradients(slot, store, texts.gradients, (*SPECS, LEFT_OUT), journal, prices)
        return found, store, gradients.run(0, 2, no_progress)

    here, own, own_prices = swept(tmp_path / "here", None, None)
    there, other, prices = swept(tmp_path / "there", experts_quantized_by(pool), experts_priced_by(pool))
    assert len(pool.jobs) > 2 * len(model.expert_layers)
    assert np.array_equal(here.sensitivity.gains, there.sensitivity.gains)
    assert np.array_equal(own_prices, prices, equal_nan=True) and np.nanmax(prices) > 0
    for unit in model.unit_keys():
        for spec in (spec for spec in SPECS if spec.fits(model.unit_shape(unit.layer, unit.projection)[1])):
            assert own.error(unit, spec) == other.error(unit, spec)
            assert np.array_equal(own.for_bundle(unit, spec), other.for_bundle(unit, spec))


def test_a_worker_takes_the_memory_of_experts_and_not_of_the_model(lowering: Lowering) -> None:
    shape = replace(lowering.model, hidden_size=2048)
    experts = replace(shape.layers[0].experts, count=64, width=1024)
    model, flat = (replace(shape, layers=(replace(shape.layers[0], experts=experts),) * count) for count in (16, 1))
    assert COMPILE_PROCESS_BYTES < layer_worker_bytes(model, SPECS, 2) < layer_worker_bytes(model, SPECS, 8)
    assert layer_worker_bytes(model, SPECS, 4) == layer_worker_bytes(flat, SPECS, 4)
    float_bytes = 4 * sum(
        rows * columns for rows, columns in (model.unit_shape(u.layer, u.projection) for u in model.unit_keys())
    )
    assert layer_worker_bytes(model, SPECS, 4) < float_bytes / 5


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    compile_tiny(folder, folder.with_name("tiny-moec"), "uniform", 4)
    return folder.with_name("tiny-moec")


@WORKERS
def test_the_runtime_certifies_the_same(folder: Path, bundle: Path, count: int, threads: int) -> None:
    pairs = [pair for pair in text_pairs(40) if pair[1]]
    requests = [GenerationRequest(prompt, None, 5) for prompt, _ in pairs]
    there = RemoteEngine(PoolHere(folder, count, threads), bundle)
    with cast(AbstractContextManager[Any], open_partial(bundle)) as here:
        assert there.generate(requests, no_progress) == here.generate(requests, no_progress)
        assert there.answer_log_probs(pairs, no_progress) == here.answer_log_probs(pairs, no_progress)


def test_runtimes_share_a_node_and_are_closed(folder: Path, bundle: Path, tmp_path: Path) -> None:
    """Two sides of a certificate are open at the same time, each with its part of the node's memory."""
    opened, closed = list[tuple[int, int]](), list[int]()

    @contextmanager
    def recorded(path: Path, memory_bytes: int) -> Iterator[Any]:
        opened.append((len(opened), memory_bytes))
        with cast(AbstractContextManager[Any], open_partial(path, memory_bytes)) as engine:
            yield engine
        closed.append(memory_bytes)

    other = tmp_path / "other-moec"
    compile_tiny(folder, other, "uniform", 8)
    pool = PoolHere(folder, workers=2, threads=1, open_runtime=recorded, memory_bytes=64 << 30)
    pairs = [pair for pair in text_pairs(12) if pair[1]]
    engines = [RemoteEngine(pool, path, share) for path, share in ((bundle, 0.5), (other, 0.25))]
    expected = []
    for path in (bundle, other):
        with cast(AbstractContextManager[Any], open_partial(path)) as here:
            expected.append(here.answer_log_probs(pairs, no_progress))
    for _ in range(2):
        for engine, scores in zip(engines, expected, strict=True):
            assert engine.answer_log_probs(pairs, no_progress) == scores
    assert sorted(size for _, size in opened) == [16 << 30] * 2 + [32 << 30] * 2 and not closed
    for engine in engines:
        for site in pool.sites:
            CloseBundle(engine.bundle.digest).run(site)
    assert sorted(closed) == sorted(size for _, size in opened)
    assert engines[1].answer_log_probs(pairs, no_progress) == expected[1]
    assert len(opened) == 6, "what was closed is opened again"
    for site in pool.sites:
        site.close_engine(engines[1].bundle.digest)


def test_a_site_opens_no_other_checkpoint(folder: Path) -> None:
    site = Site(str(folder), "0" * 64, 1, lambda path, room: nullcontext(), lambda handles: [])
    with pytest.raises(CheckpointError, match="holds another checkpoint than on the machine that compiles"):
        site.lowering  # noqa: B018


def test_the_identity_of_a_checkpoint_follows_its_content(folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    same = checkpoint_identity(open_checkpoint(str(folder)))
    assert checkpoint_identity(open_checkpoint(str(copy))) == same
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (copy / "model.safetensors").write_bytes(raw)
    assert checkpoint_identity(open_checkpoint(str(copy))) != same


def test_a_cluster_is_refused_where_it_has_nothing_to_do() -> None:
    with pytest.raises(OptionError, match="no effect with `--uniform`"):
        check_cluster("uniform")
    check_cluster("kl")
