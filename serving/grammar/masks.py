"""Masks of tokens by a grammar, from the package llguidance, which is an extra.

llguidance compiles a JSON schema, follows an answer token by token, and tells which tokens may come next. Limits bound
the time and memory of each step, because schemas come from clients.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moec.manifests.errors import ExecutionError, InputError, MissingDependency
from moec.runtime.text.token_bytes import TokenBytes
from moec.runtime.text.tokenizer import BundleTokenizer

PACKAGE, EXTRA = "llguidance", "grammar"
MAX_SCHEMA_CHARACTERS = 64 << 10
_BYTES_PER_TOKEN = 640
"""Memory of the vocabulary's tree while it is made; measured: at most 500 bytes per token."""
_PACKAGE_BYTES = 10 << 20
_STATE_BYTES = 2 << 20
"""Memory of one answer's state at the limits; measured: 1.7 MB."""
STEP_LIMITS = {
    "initial_lexer_fuel": 1_000_000,  # 20 ms
    "step_lexer_fuel": 100_000,  # 7 ms
    "step_max_items": 20_000,  # 1 ms
    "max_lexer_states": 2_000,  # texts with a bound on their length, too: about one state per character
    "max_grammar_size": 50_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of llguidance, with its own figures of time and memory."""
_SPACE = r"\x20|\x0A\x20{0,32}|\x0A\x09{0,8}"
"""White space between the parts of JSON: a space, or a line end with an indent. Without a bound, a model may write
nothing else."""


def is_installed() -> bool:
    """Return whether the package is there, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


def _package() -> Any:
    """Return the package. Raises MissingDependency."""
    if not is_installed():
        raise MissingDependency(
            f"grammars of answers need the package `{PACKAGE}`, which is not installed", f'pip install "moec[{EXTRA}]"'
        )
    return importlib.import_module(PACKAGE)


def grammar_bytes(vocabulary: int, slots: int) -> int:
    """Return the memory that grammars take: the vocabulary once, and the state of each answer."""
    return _PACKAGE_BYTES + _BYTES_PER_TOKEN * vocabulary + _STATE_BYTES * slots


class _Words:
    """A vocabulary in the form that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: TokenBytes, count: int, ends: Sequence[int]) -> None:
        self.tokens, self.special_token_ids = tokens.of_vocabulary(count)
        self.eos_token_id = ends[0] if ends else None
        self._ids = tokens.ids

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text. It must not raise, because the caller is no Python code."""
        try:
            return self._ids(text if isinstance(text, str) else text.decode(errors="replace"))
        except Exception:
            return []


class Grammars:
    """Makes masks for one vocabulary. The package and the vocabulary's tree are loaded at the first use."""

    def __init__(self, tokenizer: BundleTokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """vocabulary: number of token ids.

        ends: tokens that end an answer.
        """
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, tuple(ends)
        self._loaded: Any = None
        self._limits: Any = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Load the package, and make the tree of the vocabulary.

        Raises MissingDependency, InputError for a tokenizer whose tokens have no bytes.
        """
        with self._lock:
            if self._loaded is not None:
                return
            llguidance = _package()

            try:
                words = _Words(self._tokenizer.token_bytes(), self._vocabulary, self._ends)
                slices = llguidance.LLTokenizer.json_slices()
                loaded = llguidance.LLTokenizer(
                    words, self._vocabulary, list(self._ends) if self._ends else None, slices
                )
            except ValueError as error:
                raise InputError(f"this bundle's tokenizer has no grammars: {error}", "ask without one") from error
            self._limits = llguidance.LLParserLimits(**STEP_LIMITS)
            words.tokens = []
            self._loaded = loaded

    def check(self, grammar: str) -> None:
        """Refuse a grammar that is wrong, or too large. Raises InputError, MissingDependency."""
        self.load()
        self.mask(grammar)

    def mask(self, grammar: str) -> TokenMask:
        """Return the mask of a new answer. Raises InputError, MissingDependency."""
        self.load()
        matcher = _package().LLMatcher(self._loaded, grammar, log_level=0, limits=self._limits)
        return TokenMask(matcher, self._loaded.vocab_size, self._vocabulary, self._ends)


class TokenMask:
    """Follows one answer, and tells which tokens may come next. Raises InputError if its grammar is wrong."""

    def __init__(self, matcher: Any, words: int, vocabulary: int, ends: Sequence[int]) -> None:
        """words: tokens that llguidance knows. It adds an end token where the model has none."""
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, frozenset(ends)
        self._words = np.zeros((words + 31) // 32, np.uint32)
        self._require_sound()

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next, bool [V]. Raises InputError if the step exceeds the limits."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self._require_sound()
        bits = np.unpackbits(self._words.view(np.uint8), count=self._vocabulary, bitorder="little")
        return bits.view(bool)

    def take(self, token: int) -> bool:
        """Take a token of the answer. Returns whether the answer is complete.

        Raises ExecutionError for one that is not allowed.
        """
        if token in self._ends:
            return True
        if not self._matcher.consume_token(token):
            self._require_sound()
            raise ExecutionError(f"token {token} does not follow the grammar of its answer", "ask again")
        return bool(self._matcher.is_stopped())

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            reason = str(self._matcher.get_error())[:300]
            raise InputError(f"the schema cannot be followed: {reason}", "make it simpler")


def json_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON texts that a schema allows. Raises InputError for a schema that has none."""
    _require_short(schema)
    try:
        made = _package().LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _SPACE})
    except ValueError as error:
        raise InputError(f"the schema cannot be followed: {str(error)[:300]}", "make it simpler") from error
    return str(made)


def json_between(begin: str, schema: dict[str, Any], end: str, special: Mapping[str, int]) -> str:
    """Return the grammar of a JSON text between two marks. Raises InputError.

    begin, end: the marks with the white space next to them. The end may be empty.
    special: marks that are special tokens, which no text spells.
    """
    _require_short(schema)
    described = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})
    parts = [_literal(begin, special), "value", *([_literal(end, special)] if end else [])]
    lark = f"start: {' '.join(parts)}\nvalue: %json {described}\n"
    return str(_package().LLMatcher.grammar_from_lark(lark))


def _literal(mark: str, special: Mapping[str, int]) -> str:
    token = special.get(mark)
    return json.dumps(mark) if token is None else f"<[{token}]>"


def _require_short(schema: dict[str, Any]) -> None:
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise InputError(f"the schema has more than {MAX_SCHEMA_CHARACTERS} characters", "make it shorter")
