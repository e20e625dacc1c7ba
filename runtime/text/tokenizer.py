"""The tokenizer of a bundle. It is checked before it is loaded, and bounded in time and memory.

Failures of the tokenizers library become errors of moec.
"""

from __future__ import annotations

import json
import operator
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import BundleIncomplete, ContextOverflow, ExecutionError, InputError, ManifestInvalid
from moec.manifests.files.limits import (
    ENCODING_BYTES_PER_BYTE,
    ENCODING_CPU_S,
    ENCODING_CPU_S_PER_BYTE,
    MAX_TOKENIZER_BYTES,
)
from moec.manifests.tokenizer.special_tokens import token_text, tokenizer_settings
from moec.manifests.tokenizer.tokenizer_file import UnsafeTokenizer, check_tokenizer
from moec.profiles.freed_memory import give_back_freed_memory
from moec.profiles.memory_floor import PROCESS_SLACK_BYTES

from ..bundle.open_bundle import Bundle
from ..memory.budget import MemoryPlan

_MARK = "\u2581"
_LONGEST_PIECE = 32
"""Most characters of a vocabulary entry that `greedy_ids` looks for."""


def byte_level_values() -> dict[str, int]:
    """Return character -> byte of the byte-level alphabet.

    Printable bytes stand for themselves. The others follow from U+0100 on, in their order.
    """
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    printable = [byte for byte in range(256) if chr(byte) in alphabet]
    rest = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(rest)}


