"""Work as jobs, without Ray: any worker and any division give equal bits."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moec.cli.commands.compile import open_partial
from moec.compiler.calibration.second_moments import SecondMoments
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.cluster.jobs import CloseBundle
from moec.compiler.cluster.ray_pool import Answer, Job, Pool
from moec.compiler.cluster.remote import RemoteBundle, RemoteEngine, RemoteModel, experts_quantized_by, quantized_by
from moec.compiler.cluster.session import check_cluster, layer_worker_bytes, worker_bytes
from moec.compiler.cluster.site import Site, checkpoint_identity
from moec.compiler.cluster.trials import ClusterTrials
from moec.compiler.families import lower
from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.reference.decode import ROWS_PER_STEP
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.reference.network import length_batches
from moec.compiler.request.ports import OpenRuntime
from moec.compiler.sensitivity.sensitivity import plain_plan
from moec.compiler.sensitivity.trials import TaskData, Trials
from moec.compiler.walker.memory import PROCESS_BYTES
from moec.compiler.walker.sweep import AnswerTexts, Sweep, SweepInputs, SweepResult
from moec.compiler.walker.units import Elsewhere
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.compiler.workspace.parallel import in_parts
from moec.evaluation.data import load_splits
from moec.evaluation.engine import Generation, GenerationRequest, no_progress
from moec.manifests.errors import CheckpointError, OptionError
from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.quant import QuantSpec
from tests.tiny_compile import WORDS, compile_tiny, save_model
from tests.tiny_families import TINY_FAMILIES, save_tiny_family

SPECS = (QuantSpec(2, 32), QuantSpec(4, 32))
WORKERS = pytest.mark.parametrize(("workers", "threads"), [(1, 1), (3, 1), (2, 2), (7, 3)])


class PoolHere(Pool):
    """Sites of this process that take turns; everything on its way is pickled, as between machines."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        threads: int,
        open_runtime: OpenRuntime = open_partial,
        memory_bytes: int = 0,
    ) -> None:
        self.count, self.threads = workers, threads
        self._objects: list[bytes] = []
        identity = checkpoint_identity(open_checkpoint(str(folder)))
        opened = str(folder), identity, threads, open_runtime, self._fetch, memory_bytes
        self.sites = [Site(*opened) for _ in range(workers)]
        self.jobs: list[Job] = []

    def _fetch(self, handles: Sequence[int]) -> list[Any]:
        return [pickle.loads(self._objects[handle]) for handle in handles]

    def put(self, value: Any) -> int:
        self._objects.append(pickle.dumps(value))
        return len(self._objects) - 1

    def in_order(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        for job in jobs:
            self.jobs.append(job)
            result, kept = pickle.loads(pickle.dumps(job)).run(self.sites[len(self.jobs) % self.count])
            yield Answer(pickle.loads(pickle.dumps(result)), self.put(kept))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("cluster") / "tiny", layers=2, experts=4)


@pytest.fixture(scope="module")
def reference(folder: Path) -> ReferenceModel:
    return ReferenceModel(folder)


def text_pairs(count: int) -> list[tuple[str, str]]:
    """Prompts and answers of many lengths, some answers empty."""
    draw = random.Random(count)
    return [
        (" ".join(draw.choices(WORDS, k=draw.randint(1, 12))), " ".join(draw.choices(WORDS, k=draw.randint(0, 6))))
        for _ in range(count)
    ]


def moments_of(model: ModelSpec) -> SecondMoments:
    """Return second moments of random inputs. One expert has none."""
    generator, moments = torch.Generator().manual_seed(3), SecondMoments.zeros(model)
    for key in model.expert_keys()[1:]:
        width = model.layers[key.layer].experts.width
        inputs = torch.randn(20, model.hidden_size, generator=generator)
        moments.add(key.layer, key.expert, inputs, torch.randn(20, width, generator=generator))
    return moments


