"""Text and bytes of single tokens."""

from __future__ import annotations

from moec.runtime.text.token_bytes import TokenBytes
from moec.runtime.text.tokenizer import BundleTokenizer

_PIECE_MARKS = ("\u2581", "\u0120")
"""First characters of vocabulary entries that stand for a space."""


class TokenTexts:
    """Texts and bytes of tokens. A special token has its name. Bytes that are no text are written as `\\xf0\\x9f`."""

    def __init__(self, tokenizer: BundleTokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, tuple[str, bytes]] = {}
        self._bytes: TokenBytes | None
        try:
            self._bytes = tokenizer.token_bytes()
        except ValueError:  # its tokens stand for texts only
            self._bytes = None

    def of(self, token: int) -> tuple[str, bytes]:
        """Return the text of one token, with its leading space, and its bytes."""
        text = self._found.get(token)
        if text is None:
            text = self._found[token] = self._of(token)
        return text

    def _of(self, token: int) -> tuple[str, bytes]:
        if self._bytes is None:
            text = self._decoded(token)
            return text, text.encode("utf-8", errors="replace")
        data = self._bytes.of_token(token)
        try:
            return data.decode(), data
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in data), data

    def _decoded(self, token: int) -> str:
        piece, text = self._tokenizer.piece(token), self._tokenizer.decode([token])
        if not text or "\ufffd" in text:
            return piece
        return f" {text}" if piece.startswith(_PIECE_MARKS) and not text.startswith(" ") else text
