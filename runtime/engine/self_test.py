"""The self-test of a bundle: do a few texts give the logits that the compile computed, on this machine too?

Every exact run gives the same bits on all instruction sets, with any memory and any number of threads. So a digest
is enough. The numpy kernels are not part of this promise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from moec.manifests.errors import ChecksumMismatch, InputError, KernelUnavailable
from moec.manifests.files.limits import MAX_SELF_TEST_BYTES
from moec.manifests.self_test import (
    MAX_TOKENS,
    SELF_TEST_NAME,
    SelfTest,
    SelfTestText,
    decode_self_test,
)

from .. import kernels
from ..bundle.open_bundle import Bundle
from .engine import Engine

ARITHMETIC = 1
"""Number of what this version computes to the last bit. A change of any logit by a bit raises it."""
TEXTS = (
    "The river was high after the rain, and nobody crossed it before noon.",
    "Question: 17 boxes hold 24 apples each. How many apples are there? Answer: 17 x 24 = 408.",
    "def mean(values):\n    return sum(values) / len(values)\n",
)
"""Texts of the test. A bundle holds their tokens, so later versions may have others."""


def make_self_test(engine: Engine) -> SelfTest | None:
    """Return the self-test of an open bundle; None if numpy computes or the tokenizer gives no tokens."""
    if kernels.compiled() is None:
        return None
    longest = min(MAX_TOKENS, engine.memory.context)
    encoded = [tuple(engine.encode(text)[:longest]) for text in TEXTS]
    has_encoder = engine.model.spec.encoder is not None
    texts = tuple(SelfTestText(tokens if has_encoder else (), tokens) for tokens in encoded if tokens)
    return SelfTest(ARITHMETIC, texts, logits_digest(engine, texts)) if texts else None


def logits_digest(engine: Engine, texts: Sequence[SelfTestText]) -> str:
    """Return the SHA-256 of the logits after every token of every text, float32 little-endian."""
    digest = hashlib.sha256()
    for text in texts:
        logits = engine.logits(text.tokens, text.prompt)
        digest.update(np.ascontiguousarray(logits, "<f4").tobytes())
    return digest.hexdigest()


def self_test_of(bundle: Bundle) -> SelfTest:
    """Return the self-test that a bundle holds. Raises InputError if it holds none, and BundleError."""
    place = bundle.path / SELF_TEST_NAME
    if not bundle.has_file(SELF_TEST_NAME):
        raise InputError(f"`{bundle.path}` has no `{SELF_TEST_NAME}`", "compile it again, with the extension")
    model = bundle.manifest.model
    data = bundle.read_file(SELF_TEST_NAME, MAX_SELF_TEST_BYTES, verify=True)
    return decode_self_test(data, str(place), model.vocab_size, model.encoder is not None)


def run_self_test(engine: Engine, test: SelfTest) -> None:
    """Compute the logits of a self-test.

    Raises ChecksumMismatch if they are not those of the compile.
    Raises KernelUnavailable if numpy computes, or if another version of moec computes other last bits.
    """
    if test.arithmetic != ARITHMETIC:
        raise KernelUnavailable(
            f"the self-test is for arithmetic {test.arithmetic}, this moec has {ARITHMETIC}: last bits differ",
            "verify with the moec that compiled the bundle, or compile it again",
        )
    if kernels.compiled() is None:
        raise KernelUnavailable(
            "the self-test needs the extension, because results of numpy differ in last bits", "install moec again"
        )
    digest = logits_digest(engine, test.texts)
    if digest != test.logits_sha256:
        raise ChecksumMismatch(
            f"`{engine.bundle.path}`: the logits of the self-test have the digest {digest[:12]}, those of the compile "
            f"{test.logits_sha256[:12]}",
            "do not run it with this build; `moec verify --self-test --kernels scalar` tries others",
        )
