"""Masks of tokens by a grammar, from the package llguidance, which is an extra.

llguidance compiles a JSON schema, follows an answer token by token, and tells which tokens may come next. Schemas come
from clients. So a grammar is first compiled in a process with limits (`grammar_check.py`), and only one that passes is
compiled here. Limits of the package bound the time and memory of each token.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from moec.manifests.errors import ExecutionError, InputError, MissingDependency
from moec.manifests.thinking import CLOSE
from moec.runtime.text.limited_process import Answer, LimitedProcess, signal_name
from moec.runtime.text.streaming_text import Decoder, TextStream
from moec.runtime.text.tokenizer import BundleTokenizer, TokenBytes

PACKAGE, EXTRA = "llguidance", "grammar"
MAX_SCHEMA_CHARACTERS = 64 << 10
_BYTES_PER_TOKEN = 640
"""Memory of the vocabulary's tree while it is made; measured: at most 500 bytes per token."""
_PACKAGE_BYTES = 10 << 20
_PROCESS_BYTES = 12 << 20
"""Memory of the process that checks grammars, without the files that it shares with this one; measured: 11 MiB."""
MAX_COMPILE_BYTES, MAX_COMPILE_CPU_S = 16 << 20, 0.5
"""Most memory and processor time of compiling a grammar. One of 480 properties takes 5 MiB and 30 ms."""
MAX_GRAMMAR_BYTES, GRAMMARS_BYTES = 8 << 20, 12 << 20
"""Most memory of a compiled grammar, and of those of all open requests."""
_RECENT_GRAMMARS = 4
"""Grammars that stay for the next request with the same schema, if there is memory for them."""
_LEAST_GRAMMAR_BYTES = 256 << 10
_MAX_ANSWER_BYTES = 1 << 20
_MAX_REASON_CHARACTERS = 200
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
    """Return the memory that grammars take: the package, the process that checks them, and a grammar that is compiled.

    The vocabulary counts once, and so do the grammars of open requests, and the state of each answer.
    """
    fixed_bytes = _PACKAGE_BYTES + _PROCESS_BYTES + MAX_COMPILE_BYTES + GRAMMARS_BYTES
    return fixed_bytes + _BYTES_PER_TOKEN * vocabulary + _STATE_BYTES * slots


class GrammarsFull(Exception):
    """The grammars of other requests fill the memory for them."""


class GrammarsClosed(Exception):
    """The server ends, and compiles no more grammars."""


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


class CompiledGrammar:
    """A grammar, compiled once for all requests that have it.

    size_bytes: its memory.
    """

    def __init__(self, matcher: Any, size_bytes: int, words: int, vocabulary: int, ends: Sequence[int]) -> None:
        """words: tokens that llguidance knows. It adds an end token where the model has none."""
        self._matcher, self.size_bytes = matcher, size_bytes
        self._words, self._vocabulary, self._ends = words, vocabulary, ends

    def mask(self) -> TokenMask:
        """Return the mask of a new answer. Raises InputError."""
        return TokenMask(self, self._matcher.deep_copy(), self._words, self._vocabulary, self._ends)


