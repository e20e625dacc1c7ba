"""G9 for models with an encoder: a 16-bit bundle computes what transformers computes from the same 16-bit values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.runtime import load
from moec.runtime.engine.beam import BeamOptions, beam_search
from tests.gates.bundles import emit_bundle, stepwise_logits
from tests.tiny_models import VOCABULARY
from tests.tiny_switch import START, TINY_SWITCHES, Oracle, save_tiny_switch

pytestmark = pytest.mark.oracle

PROMPT_TOKENS, PREFILL, DECODE_STEPS = 60, 8, 32
TOLERANCE = 1e-3  # of the largest logit
DRAW = np.random.default_rng(7)
PROMPT = DRAW.integers(3, VOCABULARY, PROMPT_TOKENS).tolist()
TOKENS = [START, *DRAW.integers(3, VOCABULARY, PREFILL + DECODE_STEPS - 1).tolist()]


@pytest.fixture(scope="module", params=TINY_SWITCHES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its bundle."""
    root = tmp_path_factory.mktemp(request.param)
    folder = save_tiny_switch(root / "model", TINY_SWITCHES[request.param])
    return folder, emit_bundle(folder, root / "bundle")


@pytest.mark.gate("G9")
def test_logits_equal_transformers(made: tuple[Path, Path]) -> None:
    """Compare encoder, a prefill of the decoder, and decode steps."""
    expected = Oracle(made[0]).logits(PROMPT, TOKENS)
    with load(made[1], expert_cache="100%", context=128) as engine:
        found = stepwise_logits(engine, TOKENS, PREFILL, PROMPT)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.gate("G9")
def test_the_capacity_drops_tokens_of_the_encoder(tmp_path: Path) -> None:
    """Without the capacity the logits differ, so the gate would find its absence."""
    folder = save_tiny_switch(tmp_path / "model", TINY_SWITCHES["switch-capacity"])
    oracle = Oracle(folder)
    before = oracle.logits(PROMPT, TOKENS[:2])
    for name, module in oracle.model.named_modules():
        if name.startswith("encoder") and name.endswith(".router"):
            module.expert_capacity = PROMPT_TOKENS
    assert np.abs(oracle.logits(PROMPT, TOKENS[:2]) - before).max() > 10 * TOLERANCE * np.abs(before).max()


@pytest.mark.gate("G9")
def test_greedy_continuations_equal_transformers(made: tuple[Path, Path]) -> None:
    oracle = Oracle(made[0])
    with load(made[1], expert_cache="100%", context=128) as engine:
        for prompt in (PROMPT, PROMPT[:1], PROMPT[5:30]):
            found = [step.token_id for step in engine.generate(prompt, max_new_tokens=DECODE_STEPS)]
            assert found == oracle.greedy(prompt, DECODE_STEPS)


@pytest.mark.gate("G9")
@pytest.mark.parametrize("name", ["switch", "switch-small-steps"])
def test_generate_equals_transformers_generate(name: str, tmp_path: Path) -> None:
    """Compare greedy decoding and beams with transformers' loops, which need stacks of equal height."""
    folder = save_tiny_switch(tmp_path / "model", TINY_SWITCHES[name])
    model, inputs = Oracle(folder).model, torch.tensor([PROMPT])
    expected = model.generate(inputs, do_sample=False, max_new_tokens=DECODE_STEPS)[0, 1:].tolist()
    beams = model.generate(
        inputs, do_sample=False, num_beams=3, num_return_sequences=3, max_new_tokens=9, return_dict_in_generate=True,
        output_scores=True,
    )  # fmt: skip
    ends = model.config.eos_token_id if isinstance(model.config.eos_token_id, list) else [model.config.eos_token_id]
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=128, slots=3) as engine:
        assert [step.token_id for step in engine.generate(PROMPT, max_new_tokens=DECODE_STEPS)] == expected
        found = beam_search(engine, PROMPT, 9, BeamOptions(3))
    assert [beam.score for beam in found] == pytest.approx(beams.sequences_scores.tolist(), abs=1e-4)
    for beam, row in zip(found, beams.sequences[:, 1:].tolist(), strict=True):
        end = next((at + 1 for at, token in enumerate(row) if token in ends), len(row))
        assert list(beam.tokens) == row[:end]


@pytest.mark.gate("G9")
@pytest.mark.parametrize("is_tied", [True, False])
def test_older_layouts_equal_transformers(is_tied: bool, tmp_path: Path) -> None:
    """Test copies of the embedding on disk, and an output matrix that is scaled but wrongly called tied."""
    folder = save_tiny_switch(tmp_path / "model")
    tensors = load_file(folder / WEIGHTS_NAME)
    shared = tensors["shared.weight"]
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    tensors.update({name: shared.clone() for name in names})
    tensors["lm_head.weight"] = shared.clone() if is_tied else shared.roll(5, 0) * 2
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    expected = Oracle(folder).logits(PROMPT, TOKENS[:6])
    with load(emit_bundle(folder, tmp_path / "bundle"), expert_cache="100%", context=128) as engine:
        found = engine.logits(TOKENS[:6], PROMPT)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
