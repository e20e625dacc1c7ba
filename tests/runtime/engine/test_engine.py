"""One sequence from prompt to end, and what an engine says to those who ask too much of it."""

from __future__ import annotations

import gc
import os
import shutil
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from moec.manifests.errors import (
    ChecksumMismatch,
    ContextOverflow,
    ExecutionError,
    InputError,
    OptionError,
)
from moec.runtime import Engine, kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine import engine as engine_module
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.storage.read_storage import ReadStorage
from moec.runtime.text.sampling import SamplingOptions
from tests.runtime.cache_kinds import kernels_of

CONTEXT = 64
PROMPT = [5, 60, 31, 7, 90, 2, 8]


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with load(tiny_bundle, expert_cache="50%", context=CONTEXT) as opened:
        yield opened


def tokens(engine: Engine, **sampling: float) -> list[int]:
    chosen = SamplingOptions(**sampling) if sampling else None  # type: ignore[arg-type]
    return [step.token_id for step in engine.generate(PROMPT, max_new_tokens=12, sampling=chosen)]


def test_greedy_follows_the_logits(engine: Engine) -> None:
    sequence = list(PROMPT)
    for step in list(engine.generate(PROMPT, max_new_tokens=5)):
        assert step.token_id == int(np.argmax(engine.logits(sequence)[-1])) and step.position == len(sequence)
        sequence.append(step.token_id)
    assert len(sequence) == len(PROMPT) + 5


def test_steps_add_up(engine: Engine) -> None:
    before = engine.cache.stats.copy()
    steps = list(engine.generate("Hello \U0001f600", max_new_tokens=6))
    assert [step.finish_reason for step in steps] == [None] * 5 + ["length"]
    assert all(step.elapsed_ns > 0 for step in steps)
    total = CacheStats()
    for step in steps:
        total = total.plus(step.cache)
    gained = engine.cache.stats.since(before)
    assert total.lookups == gained.lookups > 0 and total.hits + total.misses == total.lookups
    expected = engine.tokenizer.decode([step.token_id for step in steps])
    assert "".join(step.text for step in steps) == expected


def test_a_prompt_longer_than_the_context(engine: Engine) -> None:
    for call in (engine.generate, engine.logits):
        with pytest.raises(ContextOverflow, match=f"the prompt has {CONTEXT + 1} tokens, the context holds {CONTEXT}"):
            call([5] * (CONTEXT + 1))
    with pytest.raises(ContextOverflow, match="500 tokens"):
        engine.generate("x" * 500)
    assert len(list(engine.generate([5] * CONTEXT))) == 1 and engine.logits([5] * CONTEXT).shape == (CONTEXT, 288)


def test_a_generation_ends_where_the_context_does(engine: Engine) -> None:
    steps = list(engine.generate([5] * (CONTEXT - 3), max_new_tokens=100))
    assert len(steps) == 4 and steps[-1].finish_reason == "length" and steps[-1].position == CONTEXT


def test_prompts_that_make_no_sense(engine: Engine) -> None:
    for call in (engine.generate, engine.logits):
        with pytest.raises(InputError, match="the prompt is empty"):
            call([])
        for wrong in (288, -1, 1 << 40):
            with pytest.raises(InputError, match=f"token id {wrong} is outside the vocabulary of 288"):
                call([5, wrong])
        for foreign in (float("nan"), "a", 1.5, True):
            with pytest.raises(InputError, match="token ids must be whole numbers"):
                call([5, foreign])
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.generate("")
    for limit in (0, -1, 1.5, True):
        with pytest.raises(OptionError, match=f"max_new_tokens must be a whole number of 1 or more, found {limit}"):
            engine.generate([5], max_new_tokens=limit)  # type: ignore[arg-type]


