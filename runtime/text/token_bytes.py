"""Bytes that each token of a vocabulary stands for. A grammar of texts needs them to know which tokens may come next.

Sources of the two forms: the alphabet of byte-level BPE (GPT-2), and the byte fallback of SentencePiece.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

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
