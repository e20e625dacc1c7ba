"""Beam search against transformers' own, on random weights where answers end often."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from moec.manifests.errors import ContextOverflow, OptionError
from moec.runtime import load
from moec.runtime.engine.beam import Beam, BeamOptions, beam_search
from moec.runtime.engine.engine import Engine
from tests.gates.bundles import emit_bundle
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.oracle

ENDS = list(range(2, 288, 7))
PROMPT = [5, 60, 31, 7, 90, 8]
NEW_TOKENS = 14


def with_ends(folder: Path, ends: list[int]) -> Path:
    GenerationConfig(eos_token_id=ends, pad_token_id=0, bos_token_id=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("beam")
    return with_ends(save_tiny_mixtral(root / "model", TinyMixtral(seed=21)), ENDS)


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    return emit_bundle(folder, folder.with_name("bundle"))


def expected_beams(folder: Path, options: BeamOptions, tokens: int) -> list[Beam]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = model.generate(
        torch.tensor([PROMPT]), do_sample=False, num_beams=options.beams, num_return_sequences=options.beams,
        length_penalty=options.length_penalty, early_stopping=options.early_stopping, max_new_tokens=tokens,
        return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        answer = row[len(PROMPT) :]
        stop = next((at + 1 for at, token in enumerate(answer) if token in ends), tokens)
        beams.append(Beam(tuple(answer[:stop]), score))
    return beams


def check(found: list[Beam], expected: list[Beam]) -> None:
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    assert [beam.score for beam in found] == pytest.approx([beam.score for beam in expected], abs=1e-4)


@pytest.mark.parametrize("beams", [2, 3, 5, 8, 12])
@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (1.0, True), (0.0, False), (2.0, False), (-0.5, True)])
def test_answers_and_scores_are_those_of_transformers(
    folder: Path, bundle: Path, beams: int, penalty: float, early: bool
) -> None:
    options = BeamOptions(beams, penalty, early)
    expected = expected_beams(folder, options, NEW_TOKENS)
    assert len({len(beam.tokens) for beam in expected}) > 1 or penalty == 2.0  # some end early
    with load(bundle, expert_cache="60%", context=64, slots=beams) as engine:
        check(beam_search(engine, PROMPT, NEW_TOKENS, options), expected)


def test_latent_attention_searches_too(tmp_path: Path) -> None:
    folder = with_ends(save_tiny_family(tmp_path / "model", TINY_FAMILIES["deepseek-v3"]), ENDS)
    options = BeamOptions(4)
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=64, slots=4) as engine:
        check(beam_search(engine, PROMPT, NEW_TOKENS, options), expected_beams(folder, options, NEW_TOKENS))


def test_one_beam_is_greedy(bundle: Path) -> None:
    with load(bundle, expert_cache="100%", context=64) as engine:
        greedy = tuple(step.token_id for step in engine.generate(PROMPT, NEW_TOKENS))
        assert beam_search(engine, PROMPT, NEW_TOKENS, BeamOptions(1))[0].tokens == greedy


def test_a_score_is_the_sum_of_what_the_model_gives_each_token(folder: Path, tmp_path: Path) -> None:
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=64, slots=6) as engine:
        best = beam_search(engine, PROMPT, 5, BeamOptions(6, length_penalty=0.0))[0]
        logits = engine.logits([*PROMPT, *best.tokens])[len(PROMPT) - 1 : -1].astype(np.float64)
        own = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        assert best.score == pytest.approx(sum(own[at, token] for at, token in enumerate(best.tokens)), abs=1e-4)


def engine_of(bundle: Path, slots: int = 1) -> Engine:
    return load(bundle, expert_cache="100%", context=16, slots=slots)


def test_what_cannot_be_searched(bundle: Path) -> None:
    for options in ({"beams": 0}, {"beams": 65}, {"beams": 2, "length_penalty": 11.0}):
        with pytest.raises(OptionError):
            BeamOptions(**options)  # type: ignore[arg-type]
    with engine_of(bundle) as engine:
        with pytest.raises(OptionError, match="2 beams need as many slots, the engine has 1"):
            beam_search(engine, PROMPT, 4, BeamOptions(2))
        with pytest.raises(ContextOverflow):
            beam_search(engine, [5] * 17, 4, BeamOptions(1))
        with pytest.raises(OptionError, match="of 1 or more"):
            beam_search(engine, PROMPT, 0, BeamOptions(1))
    with engine_of(bundle, slots=3) as engine:  # the context ends all beams
        found = beam_search(engine, PROMPT, 100, BeamOptions(3))
        assert max(len(beam.tokens) for beam in found) <= 16 - len(PROMPT) + 1
