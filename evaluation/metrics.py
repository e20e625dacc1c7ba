"""Metrics: functions of (predictions, references) that return the score of each item."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .optional import load

Scores = NDArray[np.float64]

ROUGE_KINDS = ("rouge2", "rouge1", "rougeL")
_NUMBER = r"[+-]?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
_MARKED = re.compile(r"####[ \t]*\$?(" + _NUMBER + ")")
_ANYWHERE = re.compile(r"(?:(?<![\w.)])[+-])?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_CACHED_WORDS = 1 << 16


def gsm8k_number(text: str) -> str | None:
    """Return the answer in a solution: the first number after `####`, else the last number of the text.

    Equal numbers give equal strings: no commas, currency sign, plus, leading zeros, or trailing zeros after the point.
    None if there is no number.
    """
    marked = _MARKED.search(text)
    if marked:
        return _plain_number(marked.group(1))
    found = _ANYWHERE.findall(text)
    return _plain_number(found[-1]) if found else None


def _plain_number(text: str) -> str:
    digits = text.replace(",", "").replace("$", "").lstrip("+-")
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return "-" + value if text.startswith("-") and value != "0" else value


def exact_match_gsm8k(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """Return 1 where the numbers of prediction and reference are equal, else 0; [n].

    Without a number the score is 0.
    """
    numbers = ((gsm8k_number(p), gsm8k_number(r)) for p, r in zip(predictions, references, strict=True))
    return np.array([float(p is not None and p == r) for p, r in numbers], dtype=np.float64)


def rouge(
    predictions: Sequence[str], references: Sequence[str], kinds: Sequence[str] = ROUGE_KINDS
) -> dict[str, Scores]:
    """Return F1 of each kind with stemmer, 0 to 1, [n] each.

    Raises MissingDependency without `rouge_score`.
    Source: Lin, ROUGE, 2004, as in the package `rouge_score`.
    """
    scorer = rouge_scorer(tuple(kinds))
    rows = [scorer.score(reference, prediction) for prediction, reference in zip(predictions, references, strict=True)]
    return {kind: np.array([row[kind].fmeasure for row in rows], dtype=np.float64) for kind in kinds}


class _StemCache:
    """The tokenizer of `rouge_score` with a cache for its Porter stemmer: 4,000 summaries take about a second."""

    def __init__(self) -> None:
        stem: Callable[[str], str] = load("nltk.stem.porter", "Rouge").PorterStemmer().stem
        self.stem = lru_cache(maxsize=_CACHED_WORDS)(stem)
        self._split = load("rouge_score.tokenize", "Rouge").tokenize

    def tokenize(self, text: str) -> Any:
        return self._split(text, self)


@lru_cache(maxsize=8)
def rouge_scorer(kinds: tuple[str, ...]) -> Any:
    """Return the scorer of these kinds, made once. Raises MissingDependency without `rouge_score` or `nltk`."""
    return load("rouge_score.rouge_scorer", "Rouge").RougeScorer(list(kinds), tokenizer=_StemCache())


def perplexity(nll: Scores, tokens: Scores) -> float:
    """Return exp(sum of nll / sum of tokens). Infinite if it does not fit a float, nan without tokens.

    nll: in nats.
    """
    count = float(np.sum(tokens))
    with np.errstate(over="ignore"):
        return float(np.exp(np.sum(nll) / count)) if count > 0 else float("nan")


def item_perplexities(nll: Scores, tokens: Scores) -> Scores:
    """Return the perplexity of each text, [n]; nan for a text without scored tokens."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return np.where(tokens > 0, np.exp(nll / tokens), np.nan)
