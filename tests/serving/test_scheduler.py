"""Many requests at once give, bit for bit, what each gives alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import OptionError, StorageReadFailed
from moec.runtime import Engine, load
from moec.runtime.text.sampling import SamplingOptions
from moec.serving.engine.request import PromptScored, TokenMade
from moec.serving.engine.scheduler import QueueFull, Scheduler, ServingOptions, ShuttingDown
from tests.serving.engine_requests import Asked, ask

CONTEXT, VOCABULARY, SLOTS = 96, 288, 3
LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 60, 88)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with load(tiny_bundle, expert_cache="60%", context=CONTEXT, slots=SLOTS) as opened:
        yield opened


@pytest.fixture
def scheduler(engine: Engine) -> Iterator[Scheduler]:
    with Scheduler(engine) as running:
        yield running


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(2)
    return [generator.integers(4, VOCABULARY, length).tolist() for length in LENGTHS]


def alone(engine: Engine, prompt: list[int], count: int = 8, **options: Any) -> list[int]:
    sampling = options.pop("sampling", None)
    return [step.token_id for step in engine.generate(prompt, count, sampling, **options)]


@pytest.mark.parametrize("prefill_tokens", [1, 7, 256])
def test_an_answer_does_not_depend_on_other_requests(engine: Engine, prefill_tokens: int) -> None:
    sampling = [SamplingOptions(), SamplingOptions(temperature=0.9, top_p=0.9, seed=3)]
    expected = [alone(engine, prompt, sampling=sampling[at % 2]) for at, prompt in enumerate(prompts())]
    asked = [Asked(prompt, sampling=sampling[at % 2]) for at, prompt in enumerate(prompts())]
    with Scheduler(engine, ServingOptions(prefill_tokens=prefill_tokens)) as scheduler:
        ask(scheduler, *asked)
    assert [each.tokens for each in asked] == expected


def test_log_probabilities_have_the_same_bits_next_to_other_requests(engine: Engine) -> None:
    def found(count: int) -> list[list[object]]:
        asked = [Asked(prompt, 6, log_probs=2) for prompt in prompts()[4:10]]
        with Scheduler(engine, ServingOptions(prefill_tokens=5)) as scheduler:
            for start in range(0, len(asked), count):
                ask(scheduler, *asked[start : start + count])
        return [list(each.events[:-1]) for each in asked]

    assert found(1) == found(6)


def test_requests_share_passes(engine: Engine, scheduler: Scheduler) -> None:
    passes = scheduler.activity.passes
    asked = [Asked(prompt, 20) for prompt in prompts()[:SLOTS]]
    scheduler.submit([each.request for each in asked])
    for each in asked:
        each.wait()
    assert scheduler.activity.passes - passes <= 22


def test_the_next_turn_computes_only_what_is_new(engine: Engine, scheduler: Scheduler) -> None:
    first = Asked(prompts()[9])
    ask(scheduler, first)
    conversation = [*prompts()[9], *first.tokens, 5, 6, 7]
    second = Asked(conversation)
    ask(scheduler, second)
    assert second.tokens == alone(engine, conversation)
    assert second.ended.timings.cached_tokens == len(prompts()[9]) + len(first.tokens) - 1


def test_equal_prompts_are_computed_once_and_copied(engine: Engine, scheduler: Scheduler) -> None:
    asked = [Asked(prompts()[10], sampling=SamplingOptions(temperature=1.0, seed=seed)) for seed in range(SLOTS)]
    scheduler.submit([each.request for each in asked])
    kept = sorted(each.ended.timings.cached_tokens for each in asked)
    assert kept == [0, LENGTHS[10] - 1, LENGTHS[10] - 1]
    for seed, each in enumerate(asked):
        assert each.tokens == alone(engine, prompts()[10], sampling=SamplingOptions(temperature=1.0, seed=seed))


def test_what_another_caller_has_overwritten_is_not_reused(engine: Engine, scheduler: Scheduler) -> None:
    expected = alone(engine, prompts()[10])
    for _ in range(2):
        engine.logits(prompts()[11])  # in the first slot
        asked = Asked(prompts()[10])
        ask(scheduler, asked)
        assert asked.tokens == expected and asked.ended.timings.cached_tokens == 0


def test_a_cancelled_request_leaves_its_prefix(engine: Engine, scheduler: Scheduler) -> None:
    gone = Asked(prompts()[9], CONTEXT)
    scheduler.submit([gone.request])
    gone.wait_for_token()
    scheduler.cancel([gone.request])
    assert gone.failed.code == "cancelled"
    again = Asked(prompts()[9])
    ask(scheduler, again)
    assert again.ended.timings.cached_tokens == LENGTHS[9] - 1
    assert again.tokens == alone(engine, prompts()[9])


def test_a_waiting_request_can_be_cancelled_alone(engine: Engine, scheduler: Scheduler) -> None:
    running = [Asked(prompt, 30) for prompt in prompts()[4:7]]
    waiting = [Asked(prompt) for prompt in prompts()[7:9]]
    scheduler.submit([each.request for each in (*running, *waiting)])
    scheduler.cancel([waiting[0].request])
    assert waiting[0].failed.code == "cancelled"
    assert [each.tokens for each in (*running, waiting[1]) if each.wait()] == [
        *(alone(engine, prompt, 30) for prompt in prompts()[4:7]),
        alone(engine, prompts()[8]),
    ]


def test_a_full_queue_refuses_all_of_a_request(engine: Engine) -> None:
    with Scheduler(engine, ServingOptions(queue=1)) as scheduler:
        with pytest.raises(QueueFull):
            scheduler.submit([Asked([5]).request for _ in range(SLOTS + 2)])
        assert scheduler.waiting == 0
        assert Asked([5]).events == []


def test_deadlines_end_requests(engine: Engine, scheduler: Scheduler) -> None:
    late = Asked(prompts()[3], deadline_s=0.0)
    scheduler.submit([late.request])
    assert late.failed.code == "deadline_exceeded"
    assert scheduler.activity.requests == {"deadline_exceeded": 1}


def test_after_stop_nothing_is_taken(engine: Engine) -> None:
    scheduler = Scheduler(engine)
    with scheduler:
        running = Asked(prompts()[2], CONTEXT)
        scheduler.submit([running.request])
        running.wait_for_token()
        scheduler.drain()
        assert running.ended.reason in ("stop", "length")
    with pytest.raises(ShuttingDown):
        scheduler.submit([Asked([5]).request])
    assert not scheduler.is_alive


@pytest.mark.gate("G16")
@pytest.mark.parametrize("moment", ["longest", "place"])
@pytest.mark.parametrize("ends_running", [False, True])
def test_a_shutdown_while_a_request_gets_its_slot(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, moment: str, ends_running: bool
) -> None:
    """`longest` runs before the request is taken out of the queue, and `place` after it."""
    first, second = Asked(prompts()[2], CONTEXT), Asked(prompts()[7], CONTEXT)
    with Scheduler(engine) as scheduler:
        found = getattr(scheduler.pool, moment)

        def drained(tokens: Sequence[int], **options: Any) -> Any:
            if tokens == second.request.tokens:
                other = threading.Thread(target=scheduler.drain, args=(ends_running,))
                other.start()
                other.join()
            return found(tokens, **options)

        monkeypatch.setattr(scheduler.pool, moment, drained)
        scheduler.submit([first.request])
        first.wait_for_token()
        scheduler.submit([second.request])
        ends = [getattr(each.wait(), "code", "ended") for each in (first, second)]
    at_once = ["cancelled", "shutting_down" if moment == "longest" else "cancelled"]
    in_order = ["ended", "shutting_down" if moment == "longest" else "ended"]
    assert ends == (at_once if ends_running else in_order)


def test_log_probabilities_are_those_of_the_logits(engine: Engine, scheduler: Scheduler) -> None:
    prompt = prompts()[7]
    asked = Asked(prompt, 4, log_probs=3, scores_prompt=True)
    ask(scheduler, asked)
    scored, *made = [event for event in asked.events if isinstance(event, PromptScored | TokenMade)]
    assert isinstance(scored, PromptScored)
    text = [*prompt, *asked.tokens]
    logits = engine.logits(text[:-1]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    found = [*scored.tokens, *(event.log_prob for event in made if isinstance(event, TokenMade))]
    assert len(found) == len(text) - 1
    for row, token, each in zip(expected, text[1:], found, strict=True):
        assert each is not None and each.token_id == token
        assert each.log_prob == pytest.approx(row[token], abs=1e-5)
        assert [index for index, _ in each.likeliest] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [value for _, value in each.likeliest] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-5)


def test_a_prompt_alone_can_be_scored(engine: Engine, scheduler: Scheduler) -> None:
    asked = Asked(prompts()[5], 0, log_probs=0, scores_prompt=True)
    ask(scheduler, asked)
    assert [type(event) for event in asked.events[:-1]] == [PromptScored]
    assert asked.ended.reason == "length"


def test_stop_texts_end_an_answer(engine: Engine, scheduler: Scheduler) -> None:
    whole = Asked(prompts()[6], 20)
    ask(scheduler, whole)
    stop = whole.text[3:6]
    asked = Asked(prompts()[6], 20, stop=(stop,))
    ask(scheduler, asked)
    assert asked.text == whole.text[: whole.text.index(stop)]
    assert (asked.ended.reason, asked.ended.stop_text) == ("stop", stop)


def test_a_failed_pass_ends_only_requests_that_fail_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of one request has a token that no pass can compute."""
    step, bad = engine.step, 9
    texts = [[token if token != bad else 10 for token in prompt] for prompt in prompts()[4:7]]
    expected = [alone(engine, texts[0]), alone(engine, texts[2])]
    if any(bad in each for each in expected):
        pytest.skip("an answer has the token")

    def failing(tokens: list[int], *places: Any) -> np.ndarray:
        if bad in tokens:
            raise StorageReadFailed("expert 3 of layer 1 cannot be read")
        return step(tokens, *places)

    monkeypatch.setattr(engine, "step", failing)
    with Scheduler(engine) as scheduler:
        asked = [Asked(texts[0]), Asked([*texts[1], bad]), Asked(texts[2])]
        scheduler.submit([each.request for each in asked])
        assert asked[1].failed.code == "StorageReadFailed"
        assert [each.tokens for each in (asked[0], asked[2]) if each.ended] == expected


