"""Every field of the options of a run changes something that can be seen in a run, and only by its name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from moec.manifests.bundle import DENSE_NAME, TABLES_NAME
from moec.manifests.errors import ChecksumMismatch, ContextOverflow, OptionError
from moec.runtime import Engine, RuntimeOptions, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.memory.budget import nominal_memory
from moec.runtime.text.sampling import Sampler, SamplingOptions
from tests.gates.bundles import emit_bundle
from tests.gates.damage import flip, write_tables
from tests.observed_runs import begin_trace, forget_mappings, how_read, reader_threads, threads
from tests.runtime.learned_bundle import with_maps
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.usefixtures("one_thread")  # torch computes on the device
TOKENS = np.random.default_rng(3).integers(4, 260, 36).tolist()
PREFILL = 20
LAYERS, EXPERTS = 4, 8
SMALL = {"expert_cache": "40%", "context": 64, "prefetch": "off"}
AHEAD = {"expert_cache": "60%", "context": 64, "prefetch_rule": "spread"}
BESIDE = {**SMALL, "accelerator": "torch-cpu", "accelerator_memory": "1MiB", "accelerator_dense": "host"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 bits, low versions of 2, tables of a calibration that saw experts at random, random maps."""
    root, draw = tmp_path_factory.mktemp("effects"), np.random.default_rng(5)
    shape = TinyMixtral(layers=LAYERS, experts=EXPERTS, top_k=4, seed=5)
    target = emit_bundle(save_tiny_mixtral(root / "model", shape), root / "bundle", bitwidth=8, low="q2g32")
    popularity = draw.integers(1, 99, (LAYERS, EXPERTS)).astype(np.uint32)
    transitions = draw.integers(1, 99, (LAYERS - 1, EXPERTS, EXPERTS)).astype(np.uint32)
    write_tables(target, popularity=popularity, transitions=transitions)
    return with_maps(target, root / "learned")


def run(engine: Engine) -> np.ndarray:
    """Logits [T, V] of a prefill and of decode steps."""
    engine.cache.finish_warming()
    engine.begin_sequence()
    rows = [engine.logits(TOKENS[:PREFILL])]
    rows += [engine.decode([TOKENS[at]], [0], [at]) for at in range(PREFILL, len(TOKENS))]
    return np.concatenate(rows)


def counted(engine: Engine) -> dict[str, int]:
    run(engine)
    return engine.cache.stats.replayable_counts()


def advised(engine: Engine) -> list[tuple[tuple[int, ...], ...]]:
    """Experts that are read ahead, by pass and layer."""
    tracer = begin_trace(engine)
    run(engine)
    tracer.end()
    return [each.advice for each in tracer.passes]


def decided(engine: Engine) -> dict[str, Any]:
    """Return the decisions of lossy modes; empty for an exact run."""
    run(engine)
    return {} if engine.mode_counts is None else {**engine.mode_counts.to_plain()}


def kernel_threads(engine: Engine) -> int:
    """Threads that a prefill of many tokens leaves, none of them Python's."""
    engine.logits(TOKENS)
    return len(threads() - {thread.native_id or 0 for thread in threading.enumerate()})


def readers(engine: Engine) -> int:
    run(engine)
    return reader_threads(engine)


def advice_cpus(engine: Engine) -> set[int]:
    """Return the processors of the last reader, which reads ahead."""
    run(engine)
    own = [thread for thread in threading.enumerate() if thread.name == f"moec-reader-{engine.options.readers}"]
    return os.sched_getaffinity(own[-1].native_id or 0)


def shared(engine: Engine) -> dict[str, Any]:
    """Return where experts were computed; empty without an accelerator."""
    run(engine)
    used = engine.model.accelerator
    return {} if used is None else {"counts": used.counts, "resident": len(used.placement.resident)}


def refusal(engine: Engine, error: type[Exception], call: Callable[[Engine], object]) -> bool:
    try:
        call(engine)
    except error:
        return True
    return False


def long_prompt(engine: Engine) -> list[Any]:
    return list(engine.generate(TOKENS, 2))


def two_beams(engine: Engine) -> list[Any]:
    return beam_search(engine, TOKENS[:4], 3, BeamOptions(2))


class Effect(NamedTuple):
    """value: that is not the default. others: what both runs have besides.

    seen: what differs between the two; each part of a tuple does. needs: what the value alone asks for.
    """

    value: Any
    others: dict[str, Any]
    seen: Callable[[Engine], Any]
    needs: dict[str, Any] = {}  # noqa: RUF012


def nominal_floor(engine: Engine) -> int:
    return nominal_memory(engine.bundle.manifest, engine.options).floor_bytes