@pytest.mark.parametrize("quantizer", ["gptq", "rtn"])
@WORKERS
def test_units_are_quantized_to_the_same_codes(folder: Path, quantizer: str, workers: int, threads: int) -> None:
    lowering = lower(open_checkpoint(str(folder)))
    moments = moments_of(lowering.model) if quantizer == "gptq" else None
    here, there = UnitStore(lowering, moments, quantizer), UnitStore(lowering, moments, quantizer)
    here.prepare(SPECS, no_progress)
    seen: list[tuple[int, int]] = []
    there.prepare(SPECS, lambda *at: seen.append(at), quantized_by(PoolHere(folder, workers, threads)))
    assert seen == [(done, 12) for done in range(1, 13)]
    for key in lowering.model.expert_keys():
        for unit in (UnitKey(*key, projection) for projection in ("gate", "up", "down")):
            for spec in SPECS:
                assert here.error(unit, spec) == there.error(unit, spec)
                assert np.array_equal(here.for_bundle(unit, spec), there.for_bundle(unit, spec))


@dataclass
class Said:
    """Output of the reference for these texts."""

    pairs: list[tuple[str, str]]
    requests: list[GenerationRequest]
    logits: list[np.ndarray]
    log_probs: list[list[float]]
    answers: list[Generation]


@pytest.fixture(scope="module")
def said(reference: ReferenceModel) -> Said:
    pairs = text_pairs(400)
    requests = [GenerationRequest(prompt, answer, 9, ("pen",)) for prompt, answer in pairs]
    logits = list(reference.forced_logits(reference.encode_pairs(pairs)))
    return Said(pairs, requests, logits, reference.answer_log_probs(pairs), reference.generate(requests))


@WORKERS
def test_the_model_says_the_same_to_the_last_bit(
    folder: Path, reference: ReferenceModel, said: Said, workers: int, threads: int
) -> None:
    remote = RemoteModel(PoolHere(folder, workers, threads), reference)
    for here, there in zip(said.logits, remote.forced_logits(reference.encode_pairs(said.pairs)), strict=True):
        assert np.array_equal(here, there)
    assert remote.answer_log_probs(said.pairs) == said.log_probs
    seen: list[tuple[int, int]] = []
    assert remote.generate(said.requests, lambda *at: seen.append(at)) == said.answers
    assert seen[-1] == (400, 400) and seen == sorted(seen)


def test_what_was_tested_spans_batches_and_groups(reference: ReferenceModel) -> None:
    """Else the test above would pass with any division."""
    pairs = text_pairs(400)
    lengths = [len(prompt) + len(answer) for prompt, answer in reference.encode_pairs(pairs)]
    assert len(length_batches(lengths, 2048)) > 4
    requests = [GenerationRequest(prompt, answer, 9) for prompt, answer in pairs]
    decoded = sum(item.tokens > 1 for item in reference.generate(requests))
    assert decoded > 3 * ROWS_PER_STEP


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 120), st.integers(1, 5))
def test_a_run_of_batches_is_cut_into_the_same_batches(lengths: list[int], tokens: int, per_job: int) -> None:
    batches = length_batches(lengths, tokens)
    for run in in_parts(batches, per_job):
        indices = [index for batch in run for index in batch]
        again = length_batches([lengths[index] for index in indices], tokens)
        assert [[indices[at] for at in batch] for batch in again] == run


def trials_of(
    reference: ReferenceModel, folder: Path, data: Path, work: Path, pool: Pool | None
) -> tuple[Trials, UnitStore]:
    store = UnitStore(lower(open_checkpoint(str(folder))), None, "rtn")
    splits = load_splits(str(data), None)
    tasks = (TaskData(splits.task, splits.validation, 40),)
    journal = Journal(work, "same", Disk())
    if pool is None:
        return Trials(reference, store, tasks, 8, no_progress, journal), store
    return ClusterTrials(RemoteModel(pool, reference), store, tasks, 8, no_progress, journal), store


