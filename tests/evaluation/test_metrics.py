"""Metrics against values computed by hand and against the packages they stand for."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.evaluation.metrics import ROUGE_KINDS, item_perplexities, perplexity, rouge
from moec.evaluation.tasks.answer_text import NUMBER, AnswerText, answer_number
from moec.manifests.errors import MissingDependency


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("<<2+3=5>>5 apples.\n#### 5", "5"),
        ("#### 1,234", "1234"),
        ("####7", "7"),
        ("#### $1,000.50", "1000.5"),
        ("#### -3", "-3"),
        ("#### -$3", "-3"),
        ("#### +3", "3"),
        ("#### -0.00", "0"),
        ("#### 007", "7"),
        ("#### 18.00", "18"),
        ("#### .5", "0.5"),
        ("#### 5.", "5"),
        ("#### 4\n\nQuestion: and 9?\n#### 9", "4"),
        ("no mark, 3 then 12 pieces.", "12"),
        ("it is 10-3", "3"),
        ("it is -3", "-3"),
        ("9 #### none", "9"),
        ("a price of $1,200.", "1200"),
        ("nothing", None),
        ("", None),
        ("####", None),
        (", . -", None),
        ("#### " + "9" * 5000, "9" * 5000),
        ("#### 1 000 000", "1"),
        ("#### 1\u00a0000", "1"),
        ("#### 1\u202f000", "1"),
        ("it is \u22125", "5"),
        ("#### \u22125", "5"),
        ("it is \uff15", None),
        ("it is \u0665", None),
    ],
)
def test_number_of_a_solution(text: str, number: str | None) -> None:
    assert answer_number(text) == number


@given(st.integers(-(10**12), 10**12), st.integers(0, 4))
def test_spelling_of_a_number_does_not_matter(value: int, zeros: int) -> None:
    spelled = f"#### {value:,}" + ("." + "0" * zeros if zeros else "")
    assert answer_number(spelled) == str(value)
    assert AnswerText(compare=NUMBER).exact_match([spelled], [f"{value}"]).tolist() == [1.0]


@given(st.text(max_size=60))
def test_any_text_has_a_number_or_none(text: str) -> None:
    found = answer_number(text)
    assert found is None or answer_number(f"#### {found}") == found


def test_exact_match_scores_each_item() -> None:
    predictions = ["#### 5", "so 5", "#### 6", "", "#### 1,000"]
    references = ["#### 5", "#### 5", "#### 5", "#### 5", "#### 1000"]
    assert AnswerText(compare=NUMBER).exact_match(predictions, references).tolist() == [1, 1, 0, 0, 1]
    with pytest.raises(ValueError, match="zip"):
        AnswerText(compare=NUMBER).exact_match(["1"], [])


def test_rouge_by_hand() -> None:
    # "Ann runs home" / "Ann ran home now": unigrams 2 of 3 and 2 of 4, no common pair, subsequence of 2
    scores = rouge(["Ann runs home"], ["Ann ran home now"])
    assert scores["rouge1"][0] == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert scores["rouge2"][0] == 0
    assert scores["rougeL"][0] == scores["rouge1"][0]
    assert rouge(["walking dogs"], ["walked dog"])["rouge2"][0] == 1.0  # the stemmer
    assert rouge([""], ["something"])["rouge2"].tolist() == [0.0]
    assert rouge(["one"], ["one"])["rouge2"].tolist() == [0.0]  # no pairs in one word


_WORDS = st.lists(
    st.sampled_from(["Ann", "will", "meet", "the", "running", "dogs", "at", "7", ",", "happily", "école"]), max_size=12
)


@given(st.lists(st.tuples(_WORDS, _WORDS), min_size=1, max_size=5))
def test_rouge_equals_the_package(pairs: list[tuple[list[str], list[str]]]) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE_KINDS), use_stemmer=True)
    predictions, references = [" ".join(p) for p, _ in pairs], [" ".join(r) for _, r in pairs]
    ours = rouge(predictions, references)
    for at, (prediction, reference) in enumerate(zip(predictions, references, strict=True)):
        theirs = scorer.score(reference, prediction)
        assert all(ours[kind][at] == theirs[kind].fmeasure for kind in ROUGE_KINDS)


def test_rouge_of_4000_summaries_in_six_seconds() -> None:
    rng = random.Random(5)
    words = [f"word{i}ing" for i in range(800)]
    references = [" ".join(rng.choices(words, k=18)) for _ in range(4000)]
    predictions = [" ".join(w for w in text.split() if rng.random() < 0.8) for text in references]
    started = time.process_time()
    rouge(predictions, references)
    assert time.process_time() - started < 6


def test_perplexity_pools_tokens() -> None:
    nll, tokens = np.array([2.0, 6.0, 0.0]), np.array([1.0, 3.0, 0.0])
    assert perplexity(nll, tokens) == pytest.approx(np.exp(2))
    each = item_perplexities(nll, tokens)
    assert each[:2] == pytest.approx(np.exp([2, 2]))
    assert np.isnan(each[2])
    assert np.isnan(perplexity(np.zeros(1), np.zeros(1)))
    assert perplexity(np.array([1e6]), np.ones(1)) == np.inf


@pytest.mark.parametrize("package", ["rouge_score", "nltk"])
def test_rouge_without_its_packages(monkeypatch, package: str) -> None:
    from moec.evaluation import metrics

    metrics.rouge_scorer.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rouge_score", "nltk")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=rf"needs the package `{package}`"):
        rouge(["a"], ["a"])


def test_a_package_that_lacks_its_own_dependency_is_named(tmp_path, monkeypatch) -> None:
    from moec.evaluation.metrics import load

    (tmp_path / "half_installed.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependency, match="`half_installed` needs the package `not_there_at_all`"):
        load("half_installed", "this")


def test_import_loads_numpy_and_the_standard_library_only() -> None:
    code = (
        "import sys, moec.evaluation.run\n"
        "heavy = {'torch', 'transformers', 'datasets', 'evaluate', 'rouge_score', 'nltk', 'pyarrow', 'scipy'}\n"
        "found = heavy & {name.partition('.')[0] for name in sys.modules}\n"
        "found |= {n for n in sys.modules if n.startswith(('moec.compiler', 'moec.runtime', 'moec.cli'))}\n"
        "sys.exit(', '.join(sorted(found)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
