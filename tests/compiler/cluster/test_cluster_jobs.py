"""Work as jobs, without Ray: equal bits for every division of the work and every worker."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.calibration.layer_inputs import ExpertInputs, LayerInputs
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.cluster.jobs import CloseBundle
from moec.compiler.cluster.remote import RemoteAnswers, RemoteEngine, experts_priced_by, experts_quantized_by
from moec.compiler.cluster.session import check_cluster, layer_worker_bytes
from moec.compiler.cluster.site import Site, checkpoint_identity
from moec.compiler.families import Lowering
from moec.compiler.quantization.layer_quantizer import ExpertQuantizer, LayerQuantizer, QuantizeElsewhere
from moec.compiler.quantization.quantized import LEFT_OUT
from moec.compiler.quantization.swept_store import SweptStore
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import CompilePlan, plain_plan
from moec.compiler.sensitivity.answer_walk import AnswerMeasures, AnswerWalk
from moec.compiler.sensitivity.gradients import LayerGradients, PriceElsewhere
from moec.compiler.stages.sweep import Sweep, Swept
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.memory import COMPILE_PROCESS_BYTES
from moec.compiler.walker.texts import AnswerTexts, TokenTexts, length_batches, text_batches
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.compiler.workspace.parallel import in_parts, workers
from moec.evaluation.engine import GenerationRequest, in_order, no_progress
from moec.manifests.errors import CheckpointError, OptionError
from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec
from tests.compiler.cluster.pool_here import PoolHere
from tests.compiler.lowered import compile_texts_of, lowered, save_family, scored
from tests.tiny_compile import WORDS, compile_tiny, save_model
from tests.tiny_models import tiny_tokenizer

SPECS = (QuantSpec(2, 32), QuantSpec(4, 32))
WORKERS = pytest.mark.parametrize(
    ("count", "threads"), [(3, 1), (2, 2), *(pytest.param(*few, marks=pytest.mark.slow) for few in ((1, 1), (7, 3)))]
)
FAMILIES = ("deepseek-v2-groups-yarn", "gpt-oss", "qwen2-plain-between", "granite-scaled")
PAIRS = [([5, 6, 200, 7], [90, 33]), ([1, 2], [3]), ([9, 8, 7, 6, 5], [4, 3])]


def text_pairs(count: int) -> list[tuple[str, str]]:
    """Return prompts and answers of many lengths. Some answers are empty."""
    draw = random.Random(count)
    return [
        (" ".join(draw.choices(WORDS, k=draw.randint(1, 12))), " ".join(draw.choices(WORDS, k=draw.randint(0, 6))))
        for _ in range(count)
    ]


def answers_of_two_tasks(model: ModelSpec, count: int) -> AnswerTexts:
    """Return texts whose answers are scored, end token included."""
    encode = tiny_tokenizer().encode
    pairs = [(encode(prompt), encode(answer) if answer else []) for prompt, answer in text_pairs(count)]
    return replace(scored(model, pairs), tasks=[count // 2, count - count // 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("cluster") / "tiny", layers=2, experts=4)


@pytest.fixture(scope="module")
def lowering(folder: Path) -> Lowering:
    return lowered(folder)


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


@pytest.mark.parametrize("quantizer", ["gptq", pytest.param("rtn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FAMILIES, "switch"])
def test_a_sweep_over_the_layers_is_the_same_with_experts_quantized_elsewhere(
    name: str, quantizer: str, tmp_path: Path
) -> None:
    """Codes, costs, gains and prices have equal bits. Some families store experts transposed, or have plain layers."""
    folder = save_family(name, tmp_path / "tiny")
    lowering, pool = lowered(folder), PoolHere(folder, 3, 2)
    model, texts = lowering.model, compile_texts_of(lowering.model, PAIRS)
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
        assert in_order(there.generate, requests) == in_order(here.generate, requests)
        assert in_order(there.answer_log_probs, pairs) == in_order(here.answer_log_probs, pairs)


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
            expected.append(in_order(here.answer_log_probs, pairs))
    for _ in range(2):
        for engine, scores in zip(engines, expected, strict=True):
            assert in_order(engine.answer_log_probs, pairs) == scores
    assert sorted(size for _, size in opened) == [16 << 30] * 2 + [32 << 30] * 2 and not closed
    for engine in engines:
        for site in pool.sites:
            CloseBundle(engine.bundle.digest).run(site)
    assert sorted(closed) == sorted(size for _, size in opened)
    assert in_order(engines[1].answer_log_probs, pairs) == expected[1]
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
    with pytest.raises(OptionError, match="no effect without a search"):
        check_cluster("uniform")
    check_cluster("kl")


def is_equal(one: AnswerMeasures, other: AnswerMeasures) -> bool:
    """Return whether two measurements have equal bits."""
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("kl", "agrees", "nll"))


def mixed(
    plain: CompilePlan, units: dict[UnitKey, QuantSpec], dense: dict[str, QuantSpec] | None = None
) -> CompilePlan:
    return replace(plain, units={**plain.units, **units}, dense={**plain.dense, **(dense or {})})


def some_plans(lowering: Lowering) -> list[CompilePlan]:
    """Return four plans. Below 16 bits are all weights, half of the units, the dense weights, and none."""
    plain, shapes = plain_plan(lowering.model, lowering.spec_16bit, "rtn"), lowering.model.dense_shapes()
    units = list(plain.units)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and QuantSpec(4, 32).fits(shape[1])]
    dense = dict.fromkeys([name for name in matrices if not name.endswith("router")], QuantSpec(4, 32))
    plans = [mixed(plain, dict.fromkeys(units, SPECS[0]), dense), mixed(plain, dict.fromkeys(units[::2], SPECS[1]))]
    return [*plans, mixed(plain, {}, dense), plain]


@pytest.fixture(scope="module")
def told(lowering: Lowering) -> list[list[AnswerMeasures]]:
    """Return the measures by one machine of 400 answers, and of the first 37, under each plan."""
    answers, store = answers_of_two_tasks(lowering.model, 400), UnitStore(lowering, "rtn")
    walk = AnswerWalk(lambda: LoadedLayer(lowering, 2), answers, 1, no_progress)
    plans = [(plan, store) for plan in some_plans(lowering)]
    return [list(walk.measure_each(plans, items)) for items in (None, 37)]


@WORKERS
def test_answers_are_measured_to_the_last_bit(
    folder: Path, lowering: Lowering, told: list[list[AnswerMeasures]], count: int, threads: int
) -> None:
    pool, store = PoolHere(folder, count, threads), UnitStore(lowering, "rtn")
    remote = RemoteAnswers(pool, answers_of_two_tasks(lowering.model, 400))
    for items, expected in zip((None, 37), told, strict=True):
        found = list(remote.measure_each([(plan, store) for plan in some_plans(lowering)], items))
        assert len(found) == len(expected)
        assert all(is_equal(one, other) for one, other in zip(expected, found, strict=True))
    assert len(pool.jobs) > 2 * len(told[0]), "the answers were divided"
    assert len({float(measured.kl.mean()) for measured in told[0]}) == 4 and not told[0][-1].kl.any()
    assert sum(remote.answers.counts[:37]) == len(told[1][0].nll) < len(told[0][0].nll)


def test_what_was_tested_spans_batches(lowering: Lowering) -> None:
    """Otherwise the test above would pass with any division."""
    answers = answers_of_two_tasks(lowering.model, 400)
    assert len(text_batches(answers.texts)) > 4 and len(text_batches(answers.first(37).texts)) > 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 120), st.integers(1, 5))
def test_a_run_of_batches_is_cut_into_the_same_batches(lengths: list[int], tokens: int, per_job: int) -> None:
    texts = TokenTexts([[7] * length for length in lengths])
    batches = text_batches(texts, tokens)
    assert batches == length_batches(lengths, tokens)
    for run in in_parts(batches, per_job):
        indices = [index for batch in run for index in batch]
        again = text_batches(TokenTexts([texts.rows[index] for index in indices]), tokens)
        assert [[indices[at] for at in batch] for batch in again] == run


@pytest.mark.parametrize("name", [*FAMILIES, "switch", "switch-capacity"])
def test_what_a_plan_exchanged_is_put_back_in_every_family(name: str, tmp_path: Path) -> None:
    """One worker measures plan after plan with the bits of a machine that measures nothing else."""
    folder = save_family(name, tmp_path / "tiny")
    lowering = lowered(folder)
    answers, store = answers_of_two_tasks(lowering.model, 12), UnitStore(lowering, "rtn")
    remote, plans = RemoteAnswers(PoolHere(folder, 1, 1), answers), some_plans(lowering)
    found = list(remote.measure_each([(plan, store) for plan in plans]))
    for plan, measured in zip(plans, found, strict=True):
        walk = AnswerWalk(lambda: LoadedLayer(lowering), answers, 1, no_progress)
        assert all(is_equal(alone, measured) for alone in walk.measure_each([(plan, store)]))
    assert found[0].kl.mean() > 0.0001 and not found[-1].kl.any()


def test_a_weight_is_sent_once_for_all_plans(folder: Path, lowering: Lowering) -> None:
    """The texts are sent once, too. The weights of another store are sent again."""
    pool, plans, store = PoolHere(folder, 2, 1), some_plans(lowering)[:1], UnitStore(lowering, "rtn")
    remote, sent = RemoteAnswers(pool, answers_of_two_tasks(lowering.model, 20)), list[int]()
    for own in (store, store, UnitStore(lowering, "rtn")):
        before = pool.put(None)
        list(remote.measure_each([(plan, own) for plan in plans]))
        sent.append(pool.put(None) - before - 1)
    weights = sum(spec.bitwidth < 16 for spec in (*plans[0].units.values(), *plans[0].dense.values()))
    texts = sent[0] - weights - 1
    assert texts > 0 and sent == [texts + weights + 1, 1, weights + 1], "beside weights and texts, the list of handles"