def test_a_prompt_longer_than_a_pass(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, answer = engine.logits(range(5, 50)), tokens(engine)
    for size in (1, 4, 44):
        monkeypatch.setattr(engine_module, "MAX_PASS_TOKENS", size)
        assert np.array_equal(engine.logits(range(5, 50)).view(np.uint32), whole.view(np.uint32))
        assert tokens(engine) == answer


def test_seeds(engine: Engine, tiny_bundle: Path) -> None:
    first = tokens(engine, temperature=1.5, seed=1)
    with load(tiny_bundle, expert_cache="100%", context=CONTEXT, policy="lfu", prefetch="off") as other:
        assert tokens(other, temperature=1.5, seed=1) == first == tokens(engine, temperature=1.5, seed=1)
        assert tokens(other, temperature=1.5, seed=2) != first
        # Two engines in turn do not disturb each other.
        pairs = zip(engine.generate(PROMPT, max_new_tokens=12), other.generate(PROMPT, max_new_tokens=12), strict=True)
        found = [(a.token_id, b.token_id) for a, b in pairs]
        assert found == [(token, token) for token in tokens(engine)]


def test_a_generation_that_is_given_up_leaves_nothing_behind(engine: Engine) -> None:
    expected = tokens(engine)
    running = engine.generate(PROMPT, max_new_tokens=50)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert not engine.cache.leased().size and tokens(engine) == expected


def test_a_kernel_that_raises_leaves_no_lease(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(engine)
    with monkeypatch.context() as broken:
        broken.setattr(kernels, "experts_layer", lambda *rest: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            engine.logits(PROMPT)
    # The traceback still holds the frames of the failed pass.
    assert caught.tb is not None and not engine.cache.leased().size
    assert tokens(engine) == expected


def test_a_closed_engine_says_so(tiny_bundle: Path) -> None:
    for share in ("100%", "50%"):
        with load(tiny_bundle, expert_cache=share, context=CONTEXT) as opened:
            assert len(tokens(opened)) == 12
        for call in (lambda closed=opened: tokens(closed), lambda closed=opened: closed.logits([5])):
            with pytest.raises(ExecutionError, match="closed"):
                call()
        opened.close()


def test_a_damaged_expert_is_refused_when_it_is_used_and_no_file_stays_open(tiny_bundle: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(tiny_bundle, tmp_path / "own"))
    entry = open_bundle(own).manifest.experts[4]
    with (own / entry.file).open("r+b") as file:
        file.seek(entry.offset_bytes)
        file.write(b"damage")
    before = sorted(os.listdir("/proc/self/fd"))
    for io in ("direct", "buffered", "mmap"):
        with (
            load(own, expert_cache="100%", context=CONTEXT, io=io) as engine,
            pytest.raises(ChecksumMismatch, match=f"expert {entry.expert} of layer {entry.layer}"),
        ):
            engine.logits(range(CONTEXT - 1))
        del engine
    gc.collect()  # the errors hold the frames, these the mapped files
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_mode_says_what_is_on(engine: Engine) -> None:
    for part in ("streaming, exact", "(50% of experts)", "policy lrfu", "prefetch lookahead"):
        assert part in engine.mode


def test_a_generation_that_another_call_took_over_says_so(tiny_bundle: Path) -> None:
    with load(tiny_bundle, expert_cache="100%", context=64) as engine:
        alone = [step.token_id for step in engine.generate([5, 6, 7], max_new_tokens=6)]
        first = engine.generate([5, 6, 7], max_new_tokens=6)
        assert next(first).token_id == alone[0]
        engine.logits([9, 8, 7, 6])
        with pytest.raises(ExecutionError, match="another call has taken over"):
            next(first)
        second, third = (engine.generate([5, 6, 7], max_new_tokens=6) for _ in range(2))
        assert next(second).token_id == next(third).token_id == alone[0]
        with pytest.raises(ExecutionError, match="another call has taken over"):
            next(second)
        assert [step.token_id for step in third] == alone[1:]


@pytest.mark.parametrize(("context", "hint"), [(64, "shorten it or raise `--context`"), (128, "shorten it")])
def test_a_longer_context_is_proposed_only_if_the_model_has_one(tiny_bundle: Path, context: int, hint: str) -> None:
    with (
        load(tiny_bundle, expert_cache="100%", context=context) as engine,
        pytest.raises(ContextOverflow) as refused,
    ):
        engine.logits([5] * 200)
    assert refused.value.hint == hint


def test_a_prompt_that_is_not_utf_8_is_refused(tiny_bundle: Path) -> None:
    with (
        load(tiny_bundle, expert_cache="100%", context=64) as engine,
        pytest.raises(InputError, match="not UTF-8 at character 2"),
    ):
        next(engine.generate("ab\udcff", max_new_tokens=1))


def test_memory_may_be_a_number_of_bytes(tiny_bundle: Path) -> None:
    with load(tiny_bundle, memory=3 << 30) as engine:
        assert engine.memory.budget_bytes == 3 << 30
    with pytest.raises(OptionError, match="must be a text"):
        load(tiny_bundle, memory=True)


def test_a_forked_child_is_told_to_load_its_own(tiny_bundle: Path) -> None:
    with load(tiny_bundle, expert_cache="100%", context=64) as engine:
        engine.logits([5, 6])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 1
            try:
                engine.logits([5, 6])
            except ExecutionError as error:
                code = 42 if "forked" in error.message else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        assert len(engine.logits([5, 6])) == 2


@pytest.mark.parametrize("cache_state", ["warm", "cold"])
def test_memory_is_made_ready_for_a_warm_start(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, cache_state: str
) -> None:
    asked, made_ready = list[bool](), ReadStorage.made_ready

    def noted(storage: ReadStorage, is_wanted: bool) -> AbstractContextManager[None]:
        asked.append(is_wanted)
        return made_ready(storage, is_wanted)

    monkeypatch.setattr(ReadStorage, "made_ready", noted)
    with load(tiny_bundle, cache_state=cache_state, io="buffered"):
        assert asked == [cache_state == "warm"]


@pytest.mark.parametrize("new_tokens", [0, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"expert_cache": "50%"},
        {"expert_cache": "100%", "cache_state": "cold"},  # no reader starts before the first token
        {"memory": "4GiB"},
        {"expert_cache": "50%", "policy": "edgemoe", "prefetch_rule": "first-miss"},
        {"expert_cache": "50%", "io": "mmap"},
        {"expert_cache": "50%", "lossy": "dynamic-precision 0.6,0.6"},
    ],
)
def test_a_closed_engine_is_freed_at_once(tiny_bundle: Path, options: dict[str, str], new_tokens: int) -> None:
    """Its memory is there for the next one, without a collection of cycles."""
    gc.collect()
    gc.disable()
    try:
        engine = load(tiny_bundle, context=CONTEXT, **options)
        if new_tokens:
            list(engine.generate(PROMPT, max_new_tokens=new_tokens))
        parts = [weakref.ref(part) for part in (engine, engine.model, engine.cache, engine.storage)]
        engine.close()
        del engine
        assert [type(part()) for part in parts if part() is not None] == []
    finally:
        gc.enable()


def test_overflow_in_the_head_gives_no_warning_and_reaches_the_logits(tiny_bundle: Path) -> None:
    """Sampling refuses such logits. A warning of numpy would be an error of the suite."""
    with kernels_of(kernels.NUMPY), load(tiny_bundle, expert_cache="50%", context=32) as engine:
        hidden = np.full((1, engine.model.spec.hidden_size), 1e30, np.float32)
        hidden[0, 0] = np.inf
        assert np.isnan(engine.model.logits(hidden)).any()
