"""`self-test.json`: what is written is read, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import BundleError, ManifestInvalid, UnknownFormatVersion
from moec.manifests.self_test import MAX_TEXTS, MAX_TOKENS, SelfTest, SelfTestText, decode_self_test, encode_self_test

VOCABULARY = 300
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=MAX_TOKENS).map(tuple)
DIGEST = "0123456789abcdef" * 4
TEST = SelfTest(1, (SelfTestText((), (1, 2, 3)),), DIGEST)


@given(st.data(), st.booleans())
def test_what_is_written_is_read(data: st.DataObject, has_encoder: bool) -> None:
    prompts = TOKENS if has_encoder else st.just(())
    texts = data.draw(st.lists(st.builds(SelfTestText, prompts, TOKENS), min_size=1, max_size=MAX_TEXTS))
    test = SelfTest(data.draw(st.integers(1, 1000)), tuple(texts), DIGEST)
    assert decode_self_test(encode_self_test(test), "f", VOCABULARY, has_encoder) == test
    assert test.token_count == sum(len(text.tokens) for text in texts)


@given(st.binary(max_size=400))
def test_bytes_that_are_no_self_test_are_refused(data: bytes) -> None:
    with pytest.raises(BundleError):
        decode_self_test(data, "f", VOCABULARY, False)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"texts": []}, "1 to 8 texts"),
        ({"texts": [{"prompt": [], "tokens": []}]}, "1 to 64 tokens"),
        ({"texts": [{"prompt": [], "tokens": [VOCABULARY]}]}, "tokens from 0 to 299"),
        ({"texts": [{"prompt": [], "tokens": [True]}]}, "tokens from 0 to 299"),
        ({"texts": [{"prompt": [4], "tokens": [1]}]}, "no prompt, because the model has no encoder"),
        ({"texts": [{"tokens": [1]}]}, "`prompt` and `tokens`"),
        ({"texts": [{"prompt": [], "tokens": [1]}] * 9}, "1 to 8 texts"),
        ({"logits_sha256": "abc"}, "64 hexadecimal digits"),
        ({"format_version": "1"}, "a number as `format_version`"),
        ({"more": 1}, "the keys of a self-test"),
        ({"arithmetic": 0}, "1 to 1000000 as `arithmetic`"),
        ({"arithmetic": 1.0}, "1 to 1000000 as `arithmetic`"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], expected: str) -> None:
    plain = json.loads(encode_self_test(TEST)) | change
    with pytest.raises(ManifestInvalid) as caught:
        decode_self_test(json.dumps(plain).encode(), "bundle/self-test.json", VOCABULARY, False)
    assert f"`bundle/self-test.json`: expected {expected}, found " in str(caught.value)


def test_another_version_and_another_form_are_refused() -> None:
    plain = json.loads(encode_self_test(TEST))
    with pytest.raises(UnknownFormatVersion, match="format version 2, this moec reads 1"):
        decode_self_test(json.dumps(plain | {"format_version": 2}).encode(), "f", VOCABULARY, False)
    with pytest.raises(ManifestInvalid, match="not in the form that `moec compile` writes"):
        decode_self_test(json.dumps(plain, indent=1).encode(), "f", VOCABULARY, False)
    with pytest.raises(ManifestInvalid, match="1 to 64 tokens"):
        decode_self_test(encode_self_test(TEST), "f", VOCABULARY, True)
