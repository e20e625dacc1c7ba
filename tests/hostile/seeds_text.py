"""Seeds of tokenizers and chat templates of a bundle, and of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.gates.damage import edit_manifest
from tests.hostile.seed import Seed

PROMPT = ("run", "{bundle}", "--prompt", "Question: aaaaaaaaaaaaaaaa!", "--max-new-tokens", "2")
CHAT = ("run", "{bundle}", "--chat", "--prompt", "hello", "--max-new-tokens", "2")
STDIN = ("run", "{bundle}", "--prompt", "-", "--max-new-tokens", "2")
DAMAGED, REFUSED = frozenset({3}), frozenset({1})
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
MANY = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}},
}
LONG = "{% for i in range(99999) %}{{ 'a'*100000 }}{% endfor %}"


def _write(name: str, content: bytes, bundle: Path) -> None:
    (bundle / name).write_bytes(content)


def _sections(sections: dict[str, Any], bundle: Path) -> None:
    path = bundle / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **sections}))


def _hidden(bundle: Path) -> None:
    """Put a member at a place that a reader that skips the vocabulary would not see."""
    path = bundle / "tokenizer.json"
    evil = '"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}'
    path.write_text(f"{json.dumps(json.loads(path.read_bytes()))[:-1]}, {evil}}}")


def _template(name: str, text: str, codes: frozenset[int] = DAMAGED) -> Seed:
    return Seed(f"template: {name}", CHAT, codes, partial(_write, "chat_template.jinja", text.encode()))


def _only_settings(text: str, bundle: Path) -> None:
    """Write the settings, and remove the template file that would be used instead of them."""
    _write("tokenizer_config.json", text.encode(), bundle)
    (bundle / "chat_template.jinja").unlink(missing_ok=True)

    def unlist(plain: dict[str, Any]) -> None:
        plain["files"] = [entry for entry in plain["files"] if entry["name"] != "chat_template.jinja"]

    edit_manifest(bundle, unlist)


def _settings(name: str, text: str, codes: frozenset[int]) -> Seed:
    return Seed(f"settings: {name}", CHAT, codes, partial(_only_settings, text))


def _tokenizer(name: str, codes: frozenset[int] = DAMAGED, **sections: Any) -> Seed:
    return Seed(f"tokenizer: {name}", PROMPT, codes, partial(_sections, sections))


def _file(name: str, change: Callable[[Path], None]) -> Seed:
    return Seed(f"tokenizer: {name}", PROMPT, DAMAGED, change)


SEEDS = [
    _template("loops", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    _template(
        "doubled",
        "{% set ns = namespace(a='a'*1000000) %}{% for i in range(15) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    ),
    _template("captured", f"{{% set x %}}{LONG}{{% endset %}}"),
    _template("long", LONG),
    _template("padding", "{{ '%2000000000d' % 1 }}"),
    _template("21 loops", "{% for i in [1] %}" * 21 + "{% endfor %}" * 21),
    _template("break", "{% break %}"),
    _template("argument twice", "{{ namespace(a=1, a=2) }}"),
    _template("infinity", "{{ 'inf'|float|int }}"),
    _template("cycler", "{{ cycler() }}"),
    _template("brackets", "{{ " + "(" * 100_000),
    _template("refusal", "{{ raise_exception('no') }}", REFUSED),
    _template("classes", "{{ ''.__class__.__mro__ }}", REFUSED),
    _settings("name is a list", '{"chat_template": [{"name": [], "template": "x"}]}', REFUSED),
    _settings("brackets", "[" * 100_000, DAMAGED),
    _settings("lists", "[" + "[]," * 1_300_000 + "[]]", DAMAGED),
    _tokenizer("charsmap", normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    _tokenizer("catastrophic split", pre_tokenizer=SPLIT),
    _tokenizer("fixed length 0", pre_tokenizer={"type": "FixedLength", "length": 0}),
    _tokenizer("strip", decoder={"type": "Strip", "content": "a", "start": 1 << 40, "stop": 1 << 40}),
    _tokenizer("strip both ends", decoder={"type": "Strip", "content": "a", "start": 1, "stop": 1}),
    _tokenizer("12 replaces", normalizer={"type": "Sequence", "normalizers": [REPLACE] * 12}),
    _tokenizer("4 replaces", decoder={"type": "Sequence", "decoders": [{**REPLACE, "content": "a" * 1000}] * 4}),
    _tokenizer("a replace of nothing", normalizer={**REPLACE, "pattern": {"String": ""}, "content": "x"}),
    _tokenizer("a regular replace of nothing", normalizer={**REPLACE, "pattern": {"Regex": r"\b"}, "content": "x"}),
    _tokenizer(
        "a long added token",
        added_tokens=[
            {
                "id": 300,
                "content": "b" * 5_000_000,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
    ),
    _tokenizer("a million tokens", post_processor=MANY),
    _tokenizer("no unk_id", REFUSED, model={"type": "Unigram", "vocab": [["b", 0.0]]}),
    _tokenizer("empty WordLevel", model={"type": "WordLevel", "unk_token": "x", "vocab": {}}),
    _file("hidden member", _hidden),
    _file("brackets", partial(_write, "tokenizer.json", b"[" * 100_000)),
    _file("lists", partial(_write, "tokenizer.json", b"[" + b"[]," * 3_000_000 + b"[]]")),
    Seed("prompt: 20 MB", STDIN, REFUSED, standard_input=b"Question: how many? " * 1_000_000),
    Seed("prompt: 300 kB, chat", (*STDIN, "--chat"), REFUSED, standard_input=b"Question: how many? " * 15_000),
    Seed("prompt: no UTF-8", STDIN, REFUSED, standard_input=b"\xff\xfe"),
]