@WORKERS
def test_trials_measure_the_same(
    folder: Path, reference: ReferenceModel, texts: Path, tmp_path: Path, workers: int, threads: int
) -> None:
    found = []
    for name, pool in (("here", None), ("there", PoolHere(folder, workers, threads))):
        trials, store = trials_of(reference, folder, texts, tmp_path / name, pool)
        plain = plain_plan(store.model, store.lowering.spec_16bit, "rtn")
        units = list(plain.units)
        plans = [mixed(plain, {unit: SPECS[0] for unit in units[at:]}) for at in (0, 5, len(units), 5)]
        plans.append(mixed(plain, {}, {"layers.0.query": QuantSpec(4, 32), "lm_head": QuantSpec(4, 32)}))
        first = trials.kl(plans[1], "alone")
        each = list(trials.kl_each((plan, str(at)) for at, plan in enumerate(plans)))
        losses = list(trials.answer_nll_each(plans, store, 4))
        assert trials.answer_nll(plans[0], store, 4) == losses[0] and each[1] == first
        found.append((each, losses, [trial.to_json() for trial in trials.log]))
    assert found[0] == found[1]
    assert len({summary.mean for summary in found[0][0]}) == 4, "the plans differ, and so do their losses"


def mixed(plain: Any, units: dict[UnitKey, QuantSpec], dense: dict[str, QuantSpec] | None = None) -> Any:

    return replace(plain, units={**plain.units, **units}, dense={**plain.dense, **(dense or {})})


@pytest.mark.parametrize("name", ["deepseek-v2-groups-yarn", "gpt-oss", "qwen2-plain-between", "granite-scaled"])
def test_what_a_plan_exchanged_is_put_back_in_every_family(name: str, tmp_path: Path) -> None:
    folder = save_tiny_family(tmp_path / "tiny", TINY_FAMILIES[name])
    reference = ReferenceModel(folder)
    tokens, remote = reference.encode_pairs(text_pairs(12)), RemoteModel(PoolHere(folder, 1, 1), reference)
    trials = ClusterTrials(
        remote,
        UnitStore(lower(open_checkpoint(str(folder))), None, "rtn"),
        (),
        0,
        no_progress,
        None,  # type: ignore[arg-type]
    )
    plain = plain_plan(reference.model, trials.store.lowering.spec_16bit, "rtn")
    shapes = reference.model.dense_shapes()
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and QuantSpec(4, 32).fits(shape[1])]
    coarse = mixed(plain, dict.fromkeys(plain.units, SPECS[0]), dict.fromkeys(matrices, QuantSpec(4, 32)))
    before = remote.forced_logits(tokens)
    for plan in (coarse, mixed(plain, dict.fromkeys(list(plain.units)[::2], SPECS[1])), plain):
        own = {unit: trials.store.weight(unit, spec) for unit, spec in plan.units.items() if spec.bitwidth < 16}
        dense = {key: trials.store.dense_weight(key, spec) for key, spec in plan.dense.items() if spec.bitwidth < 16}
        with reference.weights({**own, **dense}), remote.weights(trials.weights_of(plan)):
            for here, there in zip(reference.forced_logits(tokens), remote.forced_logits(tokens), strict=True):
                assert np.array_equal(here, there)
    for here, there in zip(before, remote.forced_logits(tokens), strict=True):
        assert np.array_equal(here, there)


def test_what_the_journal_has_is_not_measured_again(
    folder: Path, reference: ReferenceModel, texts: Path, tmp_path: Path
) -> None:
    pool = PoolHere(folder, 2, 1)
    for expected in (True, False):
        trials, store = trials_of(reference, folder, texts, tmp_path / "work", pool)
        plain = plain_plan(store.model, store.lowering.spec_16bit, "rtn")
        pool.jobs.clear()
        list(trials.kl_each([(plain, "a"), (mixed(plain, {unit: SPECS[0] for unit in plain.units}), "b")]))
        asked = [job for job in pool.jobs if type(job).__name__ == "Divergences"]
        assert bool(asked) == expected


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    compile_tiny(folder, folder.with_name("tiny-moec"), "uniform", 4)
    return folder.with_name("tiny-moec")