class TokenBytes:
    """The bytes of tokens, by the decoder of their tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ValueError for a decoder of another kind."""
        self._tokenizer, self._values = tokenizer, byte_level_values()
        kinds = _kinds(tokenizer)
        self._is_byte_level = "ByteLevel" in kinds
        if not self._is_byte_level and not {"ByteFallback", "Metaspace"} & kinds:
            raise ValueError("its decoder is neither byte-level nor SentencePiece's")
        self._added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, added in self._added.items() if added.special}
        self._letters = {byte: letter for letter, byte in self._values.items()}

    def of_vocabulary(self, count: int) -> tuple[list[bytes], list[int]]:
        """Return the bytes of the tokens 0 to count - 1, and which of them are special or stand for nothing."""
        bytes_of_tokens = [self.of_token(token) for token in range(count)]
        return bytes_of_tokens, [
            token for token, data in enumerate(bytes_of_tokens) if not data or token in self._special
        ]

    def of_token(self, token: int) -> bytes:
        """Return the bytes of one token. A token that was added to the vocabulary has those of its name."""
        added = self._added.get(token)
        return self._bytes_of(self._tokenizer.id_to_token(token) or "") if added is None else added.content.encode()

    def ids(self, text: str) -> list[int]:
        """Return tokens whose bytes are those of a text, as the tokenizer splits it if that is possible.

        No token is special, not even for a text that spells one.
        """
        data = text.encode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        pieces = [self._bytes_of(self._tokenizer.id_to_token(token) or "") for token in ids]
        is_plain = self._special.isdisjoint(ids) and b"".join(pieces) == data
        return ids if is_plain else self._greedy_ids(text, data)

    def _greedy_ids(self, text: str, data: bytes) -> list[int]:
        """Return the longest pieces from left to right, and single bytes for characters without a piece."""
        written = "".join(self._letters[byte] for byte in data) if self._is_byte_level else text.replace(" ", _MARK)
        ids, start = list[int](), 0
        find: Callable[[str], int | None] = self._tokenizer.token_to_id
        while start < len(written):
            for size in range(min(_LONGEST_PIECE, len(written) - start), 0, -1):
                token = find(written[start : start + size])
                if token is not None and token not in self._special:
                    ids.append(token)
                    start += size
                    break
            else:
                character = written[start].replace(_MARK, " ")
                ids += [fallback for byte in character.encode() if (fallback := find(f"<0x{byte:02X}>")) is not None]
                start += 1
        return ids

    def _bytes_of(self, piece: str) -> bytes:
        if self._is_byte_level:
            values = [self._values.get(letter) for letter in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                return piece.encode()
        return piece.replace(_MARK, " ").encode()


def _kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the kinds of a tokenizer's decoder and of its parts."""
    decoder: Any = tokenizer.decoder
    if decoder is None:
        return set()
    plain = json.loads(decoder.__getstate__())
    return {str(decoder_part.get("type")) for decoder_part in (plain, *plain.get("decoders", ()))}


# Text growth that ENCODING_BYTES_PER_BYTE includes: bytes written as letters, spaces as marks.
_USUAL_GROWTH = 4
_PART_CHARACTERS = 1024
# Texts from this size leave much memory to the allocator, which keeps it for the thread that has ended.
_TRIM_BYTES = 64 << 10
_COPY_AGAIN = "copy the bundle again"


def load_tokenizer(bundle: Bundle, verify: bool = False) -> BundleTokenizer:
    """Read `tokenizer.json` of an opened bundle.

    verify: whether to compare the file with its digest.
    Raises BundleIncomplete, ManifestInvalid, ChecksumMismatch, StorageReadFailed.
    """
    path = bundle.path / TOKENIZER_NAME
    if not bundle.has_file(TOKENIZER_NAME):
        raise BundleIncomplete(f"`{path}` is missing", "compile a checkpoint that has a fast tokenizer")
    return parse_tokenizer(bundle.read_file(TOKENIZER_NAME, MAX_TOKENIZER_BYTES, verify=verify), path)


def parse_tokenizer(data: bytes, path: Path) -> BundleTokenizer:
    """Return the tokenizer in a file. Raises ManifestInvalid.

    path: the file, for messages.
    """
    try:
        growth = check_tokenizer(data)
        tokenizer = Tokenizer.from_buffer(data)
    except UnsafeTokenizer as error:
        raise ManifestInvalid(f"`{path}` is not a tokenizer: {error}", _COPY_AGAIN) from error
    except BaseException as error:
        if not _is_fault(error):
            raise
        raise ManifestInvalid(f"`{path}` is not a tokenizer: {error}", _COPY_AGAIN) from error
    # Padding and truncation left from training must not change a prompt.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return BundleTokenizer(tokenizer, *growth)


@dataclass(frozen=True, slots=True)
class EncodedText:
    """Token ids of a text."""

    ids: list[int]


class BundleTokenizer:
    """Turns texts into tokens and back. Raises ExecutionError if the tokenizers library fails."""

    def __init__(self, tokenizer: Tokenizer, normalizer_growth: int, pre_tokenizer_growth: int) -> None:
        """normalizer_growth, pre_tokenizer_growth: most bytes that each makes of a byte of a text."""
        self._tokenizer = tokenizer
        self._normalizer_growth, self._pre_tokenizer_growth = normalizer_growth, pre_tokenizer_growth

    def encode(self, text: str, add_special_tokens: bool = True) -> EncodedText:
        """Return the tokens of one text. Raises ExecutionError."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[EncodedText]:
        """Return the tokens of some texts. Raises ExecutionError, also for one that takes too long."""
        size = sum(map(len, texts))
        call = _Encoding(self._tokenizer, texts, add_special_tokens)
        call.run_for(ENCODING_CPU_S + ENCODING_CPU_S_PER_BYTE * 4 * size)
        if size > _TRIM_BYTES:
            give_back_freed_memory()
        return call.encoded

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones. Raises ExecutionError."""
        try:
            text: str = self._tokenizer.decode(ids)
        except BaseException as error:
            if not _is_fault(error):
                raise
            raise ExecutionError(f"the tokenizer cannot turn tokens into text: {error}", _COPY_AGAIN) from error
        return text

    def piece(self, token: int) -> str:
        """Return the vocabulary's entry of a token, in the tokenizer's own form; empty if there is none."""
        return self._tokenizer.id_to_token(token) or ""

    def id_of(self, piece: str) -> int | None:
        """Return the token of a vocabulary's entry; None if there is none."""
        token: int | None = self._tokenizer.token_to_id(piece)
        return token

    def token_bytes(self) -> TokenBytes:
        """Return what tells the bytes of each token. Raises ValueError for a decoder whose tokens have none."""
        return TokenBytes(self._tokenizer)

    def check_size(self, text: str, plan: MemoryPlan) -> None:
        """Refuse a text whose encoding would need more memory than keys, values and a pass will have later.

        Raises ContextOverflow, or InputError for text that is not Unicode.
        """
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt is not UTF-8 at character {error.start}", "convert it to UTF-8") from error
        limit = (plan.kv_bytes + plan.scratch_bytes + PROCESS_SLACK_BYTES // 2) // ENCODING_BYTES_PER_BYTE
        growth = self._normalizer_growth * self._pre_tokenizer_growth
        if size <= limit and size * growth > limit * _USUAL_GROWTH:
            size = max(size, self._grown_bytes(text, limit) * self._pre_tokenizer_growth // _USUAL_GROWTH)
        if size > limit:
            raise ContextOverflow(
                f"the prompt has {size} bytes, so its tokens are not counted: "
                f"a context of {plan.context} tokens has memory to encode {limit} bytes",
                "shorten it or raise `--context`",
            )

    def _grown_bytes(self, text: str, limit: int) -> int:
        """Return the length of the normalized text, bytes. Counting may stop beyond the limit."""
        normalizer = self._tokenizer.normalizer
        if normalizer is None:
            return 0
        total = 0
        for start in range(0, len(text), _PART_CHARACTERS):
            total += len(normalizer.normalize_str(text[start : start + _PART_CHARACTERS]).encode())
            if total > limit * _USUAL_GROWTH:
                break
        return total


class _Encoding(threading.Thread):
    """Encodes texts in a thread, so that the caller can stop waiting. The library cannot be interrupted.

    `encode_batch` lets other threads run, `encode` does not. Texts are passed one at a time.
    With several, the library would start its own threads, whose time is not counted here.
    """

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str], adds_special_tokens: bool) -> None:
        super().__init__(name="encoding", daemon=True)
        self._tokenizer, self._texts, self._adds_special_tokens = tokenizer, texts, adds_special_tokens
        self._error: BaseException | None = None
        self._is_stopped = False
        self._clock: int | None = None
        self.encoded = list[EncodedText]()

    def run(self) -> None:
        """Encode all texts, or as many as there is time for."""
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            for text in self._texts:
                if self._is_stopped:
                    break
                (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=self._adds_special_tokens)
                self.encoded.append(EncodedText(list(encoding.ids)))
        except BaseException as error:
            self._error = error

    def run_for(self, cpu_s: float) -> None:
        """Start the thread and wait for its end.

        cpu_s: most processor time, seconds. A thread that takes longer runs until the process ends.
        Raises ExecutionError.
        """
        self.start()
        try:
            self.join(0.25)
            while self.is_alive():
                if self._used_s() > cpu_s:
                    raise ExecutionError(
                        f"the tokenizer takes more than {cpu_s:.1f} s of processor time", "shorten the prompt"
                    )
                self.join(0.25)
        finally:
            self._is_stopped = True
        if self._error is None:
            return
        if _is_fault(self._error):
            message = f"the tokenizer cannot turn the text into tokens: {self._error}"
            raise ExecutionError(message, _COPY_AGAIN) from self._error
        raise self._error

    def _used_s(self) -> float:
        """Return the processor time of the thread, seconds; 0 if it has just ended."""
        try:
            return 0.0 if self._clock is None else time.clock_gettime(self._clock)
        except OSError:
            return 0.0


def _is_fault(error: BaseException) -> bool:
    """Return whether the tokenizers library raised this: Exception, or a panic, which is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def checked_ids(tokens: Sequence[int]) -> list[int]:
    """Return token ids as a list of int. Whole numbers of numpy are accepted. The vocabulary is not checked.

    Raises InputError for a value that is not a sequence, or that contains 1.5, True, a text or the like.
    """
    try:
        ids = list(tokens)
    except TypeError:
        raise InputError(f"a prompt must be a text or token ids, found a `{type(tokens).__name__}`") from None
    for at, token in enumerate(ids):
        try:
            if isinstance(token, bool):
                raise TypeError
            ids[at] = operator.index(token)
        except TypeError:
            raise InputError(
                f"token ids must be whole numbers, found a `{type(token).__name__}` at place {at}",
                "hand in a text, or the ids that `encode` returns",
            ) from None
    return ids


def named_texts(config: bytes | None, names: Iterable[str]) -> dict[str, str]:
    """Return those of the settings that are texts, or tokens with a text.

    config: content of the file, or None. A damaged file has no settings; it is refused where a template needs it.
    """
    try:
        plain = tokenizer_settings(config)
    except ValueError:
        plain = {}
    texts = {name: token_text(plain.get(name)) for name in names}
    return {name: text for name, text in texts.items() if text}
