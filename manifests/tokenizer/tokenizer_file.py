"""Allowed content of a `tokenizer.json`: known steps, with bounds on the time and memory of each.

The tokenizers library trusts its file. Some values end in a panic of the library. Others cause texts that grow without
bound, or regular expressions that never end. So the sections of the file are checked before the library reads them.
The vocabulary, nearly all of the bytes, is not parsed here if the file has the form that the library writes.
It is only searched for members that would replace those that are returned.

The table of a `Precompiled` normalizer is a double array (https://github.com/s-yata/darts-clone) of 32-bit units. The
replacements follow, each ended by a zero byte. The library follows its offsets without a check, and panics if they lead
out of the table. So they are checked here.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from ..files.limits import (
    ADDED_TOKEN_MEMORY_PER_BYTE,
    ADDED_TOKEN_SLACK_BYTES,
    DECODED_BYTES_PER_BYTE,
    MAX_ADDED_TOKEN_BYTES,
    MAX_ADDED_TOKEN_MEMORY_PER_FILE_BYTE,
    MAX_DECODED_BYTES,
    MAX_PIECE_BYTES,
    MAX_TEMPLATE_TOKENS,
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_CONTAINERS,
    MAX_TOKENIZER_GROWTH,
    MAX_TOKENIZER_PARSED_BYTES,
    MAX_TOKENIZER_STEPS,
    MAX_WORD_CHARACTERS,
)
from .regex_cost import CostlyPattern, check_pattern

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_LISTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
_BLANKS = b" \t\r\n"
_LIST_FOLLOWS = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*\[")
_NUMBER_FOLLOWS = re.compile(rb"[ \t\r\n]*(?:[^ \t\r\n:]|:[ \t\r\n]*-?[0-9])")
_COLON = ord(":")
_CANDIDATES = 4


class UnsafeTokenizer(Exception):
    """A tokenizer that is not accepted. The message follows `is not a tokenizer: ` in a sentence."""


def check_tokenizer(data: bytes) -> tuple[int, int]:
    """Check the content of a `tokenizer.json`. Raises UnsafeTokenizer.

    Returns the largest growth of a text, bytes for each byte: in the normalizer, and in the pre-tokenizer.
    """
    if len(data) > MAX_TOKENIZER_BYTES:
        raise UnsafeTokenizer(f"{len(data)} bytes are more than the limit of {MAX_TOKENIZER_BYTES}")
    sections = outer_members(data) or _parsed(data)
    growth = {}
    try:
        for name in _SECTIONS:
            growth[name] = _growth_of(name, sections.get(name))
        _check_empty_matches(sections)
        _check_model(sections.get("model"))
        _check_added_tokens(sections.get("added_tokens"), len(data))
    except CostlyPattern as error:
        raise UnsafeTokenizer(f"a regular expression {error}") from error
    except DamagedCharsmap as error:
        raise UnsafeTokenizer(f"`precompiled_charsmap` {error}") from error
    if growth["decoder"] * len(data) > max(MAX_DECODED_BYTES, DECODED_BYTES_PER_BYTE * len(data)):
        raise UnsafeTokenizer(f"`decoder` makes a token of a file of this size {growth['decoder']} times longer")
    return growth["normalizer"], growth["pre_tokenizer"]


# -- the file ----------------------------------------------------------------------------------------------------------


def _parsed(data: bytes) -> dict[str, Any]:
    """Return the whole file as JSON. Raises UnsafeTokenizer."""
    if len(data) > MAX_TOKENIZER_PARSED_BYTES:
        raise UnsafeTokenizer(f"{len(data)} bytes in a form that the tokenizers library does not write")
    containers = data.count(b"[") + data.count(b"{")
    if containers > MAX_TOKENIZER_CONTAINERS:
        raise UnsafeTokenizer(f"{containers} lists and objects are more than the limit of {MAX_TOKENIZER_CONTAINERS}")
    try:
        plain = json.loads(data, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise UnsafeTokenizer(str(error)[:200]) from error
    if not isinstance(plain, dict):
        raise UnsafeTokenizer("expected an object")
    return plain


# -- steps of the sections ---------------------------------------------------------------------------------------------


def _growth_of(section: str, value: Any) -> int:
    """Return how many times longer the steps of a section may make a text. Raises UnsafeTokenizer."""
    growth, count, waiting = 1, 0, [(value, 0)]
    while waiting:
        step, depth = waiting.pop()
        if step is None and depth == 0:
            continue
        kind = step.get("type") if isinstance(step, dict) else None
        if not isinstance(step, dict) or not isinstance(kind, str):
            raise UnsafeTokenizer(f"a step of `{section}` has no type")
        count += 1
        if count > MAX_TOKENIZER_STEPS:
            raise UnsafeTokenizer(f"`{section}` has more than {MAX_TOKENIZER_STEPS} steps")
        if kind == "Sequence":
            inner = step.get(_LISTS[section])
            if not isinstance(inner, list) or depth > 4:
                raise UnsafeTokenizer(f"a `Sequence` of `{section}` is no list of steps, or nested too deep")
            waiting += [(entry, depth + 1) for entry in inner]
            continue
        check = _STEPS[section].get(kind)
        if check is None:
            raise UnsafeTokenizer(f"unknown type `{kind[:40]}` in `{section}`")
        growth *= check if isinstance(check, int) else check(step)
        if growth > MAX_TOKENIZER_GROWTH:
            raise UnsafeTokenizer(f"`{section}` makes a text more than {MAX_TOKENIZER_GROWTH} times longer")
    return growth


def _text(step: Mapping[str, Any], name: str) -> str:
    value = step.get(name)
    if not isinstance(value, str):
        raise UnsafeTokenizer(f"`{name}` of `{step['type']}` is no text")
    return value


def _size(text: str) -> int:
    return len(text.encode("utf-8", errors="surrogatepass"))


def _integer(step: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = step.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UnsafeTokenizer(f"`{name}` of `{step.get('type')}` is not a number from {low} to {high}")
    return value


def _pattern(step: Mapping[str, Any]) -> int:
    """Return the length of the shortest match of `pattern`, bytes."""
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and len(pattern) == 1:
        (kind, text), *_ = pattern.items()
        if isinstance(text, str) and kind == "String":
            return _size(text)
        if isinstance(text, str) and kind == "Regex":
            return check_pattern(text)
    raise UnsafeTokenizer(f"`pattern` of `{step['type']}` is neither a String nor a Regex")


def _replace(step: Mapping[str, Any]) -> int:
    shortest, content = _pattern(step), _size(_text(step, "content"))
    # An empty match is found before every character.
    return max(1, -(-content // shortest)) if shortest else 1 + content


def _prepend(step: Mapping[str, Any]) -> int:
    return 1 + _size(_text(step, "prepend"))  # added to each part between added tokens


def _split(step: Mapping[str, Any]) -> int:
    _pattern(step)
    return 1


def _charsmap(step: Mapping[str, Any]) -> int:
    if step.get("precompiled_charsmap") is None:
        return 1
    return max(1, check_charsmap(_text(step, "precompiled_charsmap")))


def _fixed_length(step: Mapping[str, Any]) -> int:
    _integer(step, "length", 1, 1 << 20)
    return 1


def _strip_decoder(step: Mapping[str, Any]) -> int:
    _integer(step, "start", 0, 1024)
    _integer(step, "stop", 0, 0)  # the library would read before the beginning of a shorter token
    return 1


def _bpe_decoder(step: Mapping[str, Any]) -> int:
    return 2 if _text(step, "suffix") else 4


def _special_token(step: Mapping[str, Any]) -> int:
    for name in ("sep", "cls"):
        value = step.get(name)
        if not isinstance(value, list) or len(value) != 2 or not isinstance(value[0], str):
            raise UnsafeTokenizer(f"`{name}` of `{step['type']}` is no token and its number")
    return 1


def _template_processing(step: Mapping[str, Any]) -> int:
    known = step.get("special_tokens")
    if not isinstance(known, dict):
        raise UnsafeTokenizer("`special_tokens` of `TemplateProcessing` is no object")
    sizes = {}
    for name, token in known.items():
        ids = token.get("ids") if isinstance(token, dict) else None
        texts = token.get("tokens") if isinstance(token, dict) else None
        if not isinstance(ids, list) or not isinstance(texts, list) or len(ids) != len(texts):
            raise UnsafeTokenizer("a special token of `TemplateProcessing` has not as many numbers as texts")
        sizes[name] = len(ids)
    for member, sequences in (("single", ["A"]), ("pair", ["A", "B"])):
        pieces = step.get(member)
        if not isinstance(pieces, list):
            raise UnsafeTokenizer(f"`{member}` of `TemplateProcessing` is no list")
        total, texts = 0, []
        for piece in pieces:
            kind, inner = next(iter(piece.items())) if isinstance(piece, dict) and len(piece) == 1 else ("", None)
            name = inner.get("id") if isinstance(inner, dict) else None
            if kind == "Sequence" and name in ("A", "B"):
                texts.append(name)
            elif kind == "SpecialToken" and isinstance(name, str) and name in sizes:
                total += max(1, sizes[name])
            else:
                raise UnsafeTokenizer(f"`{member}` of `TemplateProcessing` has a piece of no known kind")
        if total > MAX_TEMPLATE_TOKENS:
            raise UnsafeTokenizer(f"`TemplateProcessing` adds {total} tokens, the limit is {MAX_TEMPLATE_TOKENS}")
        if len(set(texts)) != len(texts) or not set(texts) <= set(sequences):
            raise UnsafeTokenizer(f"`{member}` of `TemplateProcessing` repeats a text or takes one that it has not")
    return 1


_Check = Callable[[Mapping[str, Any]], int] | int
_STEPS: dict[str, dict[str, _Check]] = {
    # Growth by the normal forms of Unicode: https://unicode.org/faq/normalization.html (UTF-8).
    "normalizer": {
        "BertNormalizer": 6, "Strip": 1, "StripAccents": 1, "NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2,
        "Nmt": 1, "Precompiled": _charsmap, "Replace": _replace, "Prepend": _prepend, "ByteLevel": 2,
    },
    "pre_tokenizer": {
        "BertPreTokenizer": 1, "ByteLevel": 4, "CharDelimiterSplit": 1, "Metaspace": 8, "Whitespace": 1,
        "WhitespaceSplit": 1, "Split": _split, "Punctuation": 1, "Digits": 1, "UnicodeScripts": 1,
        "FixedLength": _fixed_length,
    },
    "post_processor": {
        "BertProcessing": _special_token, "RobertaProcessing": _special_token, "ByteLevel": 1,
        "TemplateProcessing": _template_processing,
    },
    "decoder": {
        "BPEDecoder": _bpe_decoder, "ByteLevel": 3, "WordPiece": 2, "Metaspace": 1, "CTC": 2, "Replace": _replace,
        "Fuse": 1, "Strip": _strip_decoder, "ByteFallback": 3,
    },
}  # fmt: skip


def _check_empty_matches(sections: Mapping[str, Any]) -> None:
    """Refuse a normalizer that inserts text at an empty match before a byte-level pre-tokenizer.

    The tokenizers library panics on such a text. With other pre-tokenizers the same normalizer works.

    sections: `normalizer` and `pre_tokenizer` of a `tokenizer.json`, each None if it is missing.
    Raises CostlyPattern.
    """
    if not any(step.get("type") == "ByteLevel" for step in _steps_of(sections.get("pre_tokenizer"))):
        return
    for step in _steps_of(sections.get("normalizer")):
        pattern = step.get("pattern")
        if step.get("type") != "Replace" or not step.get("content") or not isinstance(pattern, Mapping):
            continue
        regex = pattern.get("Regex")
        if pattern.get("String") == "" or (isinstance(regex, str) and check_pattern(regex) == 0):
            raise CostlyPattern("of a normalizer matches an empty text, and byte-level parts cannot follow it")


def _steps_of(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a section, also those inside sequences."""
    if not isinstance(step, Mapping):
        return
    yield step
    for name in ("normalizers", "pretokenizers"):
        for inner in step.get(name) or ():
            yield from _steps_of(inner)