def test_a_fault_is_reported_and_the_server_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    step, faults, told = engine.step, [RuntimeError("broken")], list[BaseException]()

    def failing(*values: Any) -> np.ndarray:
        if faults:
            raise faults.pop()
        return step(*values)

    monkeypatch.setattr(engine, "step", failing)
    with Scheduler(engine, report=told.append) as scheduler:
        asked = Asked(prompts()[4])
        ask(scheduler, asked)
        assert asked.failed.code == "engine_failed" and str(told[0]) == "broken"
        again = Asked(prompts()[4])
        ask(scheduler, again)
        assert again.tokens == alone_after(engine, prompts()[4], step, monkeypatch)


def alone_after(engine: Engine, prompt: list[int], step: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(engine, "step", step)
    return alone(engine, prompt)


def test_lossy_runs_answer_and_go_token_by_token(tiny_bundle: Path) -> None:
    options = {"expert_cache": "60%", "context": CONTEXT, "lossy": "big-little gamma=0.9,k=1"}
    with load(tiny_bundle, slots=2, **options) as engine:
        expected = [alone(engine, prompt) for prompt in prompts()[4:8]]
        with Scheduler(engine) as scheduler:
            asked = [Asked(prompt) for prompt in prompts()[4:8]]
            ask(scheduler, *asked)
        assert [each.tokens for each in asked] == expected
        counts = engine.mode_counts
        assert counts is not None and counts.tokens == 2 * sum(len(each) - 1 for each in expected)


@pytest.mark.gate("G16")
def test_a_long_prompt_comes_in_a_few_tokens_at_a_time_while_an_answer_runs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, sizes = engine.step, list[int]()

    def counted(tokens: list[int], *places: Any) -> np.ndarray:
        sizes.append(len(tokens))
        return step(tokens, *places)

    monkeypatch.setattr(engine, "step", counted)
    with Scheduler(engine, ServingOptions(prefill_tokens=5)) as scheduler:
        running = Asked(prompts()[0], 80, sampling=SamplingOptions(logit_bias=((2, -100.0),)))
        scheduler.submit([running.request])
        running.wait_for_token()
        before = len(sizes)
        long = Asked(prompts()[11], 1)
        ask(scheduler, long)
        while_both = sizes[before:]
        assert running.ended.reason == "length" and long.ended.timings.prompt_tokens == LENGTHS[11]
    assert max(while_both) == 1 + 5 and while_both.count(6) >= LENGTHS[11] // 5


def test_the_least_recently_used_prefix_goes_first(engine: Engine, scheduler: Scheduler) -> None:
    """Three slots and four conversations: the fourth takes the slot of the second, because the first went on."""

    def kept(prompt: list[int]) -> int:
        asked = Asked(prompt, 2)
        ask(scheduler, asked)
        return asked.ended.timings.cached_tokens

    first, second, third, fourth = ([start, *prompts()[7]] for start in (20, 21, 22, 23))
    assert [kept(each) for each in (first, second, third)] == [0, 0, 0]
    assert kept(first) == len(first) - 1
    assert kept(fourth) == 0
    assert [kept(each) for each in (first, third, fourth)] == [len(first) - 1] * 3
    assert kept(second) == 0


@pytest.mark.parametrize("options", [{"queue": -1}, {"prefill_tokens": 0}])
def test_options_are_checked(options: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        ServingOptions(**options)