EFFECTS: dict[str, Effect] = {
    "memory": Effect("3GiB", {}, lambda engine: engine.memory.budget_bytes == 3 << 30),
    "expert_cache": Effect("40%", {}, lambda engine: (counted(engine)["evictions"], engine.cache.capacity_bytes)),
    "context": Effect(30, {"expert_cache": "40%"}, lambda engine: refusal(engine, ContextOverflow, long_prompt)),
    "policy": Effect("lru", SMALL, counted),
    "policy, of decisions": Effect("lru", {**SMALL, "lossy": "cache-routing margin=0.05"}, decided),
    "policy_weights": Effect("0,0,0,1", {**SMALL, "policy": "hobbit"}, counted),
    "policy_weights, of decisions": Effect(
        "0,0,0,1", {**SMALL, "policy": "hobbit", "lossy": "cache-routing margin=0.05"}, decided
    ),
    "prefetch": Effect("path", AHEAD, advised),
    "io": Effect("mmap", SMALL, lambda engine: how_read(engine.bundle.path / engine.bundle.manifest.experts[0].file)),
    "kv": Effect("float16", SMALL, lambda engine: (run(engine).tobytes(), engine.memory.kv_bytes)),
    "threads": Effect(9, SMALL, kernel_threads),
    "slots": Effect(2, SMALL, lambda engine: (refusal(engine, OptionError, two_beams), engine.memory.kv_bytes)),
    "other_bytes": Effect(9 << 20, SMALL, nominal_floor),
    "verify": Effect(False, SMALL, lambda engine: engine.storage.verifies),
    "readers": Effect(5, SMALL, readers),
    "prefetch_layers": Effect(1, AHEAD, advised),
    "prefetch_experts": Effect(3, AHEAD, advised),
    "prefetch_rule": Effect("spread", {"expert_cache": "60%", "context": 64}, advised),
    "reader_cpus": Effect(str(min(os.sched_getaffinity(0))), {**AHEAD, "prefetch_rule": "until-routed"}, advice_cpus),
    "learned_routers": Effect(False, {"expert_cache": "60%", "context": 64}, advised),
    "cache_state": Effect("cold", SMALL, lambda engine: (counted(engine), engine.cache.stats.warm_reads)),
    "lossy": Effect("dynamic-precision 0,1", SMALL, decided),
    "lossy, a little model": Effect("big-little gamma=0.9", SMALL, decided),
    "lossy, the cache": Effect("cache-routing margin=0.9", SMALL, decided),
    "accelerator": Effect("torch-cpu", SMALL, shared, {"accelerator_memory": "1MiB"}),
    "accelerator_memory": Effect("2MiB", BESIDE, shared),
    "cooperation": Effect("cpu", BESIDE, shared),
    "accelerator_dense": Effect(
        "device",
        {**BESIDE, "accelerator_memory": "64MiB"},
        lambda engine: engine.model.dense_part is not engine.dense_on_host[0],
    ),
}


def test_every_field_has_an_effect() -> None:
    assert {name.partition(",")[0] for name in EFFECTS} == {field.name for field in fields(RuntimeOptions)}


@pytest.mark.parametrize("field", EFFECTS)
def test_a_field_has_its_effect(bundle: Path, field: str) -> None:
    """Equal options give equal results twice, and another value of the field gives other results."""
    value, others, seen, needs = EFFECTS[field]
    name = field.partition(",")[0]

    def shown(**options: Any) -> tuple[Any, ...]:
        forget_mappings(bundle)
        with load(bundle, **{**others, **options}) as engine:
            found = seen(engine)
            return found if isinstance(found, tuple) else (found,)

    default = getattr(RuntimeOptions(**others), name)
    assert value != default
    plain, changed = shown(), shown(**{name: value}, **needs)
    assert plain == shown(**{name: default})
    assert all(one != other for one, other in zip(plain, changed, strict=True))


@pytest.mark.parametrize("part", ["experts", DENSE_NAME, TABLES_NAME])
def test_bytes_are_checked_unless_that_is_refused(bundle: Path, part: str) -> None:
    opened = open_bundle(bundle)
    expert, counts = opened.manifest.experts[0], opened.headers[TABLES_NAME]["popularity"]
    file = bundle / (expert.file if part == "experts" else part)
    place = {"experts": expert.offset_bytes, TABLES_NAME: counts.offset_bytes}.get(part, file.stat().st_size - 1)
    flip(file, place)
    try:
        with pytest.raises(ChecksumMismatch), load(bundle, **SMALL) as engine:
            run(engine)
        with load(bundle, **SMALL, verify=False) as engine:
            run(engine)
    finally:
        flip(file, place)


LOGITS = np.array([2.0, 1.9, 1.0, 0.5, -1.0], np.float32)
HOT: dict[str, Any] = {"temperature": 1.0}
SAMPLING: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (3.0, HOT),
    "top_k": (2, HOT),
    "top_p": (0.5, HOT),
    "min_p": (0.8, HOT),
    "repetition_penalty": (50.0, {}),
    "seed": (9, HOT),
    "presence_penalty": (9.0, {}),
    "frequency_penalty": (9.0, {}),
    "logit_bias": (((4, 50.0),), {}),
}


def test_every_field_of_sampling_has_an_effect() -> None:
    assert set(SAMPLING) == {field.name for field in fields(SamplingOptions)}


@pytest.mark.parametrize("field", SAMPLING)
def test_a_field_of_sampling_has_its_effect(field: str) -> None:
    value, others = SAMPLING[field]

    def drawn(**options: Any) -> list[int]:
        sampler = Sampler(SamplingOptions(**{**others, **options}))
        return [sampler(LOGITS, [0, 0], 1) for _ in range(60)]

    assert drawn() == drawn() != drawn(**{field: value})


# Beams are compared with those of transformers for values of every field, in test_beam.py.
def test_every_field_of_beams_is_compared() -> None:
    assert {field.name for field in fields(BeamOptions)} == {"beams", "length_penalty", "early_stopping"}