# -- the model ---------------------------------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    """Check the settings of a model, and the vocabulary of the kinds that need it. Raises UnsafeTokenizer."""
    kind = model.get("type") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(kind, str | None):
        raise UnsafeTokenizer("expected an object `model`")
    if kind not in (None, "BPE", "WordPiece", "WordLevel", "Unigram"):
        raise UnsafeTokenizer(f"unknown type `{kind[:40]}` of `model`")
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):
        _check_pieces(vocabulary, model)
    elif vocabulary is not None and not (isinstance(vocabulary, dict) and vocabulary):
        raise UnsafeTokenizer("the vocabulary is empty or no object")
    if "max_input_chars_per_word" in model:
        _integer(model, "max_input_chars_per_word", 0, MAX_WORD_CHARACTERS)
    prefix = model.get("continuing_subword_prefix")
    if kind in (None, "BPE") and isinstance(prefix, str) and prefix:
        for merge in model.get("merges") or []:
            parts = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(parts, list) or len(parts) != 2 or not str(parts[1]).startswith(prefix):
                raise UnsafeTokenizer("a merge does not go on with `continuing_subword_prefix`")


def _check_added_tokens(tokens: Any, file_bytes: int) -> None:
    """Check the size of the added tokens. The library's automaton that finds them has a state for each byte.

    file_bytes: size of the whole file, which a memory plan uses.
    Raises UnsafeTokenizer.
    """
    contents = (token.get("content") for token in tokens or () if isinstance(token, dict))
    total_bytes = sum(_size(content) for content in contents if isinstance(content, str))
    allowed_bytes = MAX_ADDED_TOKEN_MEMORY_PER_FILE_BYTE * file_bytes + ADDED_TOKEN_SLACK_BYTES
    limit = min(MAX_ADDED_TOKEN_BYTES, allowed_bytes // ADDED_TOKEN_MEMORY_PER_BYTE)
    if total_bytes > limit:
        raise UnsafeTokenizer(f"`added_tokens` has texts of {total_bytes} bytes, more than the limit of {limit}")


def _check_pieces(pieces: list[Any], model: Mapping[str, Any]) -> None:
    """Check the vocabulary of a Unigram model."""
    for piece in pieces:
        if not isinstance(piece, list) or len(piece) != 2 or not isinstance(piece[0], str):
            raise UnsafeTokenizer("a piece of the vocabulary is not a text and a number")
        if not 0 < _size(piece[0]) <= MAX_PIECE_BYTES:
            raise UnsafeTokenizer(f"a piece of the vocabulary has not 1 to {MAX_PIECE_BYTES} bytes")
    if model.get("unk_id") is not None:
        _integer(model, "unk_id", 0, len(pieces) - 1)


class DamagedCharsmap(Exception):
    """A table that is not accepted. The message follows its name in a sentence."""


def check_charsmap(encoded: str) -> int:
    """Return the length of the longest replacement, bytes. Raises DamagedCharsmap.

    encoded: the table in base64.
    """
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DamagedCharsmap(f"is not base64: {error}") from error
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 4 <= size <= len(data) - 4:
        raise DamagedCharsmap(f"has {len(data)} bytes, which do not hold the table that its head promises")
    units = array("I", data[4 : 4 + size])
    if sys.byteorder == "big":
        units.byteswap()
    replacements = data[4 + size :]
    try:
        replacements.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedCharsmap(f"has replacements that are not UTF-8 at byte {error.start}") from error
    _check_units(units, replacements)
    return max(map(len, replacements.split(b"\0")))


def _check_units(units: array[int], replacements: bytes) -> None:
    """Check that every step from every unit, and every replacement that it names, is inside the table."""
    count, end = len(units), len(replacements)
    for at, unit in enumerate(units):
        if unit >> 31:
            continue  # a value: it is read only where an earlier unit refers to it, and never followed
        target = at ^ ((unit >> 10) << ((unit & 512) >> 6))
        if target | 255 >= count:
            raise DamagedCharsmap(f"leads out of its table at unit {at}")
        if unit & 256:
            value = units[target] & 0x7FFFFFFF
            if value > end or (value < end and replacements[value] & 0xC0 == 0x80):
                raise DamagedCharsmap(f"names a replacement at byte {value} that does not begin there")


def outer_members(data: bytes) -> dict[str, Any] | None:
    """Return all members except the vocabulary of a BPE model that is the last member, as the library writes it.

    Returns None for a file of another form, which must be parsed as a whole.
    The rest of the file, after the beginning of the vocabulary, is searched for members that would replace those
    checked here.
    """
    at = -1
    for _ in range(_CANDIDATES):
        at = data.find(b'"model"', at + 1)
        if at < 0:
            return None
        outer = _members(data[:at])
        if outer is not None:
            break
    else:
        return None
    opening = data.find(b"{", at)
    vocabulary = data.find(b'"vocab"', at)
    if opening < 0 or vocabulary < 0 or data[at + 7 : opening].strip(_BLANKS) != b":" or "model" in outer:
        return None
    model = _members(data[opening:vocabulary])
    if model is None or model.get("type") != "BPE" or model.get("continuing_subword_prefix"):
        return None
    return {**outer, "model": model} if _has_plain_vocabulary(data, vocabulary + len(b'"vocab"')) else None


def _has_plain_vocabulary(data: bytes, start: int) -> bool:
    """Return whether the rest of a file is numbers by name, then `merges`, then texts.

    start: the byte after the name `vocab`.
    The name of a member ends in a letter or a digit, a quote and a colon. A quote inside a text follows a backslash.
    A quote that begins a text follows neither a letter, a digit nor a backslash.
    """
    opening = data.find(b"{", start)
    merges = len(data)
    while (merges := data.rfind(b'"merges"', start, merges)) >= 0:
        if _LIST_FOLLOWS.match(data, merges + len(b'"merges"')) is not None:
            break
    if merges < 0 or opening < 0 or data[start:opening].strip(_BLANKS) != b":":
        return False
    inside = partial(_places, data, start=opening + 1, end=merges)
    if any(data[at + 4 : at + 5] in (b"4", b"5", b"6", b"7") for at in inside(rb"\u00")):
        return False  # escaped letters could spell any name
    for character in (b"{", b"["):
        if any(_ends_name(data, colon) for at in inside(character) if data[colon := _before(data, at)] == _COLON):
            return False
    for quoted in (b'"type"', b'"continuing_subword_prefix"'):
        if any(_NUMBER_FOLLOWS.match(data, at + len(quoted)) is None for at in inside(quoted)):
            return False
    return not any(_ends_name(data, at) for at in _places(data, b":", data.find(b"[", merges), len(data)))


def _places(data: bytes, sought: bytes, start: int, end: int) -> Iterator[int]:
    """Yield the positions of a part in a range of bytes."""
    at = data.find(sought, start, end)
    while at >= 0:
        yield at
        at = data.find(sought, at + 1, end)


def _before(data: bytes, at: int) -> int:
    """Return the position of the last byte before `at` that is not blank."""
    at -= 1
    while at > 0 and data[at] in _BLANKS:
        at -= 1
    return at


def _ends_name(data: bytes, colon: int) -> bool:
    """Return whether a colon follows the name of a member."""
    quote = _before(data, colon)
    return data[quote] == ord('"') and data[quote - 1 : quote].isalnum()


def _members(beginning: bytes) -> dict[str, Any] | None:
    """Return the members of an object that is cut before another name; None if the bytes are something else."""
    members = beginning.rstrip(_BLANKS)
    members = members[:-1] if members.endswith(b",") else members
    try:
        plain = json.loads(members + b"}", object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):
        return None
    return plain if isinstance(plain, dict) else None


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of an object, for json.loads. Raises ValueError if a name occurs twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return members
