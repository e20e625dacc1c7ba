"""`self-test.json`: a few texts as tokens, and the digest of the logits that the compile computed for them.

Source: docs/format.md, Self-test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .codec import canonical_json
from .errors import ManifestInvalid, UnknownFormatVersion
from .files.limits import SELF_TEST_JSON
from .files.strict_json import load_strict_json, shown

SELF_TEST_NAME = "self-test.json"
FORMAT_VERSION = 1
MAX_TEXTS, MAX_TOKENS, MAX_ARITHMETIC = 8, 64, 1_000_000
_KEYS = {"format_version", "arithmetic", "logits_sha256", "texts"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COPY_AGAIN = "copy the bundle again, or compile it again"


@dataclass(frozen=True, slots=True)
class SelfTestText:
    """One text as tokens.

    prompt: what an encoder reads; empty without an encoder.
    tokens: tokens whose logits count.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """A self-test.

    arithmetic: number of the arithmetic that computed the logits, from 1.
    texts: the texts, 1 to MAX_TEXTS.
    logits_sha256: SHA-256 of the logits after every token of every text in order, float32 little-endian.
    """

    arithmetic: int
    texts: tuple[SelfTestText, ...]
    logits_sha256: str

    @property
    def token_count(self) -> int:
        """Number of tokens whose logits count."""
        return sum(len(text.tokens) for text in self.texts)


def encode_self_test(test: SelfTest) -> bytes:
    """Return the bytes of `self-test.json`. Equal tests give equal bytes."""
    texts = [{"prompt": list(text.prompt), "tokens": list(text.tokens)} for text in test.texts]
    plain = {"arithmetic": test.arithmetic, "logits_sha256": test.logits_sha256, "texts": texts}
    return canonical_json({"format_version": FORMAT_VERSION, **plain})


def decode_self_test(data: bytes, place: str, vocabulary: int, has_encoder: bool) -> SelfTest:
    """Return the self-test of a `self-test.json`.

    place: the file, for messages.
    vocabulary: number of tokens of the model.
    has_encoder: whether the texts need prompts.
    Raises ManifestInvalid with place, expected and found value. Raises UnknownFormatVersion.
    """
    try:
        plain = load_strict_json(data, SELF_TEST_JSON)
    except ValueError as error:
        raise ManifestInvalid(f"`{place}` is not strict JSON: {error}", _COPY_AGAIN) from error
    _require(isinstance(plain, dict), place, "an object", plain)
    version = plain.get("format_version")
    _require(type(version) is int, place, "a number as `format_version`", version)
    if version != FORMAT_VERSION:
        raise UnknownFormatVersion(
            f"`{place}` has format version {shown(version)}, this moec reads {FORMAT_VERSION}", "install a newer moec"
        )
    _require(set(plain) == _KEYS, place, "the keys of a self-test", list(plain))
    digest, texts, arithmetic = plain["logits_sha256"], plain["texts"], plain["arithmetic"]
    is_number = type(arithmetic) is int and 1 <= arithmetic <= MAX_ARITHMETIC
    _require(is_number, place, f"1 to {MAX_ARITHMETIC} as `arithmetic`", arithmetic)
    _require(isinstance(digest, str) and bool(_DIGEST.fullmatch(digest)), place, "64 hexadecimal digits", digest)
    _require(isinstance(texts, list) and 1 <= len(texts) <= MAX_TEXTS, place, f"1 to {MAX_TEXTS} texts", texts)
    test = SelfTest(arithmetic, tuple(_text(text, place, vocabulary, has_encoder) for text in texts), digest)
    if encode_self_test(test) != data:
        raise ManifestInvalid(f"`{place}` is not in the form that `moec compile` writes", _COPY_AGAIN)
    return test


def _text(plain: Any, place: str, vocabulary: int, has_encoder: bool) -> SelfTestText:
    _require(isinstance(plain, Mapping) and set(plain) == {"prompt", "tokens"}, place, "`prompt` and `tokens`", plain)
    prompt = _tokens(plain["prompt"], place, vocabulary, 1 if has_encoder else 0)
    _require(has_encoder or not prompt, place, "no prompt, because the model has no encoder", plain["prompt"])
    return SelfTestText(prompt, _tokens(plain["tokens"], place, vocabulary, 1))


def _tokens(plain: Any, place: str, vocabulary: int, least: int) -> tuple[int, ...]:
    is_list = isinstance(plain, list) and least <= len(plain) <= MAX_TOKENS
    _require(is_list, place, f"{least} to {MAX_TOKENS} tokens", plain)
    for token in plain:
        _require(type(token) is int and 0 <= token < vocabulary, place, f"tokens from 0 to {vocabulary - 1}", token)
    return tuple(plain)


def _require(holds: bool, place: str, expected: str, value: Any) -> None:
    if not holds:
        raise ManifestInvalid(f"`{place}`: expected {expected}, found {shown(value)}", _COPY_AGAIN)
