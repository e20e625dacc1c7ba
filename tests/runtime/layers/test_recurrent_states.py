"""Slots with recurrent states: texts go on where a state is, with the bits of a run that computes everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import ExecutionError, StorageReadFailed
from moec.profiles.memory_floor import kv_bytes
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.batch import generate_many
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.engine.continuations import score_continuations
from moec.runtime.engine.engine import Engine
from moec.runtime.engine.slots import KEPT_BEFORE_END
from moec.runtime.layers.recurrent_states import RecurrentStates, SlotRun
from tests.gates.bundles import emit_bundle
from tests.tiny_families import TINY_FAMILIES, save_tiny_family

TEXT = np.random.default_rng(3).integers(4, 250, 60).tolist()
OTHER = np.random.default_rng(4).integers(4, 250, 60).tolist()


@pytest.fixture(scope="module", params=["lfm2", "qwen3-next"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recurrent")
    return emit_bundle(save_tiny_family(root / "model", TINY_FAMILIES[request.param]), root / "bundle")


def opened(bundle: Path, **options: Any) -> Engine:
    return load(bundle, context=96, **options)


def answer(engine: Engine, prompt: list[int], reused: int) -> list[int]:
    """Return an answer of six tokens that did not compute so many tokens of its prompt."""
    steps = list(engine.generate(prompt, 6, reuses_prefix=True))
    assert {step.reused_tokens for step in steps} == {reused}
    return [step.token_id for step in steps]


def alone(bundle: Path, prompt: list[int]) -> list[int]:
    with opened(bundle) as engine:
        return [step.token_id for step in engine.generate(prompt, 6)]


def test_the_next_turn_goes_on_where_the_last_one_ended(bundle: Path) -> None:
    with opened(bundle, slots=2) as engine:
        first = TEXT[:40]
        said = answer(engine, first, 0)
        assert said == alone(bundle, first)
        # The last token of an answer was not computed.
        following = first + said + OTHER[:5]
        assert answer(engine, following, len(first) + len(said) - 1) == alone(bundle, following)


def test_a_turn_that_is_written_in_another_way_goes_on_before_its_end(bundle: Path) -> None:
    with opened(bundle) as engine:
        first = TEXT[:40]
        answer(engine, first, 0)
        changed = first[:-3] + OTHER[:8]
        kept = len(first) - KEPT_BEFORE_END
        assert answer(engine, changed, kept) == alone(bundle, changed)
        again = changed[:20] + OTHER[10:30]  # before every state: computed as a whole
        assert answer(engine, again, 0) == alone(bundle, again)


def test_texts_that_part_share_their_beginning_from_the_third_on(bundle: Path) -> None:
    with opened(bundle, slots=3) as engine:
        shared = TEXT[:30]
        prompts = [shared + OTHER[at : at + 20] for at in range(0, 40, 10)]
        found = [answer(engine, prompt, reused) for prompt, reused in zip(prompts, (0, 0, 30, 30), strict=True)]
        assert found == [alone(bundle, prompt) for prompt in prompts]


def test_drafts_that_are_wrong_leave_no_trace(bundle: Path) -> None:
    prompts = [TEXT[:25], TEXT[:25] + OTHER[:6], OTHER[:9], OTHER[:30]]
    expected = [alone(bundle, prompt) for prompt in prompts]
    right = [tokens[:6] for tokens in expected]
    for change in (0, 1, 3, 5):
        drafts = [tokens[:change] + [9] * 4 for tokens in right]
        with opened(bundle, slots=3) as engine:
            assert generate_many(engine, prompts, drafts, [6] * len(prompts)) == expected
    shared = [TEXT[:25] + OTHER[at : at + 4] for at in range(6)]
    expected = [alone(bundle, prompt) for prompt in shared]
    drafts = [tokens[:2] + [9] * 3 for tokens in expected]
    with opened(bundle, slots=3) as engine:
        assert generate_many(engine, shared, drafts, [6] * len(shared)) == expected


def test_continuations_of_one_context_do_not_disturb_each_other(bundle: Path) -> None:
    groups = [(TEXT[:20], [OTHER[at : at + 5] for at in range(5)]), (TEXT[:22], [OTHER[:3], OTHER[5:6]])]
    with opened(bundle, slots=2) as engine:
        together = list(score_continuations(engine, groups))
        assert together == list(score_continuations(engine, groups))  # the slots hold the contexts now
    for (context, continuations), scores in zip(groups, together, strict=True):
        for continuation, score in zip(continuations, scores, strict=True):
            with opened(bundle) as engine:
                ((apart,),) = score_continuations(engine, [(context, [continuation])])
            assert apart == score


def test_beams_are_those_of_slots_of_their_own(bundle: Path) -> None:
    """Beams that exchange their slots all the time find what a run finds that computes each beam from its beginning."""
    with opened(bundle, slots=3) as engine:
        found = beam_search(engine, TEXT[:20], 6, BeamOptions(3))
        for beam in found:
            rows = engine.logits([*TEXT[:20], *beam.tokens])[19:-1]
            shifted = rows - rows.max(axis=1, keepdims=True)
            log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            total = sum(float(log_probs[at, token]) for at, token in enumerate(beam.tokens))
            assert beam.score * len(beam.tokens) == pytest.approx(total, abs=1e-4)


def test_a_pass_that_fails_loses_the_state_and_nothing_else(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(bundle) as engine:
        engine.begin_sequence()
        engine.prefill(TEXT[:20])
        forward = engine.model.forward

        def failing(*arguments: Any, **options: Any) -> np.ndarray:
            forward(*arguments, **options)
            raise StorageReadFailed("a file cannot be read", "copy it again")

        with monkeypatch.context() as patched:
            patched.setattr(engine.model, "forward", failing)
            with pytest.raises(StorageReadFailed):
                engine.step(TEXT[20:22], [0, 0], [20, 21])
        assert engine.kv.usable(0, 20) == 0
        with pytest.raises(ExecutionError, match="no state after 20 positions"):
            engine.step(TEXT[20:22], [0, 0], [20, 21])
        assert answer(engine, TEXT[:30], 0) == alone(bundle, TEXT[:30])


def test_states_are_in_the_budget(bundle: Path) -> None:
    with opened(bundle, slots=2) as engine:
        model, states = engine.model.spec, engine.kv.states
        assert states is not None and model.state_bytes > 0
        arrays = [array for layer in states.layers.values() for array in layer[:-1]]
        assert sum(array.nbytes for array in arrays) == 2 * 2 * model.state_bytes
        held = sum(array.nbytes for array in (*engine.kv.keys, *engine.kv.values) if array is not None)
        assert engine.memory.kv_bytes == kv_bytes(model, 96, 2) == held + 4 * model.state_bytes


def test_the_first_text_of_a_slot_writes_its_state_before_it_reads_it(bundle: Path) -> None:
    model = open_bundle(bundle).manifest.model
    states = RecurrentStates(model, 2, lambda shape: np.ones(shape, np.float32))
    states.begin_pass([SlotRun(1, 0, 4)])
    for live in (array for arrays in states.layers.values() for array in arrays[:-1:2]):
        assert not live[1].any()
        assert live[0].all()
