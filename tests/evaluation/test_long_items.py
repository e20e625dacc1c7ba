"""Items that exceed the context are cut, left out or refused, each named with its length."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.evaluation.long_items import POLICIES, Context, fit_items
from moec.evaluation.tasks import find_task
from moec.manifests.errors import ContextOverflow, DataError, OptionError

TEXT, SAMSUM, GSM8K, PIQA = (find_task(name) for name in ("perplexity", "samsum", "gsm8k", "piqa"))


def words(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """Return a token per word."""
    return [([0] * len(prompt.split()), [0] * len(answer.split())) for prompt, answer in pairs]


def dialogue(count: int) -> dict[str, str]:
    return {"dialogue": " ".join(f"w{n}" for n in range(count)), "summary": "a b c"}


def test_a_document_loses_its_end_and_nothing_else() -> None:
    items = [dialogue(5), dialogue(40)]
    fitted = fit_items(SAMSUM, items, (), Context(20, words))
    assert fitted.items[0] == items[0] and fitted.items[1]["summary"] == "a b c" and not fitted.left_out
    # 2 words of the prompt, 3 of the summary, and the end token.
    assert fitted.items[1]["dialogue"] == " ".join(f"w{n}" for n in range(14))
    assert fitted.changes(20) == ["1 items lose the end of their text: item 1 has 46 tokens; the context has 20"]


def test_a_question_is_never_cut() -> None:
    items = [{"question": "word " * 30, "answer": "#### 1"}, {"question": "short", "answer": "#### 2"}]
    fitted = fit_items(GSM8K, items, (), Context(20, words))
    assert fitted.items == (items[1],) and not fitted.shortened
    assert fitted.changes(20) == ["1 items are left out: item 0 has 35 tokens; the context has 20"]


def test_policies() -> None:
    items = [dialogue(5), dialogue(40)]
    assert fit_items(SAMSUM, items, (), Context(20, words), "skip").items == (items[0],)
    with pytest.raises(ContextOverflow, match=r"item 1 has 46 tokens .*context has 20 .*--long-items truncate"):
        fit_items(SAMSUM, items, (), Context(20, words), "refuse")
    for policy in POLICIES:
        assert fit_items(SAMSUM, items, (), Context(46, words), policy).items == tuple(items)
    with pytest.raises(OptionError, match="`--long-items cut` is not known"):
        fit_items(SAMSUM, items, (), Context(20, words), "cut")
    with pytest.raises(DataError, match="none of 2 items fits a context of 4 tokens"):
        fit_items(SAMSUM, items, (), Context(4, words))


def test_solved_examples_take_their_part_of_the_context() -> None:
    shots = [dialogue(6)]
    whole = fit_items(SAMSUM, [dialogue(9)], shots, Context(30, words))
    assert not whole.shortened
    assert len(fit_items(SAMSUM, [dialogue(20)], shots, Context(30, words)).items[0]["dialogue"].split()) == 13


def test_every_given_answer_has_to_fit() -> None:
    row = {"goal": "open it", "sol1": "turn", "sol2": "word " * 30, "label": 0}
    assert PIQA.read is not None
    with pytest.raises(DataError):
        fit_items(PIQA, [PIQA.read(row)], (), Context(20, words))
    assert fit_items(PIQA, [PIQA.read(row)], (), Context(40, words)).items


def test_a_huge_text_is_not_encoded() -> None:
    seen: list[int] = []

    def encode(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        seen.extend(len(prompt) + len(answer) for prompt, answer in pairs)
        return words(pairs)

    fitted = fit_items(TEXT, [{"text": "word " * 1_000_000}], (), Context(50, encode))
    assert 0 < len(fitted.items[0]["text"].split()) <= 49 and max(seen) <= 32 * 50


def test_a_text_that_memory_cannot_encode_is_too_long() -> None:
    fitted = fit_items(
        TEXT, [{"text": "word " * 30}], (), Context(100, words, is_encodable=lambda text: len(text) < 60)
    )
    assert len(fitted.items[0]["text"]) < 60 and fitted.shortened
    with pytest.raises(ContextOverflow):
        fit_items(TEXT, [{"text": "word " * 30}], (), Context(100, words, is_encodable=lambda text: False), "refuse")


def test_an_encoder_has_a_context_of_its_own() -> None:
    assert fit_items(SAMSUM, [dialogue(17)], (), Context(19, words, has_encoder=True)).items == (dialogue(17),)
    assert fit_items(SAMSUM, [dialogue(18)], (), Context(19, words, has_encoder=True)).shortened


@given(st.text("ab \n\u3000é", max_size=200), st.integers(3, 40))
def test_what_is_kept_fits_and_is_a_start(text: str, context: int) -> None:
    """Tokens are characters here, so words may have to be cut too."""

    def encode(pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        return [([0] * len(prompt), [0] * len(answer)) for prompt, answer in pairs]

    try:
        fitted = fit_items(TEXT, [{"text": text}], (), Context(context, encode))
    except DataError:
        assert len(text) + 1 > context and not text[: context - 1].strip()
        return
    kept = fitted.items[0]["text"]
    assert text.startswith(kept) and len(kept) + 1 <= context
    assert kept == text or fitted.shortened
