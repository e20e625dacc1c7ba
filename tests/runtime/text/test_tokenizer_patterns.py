"""Regular expressions of tokenizers: those of published models are taken, those without a bound are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from moec.manifests.tokenizer.regex_cost import CostlyPattern, check_pattern

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
PATTERNS = (GPT2, QWEN, O200K, CL100K, DEEPSEEK, "[一-龥]+", r"\p{N}{1,3}", r"\s+$", r"[\r\n]", " {2,}",
            r"(?:\r?\n)+", r"\s?[A-Za-zµÀ-Ö]+", r" ?[^(\s|[.,!?])]+", r"[\p{Lo}&&[^\p{Han}]]+",
            r"\d{1,3}(?=(?:\d{3})*\b)")  # fmt: skip
COSTLY = ("(a+)+$", "(a|a)*b", "a*a*b", "(?:a?){40}b", r"(a)\1", "(?:a|b)*c", ".*.*=", "(?:x*)*y",
          "a{1,9999}b{1,9999}c", "(" * 50, "[a", "a(?i)b|c", "(?=.*a.*b)x", "(?:.*a){3}b", "a" * 5000,
          r"\X+")  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_published_models(pattern: str) -> None:
    assert check_pattern(pattern) >= 1


@pytest.mark.parametrize("pattern", COSTLY)
def test_patterns_without_bound(pattern: str) -> None:
    with pytest.raises(CostlyPattern):
        check_pattern(pattern)


ATOMS = st.sampled_from(["a", "b", "[ab]", r"\s", ".", r"\p{L}", "^", "$"])
GRAMMAR = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,3}", "+?", "++"])).map("".join),
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(st.sampled_from(["(?:", "(?>", "(?=", "(?!"]), inner, st.just(")")).map("".join),
    ),
    max_leaves=8,
)


@given(GRAMMAR)
def test_accepted_patterns_never_reach_the_limit_of_the_library(pattern: str) -> None:
    """The library panics after ten million steps at one position."""
    try:
        check_pattern(pattern)
    except CostlyPattern:
        return
    try:
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:  # a form that the library refuses with an error
        return
    for text in ("a" * 3000 + "!", "ab" * 1500, " " * 3000):
        splitter.pre_tokenize_str(text)