@WORKERS
def test_the_runtime_certifies_the_same(
    folder: Path, reference: ReferenceModel, bundle: Path, workers: int, threads: int
) -> None:
    pairs = [pair for pair in text_pairs(40) if pair[1]]
    tokens = reference.encode_pairs(pairs)
    requests = [GenerationRequest(prompt, None, 5) for prompt, _ in pairs]
    there = RemoteBundle(RemoteModel(PoolHere(folder, workers, threads), reference), bundle)
    with cast(AbstractContextManager[Any], open_partial(bundle)) as here:
        assert there.generate(requests, no_progress) == here.generate(requests, no_progress)
        assert there.answer_log_probs(pairs, no_progress) == here.answer_log_probs(pairs, no_progress)
        for own, other in zip(here.forced_logits(tokens), there.forced_logits(tokens), strict=True):
            assert np.array_equal(own, other)
        assert 0 < there.divergence(tokens).mean < 1


def test_runtimes_share_a_node_and_are_closed(folder: Path, bundle: Path, tmp_path: Path) -> None:
    """Two sides of a certificate stay open at the same time, each in its part of the node's memory."""
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


def test_a_cluster_is_refused_where_it_has_nothing_to_do(folder: Path) -> None:
    model = lower(open_checkpoint(str(folder))).model
    with pytest.raises(OptionError, match="no effect beside `--uniform`"):
        check_cluster("uniform", model)
    check_cluster("kl", model)


@pytest.mark.parametrize("quantizer", ["gptq", "rtn"])
@pytest.mark.parametrize("name", ["deepseek-v2-groups-yarn", "gpt-oss", "qwen2-plain-between", "granite-scaled"])
def test_a_sweep_over_the_layers_is_the_same_with_experts_quantized_elsewhere(
    name: str, quantizer: str, tmp_path: Path
) -> None:
    """Codes, costs and gains, to the last bit; some families store experts transposed, or layers without any."""
    folder = save_tiny_family(tmp_path / "tiny", TINY_FAMILIES[name])
    lowering, rows = lower(open_checkpoint(str(folder))), [[5, 6, 200, 7, 90, 33], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3]]
    dense = plain_plan(lowering.model, lowering.spec_16bit, quantizer).dense
    inputs = SweepInputs(rows, AnswerTexts(rows[:2], [3, 2], []), {}, SPECS, dense, quantizer, 0)
    pool = PoolHere(folder, 3, 2)

    def swept(work: Path, elsewhere: Elsewhere | None) -> SweepResult:
        return Sweep(lowering, inputs, Journal(work, "x", Disk()), 2, elsewhere).run(no_progress)

    here = swept(tmp_path / "here", None)
    there = swept(tmp_path / "there", experts_quantized_by(pool))
    assert len(pool.jobs) > len(lowering.model.expert_layers)
    assert np.array_equal(here.sensitivity.gains, there.sensitivity.gains)
    for key in lowering.model.expert_keys():
        for unit in (UnitKey(*key, projection) for projection in ("gate", "up", "down")):
            for spec in SPECS:
                assert here.store.error(unit, spec) == there.store.error(unit, spec)
                assert np.array_equal(here.store.for_bundle(unit, spec), there.store.for_bundle(unit, spec))


def test_a_worker_of_one_layer_takes_less_than_one_of_all(folder: Path) -> None:
    shape = replace(lower(open_checkpoint(str(folder))).model, hidden_size=2048)
    experts = replace(shape.layers[0].experts, count=64, width=1024)
    model = replace(shape, layers=(replace(shape.layers[0], experts=experts),) * 16)
    assert PROCESS_BYTES < layer_worker_bytes(model, SPECS, 2) < layer_worker_bytes(model, SPECS, 8)
    assert layer_worker_bytes(model, SPECS, 4) < worker_bytes(model) / 5
