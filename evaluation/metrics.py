"""Metrics: functions of (predictions, references) that return the score of each item. Packages of extras are loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moec.manifests.errors import MissingDependency

Scores = NDArray[np.float64]

ROUGE_KINDS = ("rouge2", "rouge1", "rougeL")
_CACHED_WORDS = 1 << 16


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


def load(module: str, purpose: str, extra: str = "eval") -> Any:
    """Import `module`. Raises MissingDependency with the extra that contains it."""
    remedy = f"pip install 'moec[{extra}]'"
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != package:
            raise MissingDependency(
                f"`{package}` needs the package `{error.name}`, which is not installed", remedy
            ) from error
        raise MissingDependency(f"{purpose} needs the package `{package}`, which is not installed", remedy) from error
