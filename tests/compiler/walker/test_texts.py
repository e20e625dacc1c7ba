"""Texts within a limit of tokens."""

from __future__ import annotations

from moec.compiler.walker.texts import TokenTexts


def test_first_texts_are_those_that_fit() -> None:
    texts = TokenTexts([[1] * 4, [1] * 3, [1] * 5], [[2] * 2, [2], [2]])
    assert [len(texts.first(tokens).rows) for tokens in (0, 6, 9, 10, 15, 16, 99)] == [1, 1, 1, 2, 2, 3, 3]
    assert texts.num_tokens == 16 and texts.first(10).prompts == [[2] * 2, [2]]
