"""Replayed decisions of lossy modes have the shares of the record."""

from __future__ import annotations

from bench.yardstick.throttled.replayed import Shares


def test_shares_of_answers_and_of_prompts_are_over_their_own_missed_experts() -> None:
    answers = {"missed": 200, "low": 80, "skipped": 40, "replaced": 20, "dropped": 10}
    prompts = {"prompt_missed": 50, "prompt_low": 25, "prompt_skipped": 5}
    found = Shares.of_counts({**answers, **prompts, "tokens": 30, "fallback_tokens": 6})
    assert found == Shares(0.4, 0.2, 0.1, 0.05, fallback=0.2, prompt_low=0.5, prompt_skipped=0.1)
    assert Shares.of_counts({**answers, "tokens": 30, "fallback_tokens": 6}) == Shares(0.4, 0.2, 0.1, 0.05, 0.2, 0, 0)
