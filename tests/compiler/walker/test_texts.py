"""Texts within a limit of tokens."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from moec.compiler.walker.texts import Embed, TextStates, TokenTexts


def embedder() -> tuple[Embed, weakref.ref[Tensor]]:
    """An embedding by a table, and whether the table is still in memory."""
    table = torch.ones(8, 4)
    return (lambda ids: table[ids]), weakref.ref(table)


def test_first_texts_are_those_that_fit() -> None:
    texts = TokenTexts([[1] * 4, [1] * 3, [1] * 5], [[2] * 2, [2], [2]])
    assert [len(texts.first(tokens).rows) for tokens in (0, 6, 9, 10, 15, 16, 99)] == [1, 1, 1, 2, 2, 3, 3]
    assert texts.num_tokens == 16 and texts.first(10).prompts == [[2] * 2, [2]]


def test_texts_of_a_decoder_do_not_keep_the_embedding() -> None:
    embed, table = embedder()
    texts = TextStates.begin(TokenTexts([[1, 2]]), embed)
    del embed
    assert table() is None and texts.copy().tokens().shape == (2, 4)


def test_texts_of_an_encoder_keep_the_embedding_until_the_decoder_begins() -> None:
    embed, table = embedder()
    texts = TextStates.begin(TokenTexts([[1, 2]], [[3, 4, 5]]), embed)
    copy = texts.copy()
    del embed
    for each in (texts, copy):
        assert table() is not None
        each.begin_decoding(lambda states: states)
    assert table() is None and copy.tokens().shape == (2, 4)