class Grammars:
    """Compiles grammars for one vocabulary. The package, its process and the tree are made at the first use."""

    def __init__(self, tokenizer: BundleTokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        """vocabulary: number of token ids.

        ends: tokens that end an answer.
        """
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, tuple(ends)
        self._loaded: Any = None
        self._limits: Any = None
        self._process: LimitedProcess | None = None
        self._is_stopped, self._process_lock = False, threading.Lock()
        self._open: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()
        self._recent = deque[CompiledGrammar](maxlen=_RECENT_GRAMMARS)

    def stop(self) -> None:
        """End the process that checks grammars, and the call that waits for it. Any thread may call this."""
        with self._process_lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process and collect it. No other call goes on."""
        self.stop()
        if self._process is not None:
            self._process.close()

    def compiled(self, grammar: str, spelled: str | None = None) -> CompiledGrammar:
        """Return a grammar, compiled. Only one thread may call this.

        spelled: the grammar without numbers of tokens, which the process that checks it does not know; None if it is
            the same.
        Raises InputError for one that is wrong or takes too much, MissingDependency, GrammarsFull, GrammarsClosed.
        """
        compiled = self._open.get(grammar)
        if compiled is None:
            process = self._started_process()
            self._load()
            size_bytes = self._checked_bytes(process, grammar if spelled is None else spelled)
            self._make_room(size_bytes)
            matcher = _package().LLMatcher(self._loaded, grammar, log_level=0, limits=self._limits)
            _require_sound(matcher)
            compiled = CompiledGrammar(matcher, size_bytes, self._loaded.vocab_size, self._vocabulary, self._ends)
            self._open[grammar] = compiled
        self._recent.append(compiled)
        return compiled

    def _load(self) -> None:
        """Load the package, and make the tree of the vocabulary.

        Raises MissingDependency, InputError for a tokenizer whose tokens have no bytes.
        """
        if self._loaded is not None:
            return
        llguidance = _package()
        try:
            words = _Words(self._tokenizer.token_bytes(), self._vocabulary, self._ends)
            slices = llguidance.LLTokenizer.json_slices()
            loaded = llguidance.LLTokenizer(words, self._vocabulary, list(self._ends) if self._ends else None, slices)
        except ValueError as error:
            raise InputError(f"this bundle's tokenizer has no grammars: {error}", "ask without one") from error
        self._limits = llguidance.LLParserLimits(**STEP_LIMITS)
        words.tokens = []
        self._loaded = loaded

    def _started_process(self) -> LimitedProcess:
        """Return the process that checks grammars. Raises MissingDependency, ExecutionError, GrammarsClosed."""
        _package()
        with self._process_lock:
            if self._is_stopped:
                raise GrammarsClosed
            if self._process is not None and self._process.process.poll() is not None:
                self._process.close()
                self._process = None
            if self._process is None:
                job = Path(__file__).with_name("grammar_check.py")
                self._process = LimitedProcess(job, {PACKAGE: f'"moec[{EXTRA}]"'}, "grammars of answers")
            return self._process

    def _checked_bytes(self, process: LimitedProcess, grammar: str) -> int:
        """Return the memory of a grammar. Raises InputError for one that takes too much, GrammarsClosed."""
        request = {"grammar": grammar, "memory_bytes": MAX_COMPILE_BYTES, "cpu_s": int(MAX_COMPILE_CPU_S)}
        answer = process.ask(request, _MAX_ANSWER_BYTES, STEP_LIMITS)
        if self._is_stopped:
            raise GrammarsClosed
        if answer.word != "sound":
            raise _refused(_reason(answer))
        needs = json.loads(answer.text)
        if needs["cpu_s"] > MAX_COMPILE_CPU_S:
            raise _refused(_TOO_SLOW)
        if needs["memory_bytes"] > MAX_GRAMMAR_BYTES:
            raise _refused(f"it takes more than {MAX_GRAMMAR_BYTES} bytes of memory")
        return max(int(needs["memory_bytes"]), _LEAST_GRAMMAR_BYTES)

    def _make_room(self, size_bytes: int) -> None:
        """Forget grammars without a request, if the memory does not hold one more. Raises GrammarsFull."""
        for is_last_try in (False, True):
            if sum(grammar.size_bytes for grammar in self._open.values()) + size_bytes <= GRAMMARS_BYTES:
                return
            if is_last_try:
                raise GrammarsFull
            self._recent.clear()


_TOO_SLOW = f"it takes more than {MAX_COMPILE_CPU_S:g} s of processor time"


def _reason(answer: Answer) -> str:
    """Return why a grammar did not pass."""
    if answer.word == "refused":
        return answer.text
    if answer.status == -signal.SIGXCPU:
        return _TOO_SLOW
    if answer.word == "memory" or answer.status == -signal.SIGABRT:
        return f"it takes more than {MAX_COMPILE_BYTES} bytes of memory"
    if answer.status == -signal.SIGSEGV:
        return "it is nested too deeply"
    name = signal_name(answer.status) if answer.status < 0 else f"status {answer.status}"
    return f"it ends the process that checks it with {name}"


class TokenMask:
    """Follows one answer, and tells which tokens may come next. Raises InputError if its grammar is wrong."""

    def __init__(
        self, grammar: CompiledGrammar, matcher: Any, words: int, vocabulary: int, ends: Sequence[int]
    ) -> None:
        """grammar: counts as open as long as a mask of it is there.

        words: tokens that llguidance knows.
        """
        self._grammar, self._matcher = grammar, matcher
        self._vocabulary, self._ends = vocabulary, frozenset(ends)
        self._words = np.zeros((words + 31) // 32, np.uint32)
        _require_sound(matcher)

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next, bool [V]. Raises InputError if the step exceeds the limits."""
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        _require_sound(self._matcher)
        bits = np.unpackbits(self._words.view(np.uint8), count=self._vocabulary, bitorder="little")
        return bits.view(bool)

    def take(self, token: int) -> bool:
        """Take a token of the answer. Returns whether the answer is complete.

        Raises ExecutionError for one that is not allowed.
        """
        if token in self._ends:
            return True
        if not self._matcher.consume_token(token):
            _require_sound(self._matcher)
            raise ExecutionError(f"token {token} does not follow the grammar of its answer", "ask again")
        return bool(self._matcher.is_stopped())


def _require_sound(matcher: Any) -> None:
    """Raise InputError if llguidance has refused a grammar, or a step of it."""
    if matcher.is_error():
        raise _refused(str(matcher.get_error()))


def _refused(reason: str) -> InputError:
    """Return the error of a schema. reason: it may repeat the schema, so it is shortened."""
    line = " ".join(reason.split())
    if len(line) > _MAX_REASON_CHARACTERS:
        line = f"{line[:_MAX_REASON_CHARACTERS]}..."
    return InputError(f"the schema cannot be followed: {line}", "make it simpler")


def json_grammar(schema: dict[str, Any]) -> str:
    """Return the grammar of JSON texts that a schema allows. Raises InputError for a schema that has none."""
    _require_short(schema)
    try:
        grammar = _package().LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _SPACE})
    except ValueError as error:
        raise _refused(str(error)) from error
    return str(grammar)


