"""Streamed text is the text, and no piece of it ends inside a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moec.manifests.errors import ManifestInvalid
from moec.runtime.text.streaming_text import StopTexts, TextStream
from moec.runtime.text.tokenizer import parse_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("\u0120", "a"), ("\u00f0", "\u0141"), ("a", "b")]  # the second: the first half of an emoji


def byte_level() -> Tokenizer:
    words = ["<s>", *ALPHABET, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abc", "\u2581a"]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[("\u2581", "a")], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


LEVEL, FALLBACK = byte_level(), byte_fallback()


def stream(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    running = TextStream(tokenizer)
    return [*(running.push(token) for token in tokens), running.flush()]


CHARACTERS = "ab \n\u00e9\u20ac\u05d0\U0001f600\U0001f468\u200d\U0001f469\u0301"
TEXT = st.text(st.sampled_from(CHARACTERS), max_size=20) | st.text(max_size=12)


@given(TEXT)
@example("\U0001f600 a ab\U0001f469\u200d\U0001f467")
def test_byte_level(text: str) -> None:
    tokens = LEVEL.encode(text).ids
    pieces = stream(LEVEL, tokens)
    assert "".join(pieces) == LEVEL.decode(tokens) == text
    assert all(piece.isascii() or "\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@given(TEXT.filter(lambda text: "\u2581" not in text))
def test_byte_fallback(text: str) -> None:
    tokens = FALLBACK.encode(text).ids
    pieces = stream(FALLBACK, tokens)
    assert "".join(pieces) == FALLBACK.decode(tokens)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, LEVEL.get_vocab_size() - 1), max_size=25))
def test_any_tokens_at_all(tokens: list[int]) -> None:
    """Tokens may be bytes that are no text, special tokens, or parts of a character."""
    assert "".join(stream(LEVEL, tokens)) == LEVEL.decode(tokens)


def test_a_character_comes_when_its_last_byte_does() -> None:
    ((characters, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("a\U0001f600b")
    tokens = [LEVEL.token_to_id(character) for character in characters]  # a token for each byte
    assert stream(LEVEL, tokens) == ["a", "", "", "", "\U0001f600", "b", ""]
    assert stream(LEVEL, tokens[:3]) == ["a", "", "", "\ufffd"]


def test_the_cost_of_a_token_does_not_grow() -> None:
    class Counting:
        longest = 0

        def decode(self, tokens: list[int]) -> str:
            self.longest = max(self.longest, len(tokens))
            return LEVEL.decode(tokens)  # type: ignore[no-any-return]

    counting = Counting()
    stream(counting, LEVEL.encode("ab \U0001f600" * 100).ids)  # type: ignore[arg-type]
    assert counting.longest < 16


def test_parse_tokenizer() -> None:
    path = Path("a/tokenizer.json")
    for broken in (b"", b"{", b"[]", b"{}", b'{"model": 1}', b"\xff" * 99, b"[" * 100_000):
        with pytest.raises(ManifestInvalid, match=r"a/tokenizer\.json` is not a tokenizer"):
            parse_tokenizer(broken, path)
    trained = byte_level()
    trained.enable_truncation(3)
    trained.enable_padding(length=9)
    data = trained.to_str().encode()
    assert len(parse_tokenizer(data, path).encode("c" * 50).ids) == 50
    assert len(parse_tokenizer(data, path).encode("c").ids) == 1


@given(prompt=TEXT, text=TEXT, tokenizer=st.sampled_from([LEVEL, FALLBACK]))
def test_text_behind_a_prompt(prompt: str, text: str, tokenizer: Tokenizer) -> None:
    """The prompt is not part of the text, and the space before the first word is not lost."""
    prompt, text = ("x" + part.replace("\u2581", "").replace("\ufffd", "") for part in (prompt * 9, text))
    before, tokens = tokenizer.encode(prompt).ids, tokenizer.encode(text).ids
    running = TextStream(tokenizer, before)
    found = "".join([*(running.push(token) for token in tokens), running.flush()])
    assert found == tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]


@given(
    pieces=st.lists(st.text("ab\n", max_size=4), max_size=12),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
@example(pieces=["b", "a", "b"], stops=["a", "bab"])
@example(pieces=["bab"], stops=["a", "bab"])
def test_a_text_ends_in_front_of_the_stop_that_is_complete_first(pieces: list[str], stops: list[str]) -> None:
    filtered, shown, ended = StopTexts(stops), "", False
    for piece in pieces:
        text, ended = filtered.push(piece)
        shown += text
        assert not any(stop in shown for stop in stops)
        if ended:
            break
    if not ended:
        shown += filtered.flush()
    whole = "".join(pieces)
    ends = [(end, end - len(stop)) for end in range(len(whole) + 1) for stop in stops if whole[:end].endswith(stop)]
    assert ended == bool(ends)
    assert shown == (whole[: min(ends)[1]] if ends else whole)
