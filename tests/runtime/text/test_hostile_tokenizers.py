"""Tokenizers that load and misbehave, tokenizers that do not load, and those of published models, which must work."""

from __future__ import annotations

import base64
import copy
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from moec.manifests.errors import ManifestInvalid
from moec.manifests.tokenizer.regex_cost import CostlyPattern, check_pattern
from moec.manifests.tokenizer.tokenizer_file import DamagedCharsmap, UnsafeTokenizer, check_charsmap, check_tokenizer
from moec.runtime.text import tokenizer as bundle_tokenizer
from moec.runtime.text.streaming_text import TextStream
from moec.runtime.text.tokenizer import BundleTokenizer, parse_tokenizer
from tests.runtime.limited_child import outcomes, report

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
PATTERNS = (GPT2, QWEN, O200K, CL100K, DEEPSEEK, "[一-龥]+", r"\p{N}{1,3}", r"\s+$", r"[\r\n]", " {2,}",
            r"(?:\r?\n)+", r"\s?[A-Za-zµÀ-Ö]+", r" ?[^(\s|[.,!?])]+", r"[\p{Lo}&&[^\p{Han}]]+",
            r"\d{1,3}(?=(?:\d{3})*\b)")  # fmt: skip
COSTLY = ("(a+)+$", "(a|a)*b", "a*a*b", "(?:a?){40}b", r"(a)\1", "(?:a|b)*c", ".*.*=", "(?:x*)*y",
          "a{1,9999}b{1,9999}c", "(" * 50, "[a", "a(?i)b|c", "(?=.*a.*b)x", "(?:.*a){3}b", "a" * 5000,
          r"\X+")  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_published_models(pattern: str) -> None:
    assert check_pattern(pattern) >= 1


@pytest.mark.parametrize("pattern", COSTLY)
def test_patterns_without_bound(pattern: str) -> None:
    with pytest.raises(CostlyPattern):
        check_pattern(pattern)


ATOMS = st.sampled_from(["a", "b", "[ab]", r"\s", ".", r"\p{L}", "^", "$"])
GRAMMAR = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,3}", "+?", "++"])).map("".join),
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        st.tuples(st.sampled_from(["(?:", "(?>", "(?=", "(?!"]), inner, st.just(")")).map("".join),
    ),
    max_leaves=8,
)


@given(GRAMMAR)
def test_accepted_patterns_never_reach_the_limit_of_the_library(pattern: str) -> None:
    """The library panics after ten million steps at one position."""
    try:
        check_pattern(pattern)
    except CostlyPattern:
        return
    try:
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception:  # a form that the library refuses with an error
        return
    for text in ("a" * 3000 + "!", "ab" * 1500, " " * 3000):
        splitter.pre_tokenize_str(text)


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MARK = "\u2581"
TEXT = "Question: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa! é"


def load(folder: Path) -> BundleTokenizer:
    """Return the tokenizer of a folder."""
    path = folder / "tokenizer.json"
    return parse_tokenizer(path.read_bytes(), path)


