"""The output head: log probabilities, a part of the tokens at a time."""

from __future__ import annotations

import pytest
import torch

from moec.compiler.walker.output_head import OutputHead

TOKENS, HIDDEN, VOCABULARY = 23, 16, 50


@pytest.mark.parametrize("tokens", [1, 5, 23, 100])
def test_log_probabilities_do_not_depend_on_how_many_tokens_are_held(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    head = OutputHead(torch.randn(VOCABULARY, HIDDEN).bfloat16(), torch.randn(VOCABULARY))
    states = torch.randn(TOKENS, HIDDEN)
    expected = head.logits(states).double().log_softmax(-1)
    whole = head.log_probs(states)
    monkeypatch.setattr("moec.compiler.walker.output_head.LOGITS_PER_CHUNK", tokens * VOCABULARY)
    found = head.log_probs(states)
    assert torch.equal(found, whole) and found.shape == (TOKENS, VOCABULARY)
    assert (found - expected).abs().max() < 1e-5