def json_between(begin: str, schema: dict[str, Any], end: str, special: Mapping[str, int]) -> str:
    """Return the grammar of a JSON text between two marks. Raises InputError.

    begin, end: the marks with the white space next to them. The end may be empty.
    special: marks that are special tokens, which no text spells.
    """
    _require_short(schema)
    described = json.dumps({**schema, "x-guidance": {"whitespace_pattern": _SPACE}})
    parts = [*mark_literals(begin, special), "value", *mark_literals(end, special)]
    lark = f"start: {' '.join(parts)}\nvalue: %json {described}\n"
    return str(_package().LLMatcher.grammar_from_lark(lark))


def mark_literals(text: str, special: Mapping[str, int]) -> list[str]:
    """Return the parts of a text in a grammar: special tokens by their number, and what is between them."""
    mark = min((mark for mark in special if mark in text), key=text.index, default=None)
    if mark is None:
        return [json.dumps(text)] if text else []
    before, _, after = text.partition(mark)
    return [*mark_literals(before, {}), f"<[{special[mark]}]>", *mark_literals(after, special)]


def _require_short(schema: dict[str, Any]) -> None:
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARACTERS:
        raise InputError(f"the schema has more than {MAX_SCHEMA_CHARACTERS} characters", "make it shorter")


class AfterThinking:
    """Allows all tokens but the end until `</think>`, then those of another mask."""

    def __init__(
        self,
        mask: TokenMask,
        tokenizer: Decoder,
        is_open: bool,
        vocabulary: int,
        ends: Sequence[int],
        opening: int | None = None,
        closing: int | None = None,
    ) -> None:
        """is_open: the prompt has opened the thinking.

        vocabulary: number of token ids.
        ends: tokens that end an answer.
        opening, closing: the tokens `<think>` and `</think>`; None if a vocabulary spells them with several. An answer
            without an opening token does not begin to think.
        """
        self._mask, self._is_open, self._is_first = mask, is_open, not is_open
        self._before_end = np.ones(vocabulary, bool)
        self._before_end[list(ends)] = False
        self._opening, self._closing = opening, closing
        self._stream, self._tail = TextStream(tokenizer), ""

    def allowed(self) -> np.ndarray | None:
        if self._is_open:
            return self._before_end
        allowed = self._mask.allowed()
        if self._is_first and self._opening is not None:
            allowed = allowed.copy()
            allowed[self._opening] = True
        return allowed

    def take(self, token: int) -> bool:
        is_first, self._is_first = self._is_first, False
        if is_first and token == self._opening:
            self._is_open = True
            return False
        if not self._is_open:
            return self._mask.take(token)
        self._tail = self._tail[-len(CLOSE) :] + self._stream.push(token)
        self._is_open = token != self._closing and CLOSE not in self._tail
        return False