def byte_level(pattern: str | None = None) -> Tokenizer:
    merges = [("a", "a"), ("aa", "aa")]
    words = ["<s>", *ALPHABET, "aa", "aaaa"]
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 0)])]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def mixtral() -> Tokenizer:
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), MARK, *"abt", f"{MARK}a"]
    tokenizer = Tokenizer(
        models.BPE(
            {w: i for i, w in enumerate(words)}, [(MARK, "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = mixtral()
    tokenizer.normalizer = normalizers.Replace(" ", MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def charsmap(replacement: bytes = b"b\0", value: int = 0, leaf: int = 256) -> str:
    """Return a table that replaces `a`, in the layout of darts-clone: the root, a unit for `a`, and its value."""
    units = [0] * 1024
    units[0] = 256 << 10  # the root leads to the units from 256 on
    at = 256 ^ ord("a")
    units[at] = ord("a") | leaf | (512 << 10)
    units[at ^ 512] = (1 << 31) | value
    data = b"".join(unit.to_bytes(4, "little") for unit in units)
    return base64.b64encode(len(data).to_bytes(4, "little") + data + replacement).decode()


def t5() -> Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (MARK, -1.0), *((c, -2.0) for c in "abQuestion:é!")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Precompiled(base64.b64decode(charsmap())), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 1)])
    return tokenizer


def bert() -> Tokenizer:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": byte_level,
    "mixtral": mixtral,
    "gemma": gemma,
    "t5": t5,
    "bert": bert,
    **{f"pattern {at}": lambda pattern=pattern: byte_level(pattern) for at, pattern in enumerate(PATTERNS)},  # type: ignore[misc]
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_pretty", [False, True])
def test_tokenizers_of_published_models_are_taken(family: str, is_pretty: bool, tmp_path: Path) -> None:
    own = FAMILIES[family]()
    own.save(str(tmp_path / "tokenizer.json"), pretty=is_pretty)
    loaded = load(tmp_path)
    ids = own.encode(TEXT).ids
    assert loaded.encode(TEXT).ids == ids
    assert loaded.encode(TEXT, add_special_tokens=False).ids == own.encode(TEXT, add_special_tokens=False).ids
    assert loaded.decode(ids) == own.decode(ids)


def level_json() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(byte_level().to_str())
    return found


def changed(**sections: Any) -> dict[str, Any]:
    return {**level_json(), **sections}


def added(content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 0, "content": content, **flags}


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SPLIT = {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False}


def template(single: list[Any], tokens: dict[str, Any]) -> dict[str, Any]:
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens}


FIRST, WHOLE = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]]}
NOT_LOADED: dict[str, dict[str, Any]] = {
    "charsmap": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "charsmap without type": changed(normalizer={"precompiled_charsmap": "AAAA"}),
    "charsmap in a list": changed(normalizer=["Precompiled", "AAAA"]),
    "charsmap leads out": changed(
        normalizer={"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\4\0\0\0\0\4\0\0").decode()}
    ),
    "charsmap value": changed(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap(value=99)}),
    "catastrophic split": changed(pre_tokenizer={**SPLIT, "pattern": {"Regex": "(a+)+$"}}),
    "catastrophic replace": changed(normalizer={**REPLACE, "pattern": {"Regex": "(a|a)*b"}}),
    "catastrophic decoder": changed(decoder={**REPLACE, "pattern": {"Regex": "(a|a)*b"}}),
    "fixed length 0": changed(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "strip": changed(decoder={"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40}),
    "strip both ends": changed(decoder={"type": "Strip", "content": "a", "start": 1, "stop": 1}),
    "12 replaces": changed(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 12}),
    "4 large replaces": changed(decoder={"type": "Sequence", "decoders": [{**REPLACE, "content": "a" * 1000}] * 4}),
    "replace of nothing": changed(normalizer={**REPLACE, "pattern": {"Regex": "a*"}, "content": "b" * 2000}),
    "bytes after a replace of nothing": changed(
        normalizer={**REPLACE, "pattern": {"String": ""}, "content": "x"},
        pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ),
    "65 steps": changed(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 65}),
    "long token made longer": changed(
        model={"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0, "a" * 100_000: 1}},
        decoder={**REPLACE, "content": "a" * 1000},
    ),
    "long added token": changed(added_tokens=[added("b" * 1_000_000)]),
    "long added tokens": changed(added_tokens=[added(f"{at}".rjust(1000, "b")) for at in range(1000)]),
    "unknown step": changed(normalizer={"type": "Explode"}),
    "100,000,000 tokens": changed(
        post_processor=template([WHOLE] * 100_000, {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}})
    ),
    "unknown special token": changed(post_processor=template([FIRST, WHOLE], {})),
    "second text": changed(post_processor=template([{"Sequence": {"id": "B", "type_id": 0}}], {})),
    "text twice": changed(post_processor=template([FIRST, FIRST], {})),
    "ids without texts": changed(post_processor=template([WHOLE], {"x": {"id": "x", "ids": [1], "tokens": []}})),
    "empty WordPiece": changed(model={"type": "WordPiece", "unk_token": "x", "continuing_subword_prefix": "##",
                                      "max_input_chars_per_word": 100, "vocab": {}}),
    "empty WordLevel": changed(model={"type": "WordLevel", "unk_token": "x", "vocab": {}}),
    "long words": changed(model={"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                                 "max_input_chars_per_word": 10**9, "vocab": {"a": 0}}),
    "long piece": changed(model={**UNIGRAM, "vocab": [["a", 0.0], ["a" * 2000, 0.0]]}),
    "unk_id": changed(model={**UNIGRAM, "unk_id": 7}),
    "prefix": changed(model={"type": "BPE", "continuing_subword_prefix": "#" * 10, "vocab": {"a": 0, "b": 1, "ab": 2},
                             "merges": [["a", "b"]]}),
}  # fmt: skip
NOT_ENCODED = {
    "Unigram without unk_id": changed(model={"type": "Unigram", "vocab": [["b", 0.0]]}, pre_tokenizer=None),
    "WordLevel without its unk_token": changed(model={"type": "WordLevel", "unk_token": "x", "vocab": {"a": 0}}),
}


@pytest.mark.parametrize("count", [0, 1000, 30_000])
def test_many_added_tokens_are_taken(count: int, tmp_path: Path) -> None:
    """Models of speech and pictures have many added tokens."""
    plain = changed(added_tokens=[{**added(f"<|visual token {at:06}|>"), "id": 500 + at} for at in range(count)])
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    assert load(tmp_path).encode(TEXT).ids


EVIL = '"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}'


def hidden_members() -> dict[str, bytes]:
    """Return files that have a member where a reader that skips the vocabulary would not look."""
    plain = json.dumps(level_json())
    assert plain.endswith("]]}}")
    spelled = EVIL.replace("normalizer", "normali\\u007aer")
    return {
        "after the model": f"{plain[:-1]}, {EVIL}}}".encode(),
        "spelled with numbers": f"{plain[:-1]}, {spelled}}}".encode(),
        "between": plain.replace('"merges": [', f'"x": 1}}, {EVIL}, "model": {{"merges": [').encode(),
        "blanks": f"{plain[:-1]}, {EVIL}}}".replace('r": {"type": "Pre', 'r" \n\t:\n {"type": "Pre').encode(),
        "a list": f"{plain[:-1]}, {EVIL}}}".replace('{"type": "Precompiled", ', '["Precompiled", {').encode(),
        "second model": f'{plain[:-1]}, "model": {json.dumps({**UNIGRAM, "unk_id": 7})}}}'.encode(),
        "second type": plain.replace('"merges": [', '"type": "Unigram", "merges": [').encode(),
        "second prefix": plain.replace('"merges": [', '"continuing_subword_prefix": "####", "merges": [').encode(),
        "no JSON": plain.replace('"merges": [', '"merges": [[[').encode(),
        "deep": b'{"model":' + b"[" * 100_000,
        "many lists": b'{"version": [' + b"[]," * 2_000_000 + b"[]]}",
        "text": b'"model"',
    }


HIDDEN = tuple(hidden_members())


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Return the outcome of every case, from one process with limits."""
    return outcomes("tests.runtime.text.test_hostile_tokenizers", 2 << 30, 20)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Return the cases that `found` runs."""
    files = {name: json.dumps(plain).encode() for name, plain in {**NOT_LOADED, **NOT_ENCODED}.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"

        def use() -> str:
            tokenizer = load(path.parent)
            stream = TextStream(tokenizer)
            return "".join(map(stream.push, tokenizer.encode(TEXT).ids))

        for name, data in {**files, **hidden_members()}.items():
            path.write_bytes(data)
            yield name, use
        bundle_tokenizer.ENCODING_CPU_S, bundle_tokenizer.ENCODING_CPU_S_PER_BYTE = 0.5, 0.0
        byte_level(r"\s+$").save(str(path))
        yield "quadratic", lambda: load(path.parent).encode(" " * 40_000 + "x")


@pytest.mark.parametrize("name", [*NOT_LOADED, *HIDDEN])
def test_tokenizers_that_are_not_loaded(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["error"] == "ManifestInvalid", found[name]
    assert "is not a tokenizer: " in found[name]["message"]


@pytest.mark.parametrize("name", NOT_ENCODED)
def test_texts_that_are_not_encoded(name: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[name]["error"] == "ExecutionError", found[name]


def test_an_encoding_ends(found: dict[str, dict[str, Any]]) -> None:
    assert "of processor time" in found["quadratic"]["message"]


def test_nothing_reached_standard_error(found: dict[str, dict[str, Any]]) -> None:
    assert found["process"] == {"status": 0, "stderr": ""}


@given(st.data())
def test_any_value_in_any_section(data: st.DataObject) -> None:
    plain = copy.deepcopy(level_json())
    section = data.draw(st.sampled_from(["normalizer", "pre_tokenizer", "post_processor", "decoder", "model"]))
    target = plain[section]
    while isinstance(target, dict | list) and target and data.draw(st.booleans()):
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        inner = target[data.draw(st.sampled_from(keys[:40]))]
        if not isinstance(inner, dict | list):
            break
        target = inner
    value = data.draw(st.none() | st.booleans() | st.integers(-2, 1 << 33) | st.text(max_size=3) | st.just([]))
    if isinstance(target, dict) and target:
        target[data.draw(st.sampled_from(sorted(target)[:40]))] = value
    else:
        plain[section] = value
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(plain))
        try:
            tokenizer = load(Path(folder))
        except ManifestInvalid:
            return
        tokenizer.decode(tokenizer.encode("a b").ids)


def test_tables_of_replacements() -> None:
    assert check_charsmap(charsmap()) == 1
    assert check_charsmap(charsmap(b"abc\0de\0", value=4)) == 3
    for damaged in ("", "AAAA", "!", charsmap(b"\xff"), charsmap(value=3), charsmap("é\0".encode(), value=1)):
        with pytest.raises(DamagedCharsmap):
            check_charsmap(damaged)


def test_a_large_vocabulary_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not parsed even if tokens look like members."""
    words = ['"normalizer": {', "normalizer", "decoder", "type", "model", '":{', ":{", '":["', "\\", '\\":{"', "merges"]
    plain = level_json()
    plain["model"]["vocab"] |= {word: 1000 + at for at, word in enumerate(words)}
    plain["model"]["merges"] += [[":", "{"], [":", "["], ["a", ":"]]
    monkeypatch.setattr("moec.manifests.tokenizer.tokenizer_file.MAX_TOKENIZER_PARSED_BYTES", 0)
    for indent in (None, 1):
        for is_ascii in (True, False):
            check_tokenizer(json.dumps(plain, indent=indent, ensure_ascii=is_ascii).encode())


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(level_json()).encode()
    monkeypatch.setattr("moec.manifests.tokenizer.tokenizer_file.MAX_TOKENIZER_BYTES", len(data) - 1)
    with pytest.raises(UnsafeTokenizer, match="more than the limit"):
        check_tokenizer(data)


if __name__ == "__main__":
    report(cases())
