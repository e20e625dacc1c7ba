"""Seeds of files in a bundle that a run reads: the device profile, the tokenizer and chat templates. And of prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moec.manifests.bundle import DEVICE_NAME, QUALITY_NAME
from moec.manifests.files.limits import MAX_DEVICE_BYTES
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import encode_device
from moec.profiles.loading import load_profile
from moec.profiles.probe import allowed_processors
from moec.profiles.processor import instruction_sets
from tests.gates.damage import edit_manifest
from tests.hostile.seed import Seed

DONE, ACT, DAMAGED = frozenset({0}), frozenset({1}), frozenset({3})
RUN = ("run", "{bundle}", "--prompt", "Question: a", "--max-new-tokens", "3")
PROMPT = ("run", "{bundle}", "--prompt", "Question: aaaaaaaaaaaaaaaa!", "--max-new-tokens", "2")
CHAT = ("run", "{bundle}", "--chat", "--prompt", "hello", "--max-new-tokens", "2")
STDIN = ("run", "{bundle}", "--prompt", "-", "--max-new-tokens", "2")
REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
MANY = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [1] * 1000, "tokens": ["x"] * 1000}},
}
LONG = "{% for i in range(99999) %}{{ 'a'*100000 }}{% endfor %}"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
ADDED = {"id": 300, **dict.fromkeys(FLAGS, False), "special": True}


def write_device(bundle: Path, profile: DeviceProfile) -> None:
    """Give a bundle the profile of a device, as a compile for it does."""

    def name_it(plain: dict[str, Any]) -> None:
        plain["device"].update(profile=profile.name, profile_sha256=profile.sha256)

    (bundle / DEVICE_NAME).write_bytes(encode_device(profile))
    edit_manifest(bundle, name_it)


def _device(profile: DeviceProfile) -> Callable[[Path], None]:
    return lambda bundle: write_device(bundle, profile)


def _edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Write a profile, and change its values without its digest."""

    def change(bundle: Path) -> None:
        write_device(bundle, load_profile("laptop"))
        plain = json.loads((bundle / DEVICE_NAME).read_bytes())
        edit(plain)
        (bundle / DEVICE_NAME).write_bytes((json.dumps(plain, indent=1) + "\n").encode())

    return change


def _of_bytes(data: bytes) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        write_device(bundle, load_profile("laptop"))
        (bundle / DEVICE_NAME).write_bytes(data)

    return change


def _pipe(bundle: Path) -> None:
    write_device(bundle, load_profile("laptop"))
    (bundle / DEVICE_NAME).unlink()
    os.mkfifo(bundle / DEVICE_NAME)


def _link(bundle: Path) -> None:
    (bundle / DEVICE_NAME).symlink_to(bundle / QUALITY_NAME)


def _board(**changes: Any) -> DeviceProfile:
    """A device like this machine."""
    laptop = load_profile("laptop")
    return replace(laptop, threads=len(allowed_processors()), instruction_sets=instruction_sets(), **changes)


DEVICES = (
    Seed("a profile of another machine", RUN, DONE, _device(load_profile("jetson-tx2-hdd"))),
    Seed("a profile that is verified", ("verify", "{bundle}"), DONE, _device(load_profile("jetson-tx2-hdd"))),
    Seed("a profile of this machine with a budget of a byte", RUN, ACT, _device(_board(memory_budget_bytes=1))),
    Seed("a profile of this machine, memory given", (*RUN, "--memory", "1GB"), DONE, _device(_board())),
    Seed("an empty profile", RUN, DAMAGED, _of_bytes(b"")),
    Seed("a profile of lists", RUN, DAMAGED, _of_bytes(b"[" * 100_000)),
    Seed("a profile that is too large", RUN, DAMAGED, _of_bytes(b" " * (MAX_DEVICE_BYTES + 1))),
    Seed("a profile of another device than the manifest names", RUN, DAMAGED, _edited(lambda p: p.update(threads=9))),
    Seed("such a profile, verified", ("verify", "{bundle}"), DAMAGED, _edited(lambda p: p.update(threads=9))),
    Seed("such a profile, inspected", ("inspect", "{bundle}"), DAMAGED, _edited(lambda p: p.update(threads=9))),
    Seed("a profile with control characters", RUN, DAMAGED, _edited(lambda p: p.update(name="x\x1b]0;owned\x07"))),
    Seed("a profile with an unknown key", RUN, DAMAGED, _edited(lambda p: p.update({"x\x1b": 1}))),
    Seed("a profile of a later version", RUN, DAMAGED, _edited(lambda p: p.update(format_version=10**9))),
    Seed("a profile that the manifest does not list", RUN, DAMAGED, _device(load_profile("laptop")), seal=False),
    Seed("a pipe as the profile", RUN, DAMAGED, _pipe),
    Seed("a link as the profile", RUN, DAMAGED, _link),
)


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


TEXTS = (
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
    _template("refusal", "{{ raise_exception('no') }}", ACT),
    _template("classes", "{{ ''.__class__.__mro__ }}", ACT),
    _settings("name is a list", '{"chat_template": [{"name": [], "template": "x"}]}', ACT),
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
    _tokenizer("a long added token", added_tokens=[{**ADDED, "content": "b" * 5_000_000}]),
    _tokenizer("a million tokens", post_processor=MANY),
    _tokenizer("no unk_id", ACT, model={"type": "Unigram", "vocab": [["b", 0.0]]}),
    _tokenizer("empty WordLevel", model={"type": "WordLevel", "unk_token": "x", "vocab": {}}),
    _file("hidden member", _hidden),
    _file("brackets", partial(_write, "tokenizer.json", b"[" * 100_000)),
    _file("lists", partial(_write, "tokenizer.json", b"[" + b"[]," * 3_000_000 + b"[]]")),
    Seed("prompt: 20 MB", STDIN, ACT, standard_input=b"Question: how many? " * 1_000_000),
    Seed("prompt: 300 kB, chat", (*STDIN, "--chat"), ACT, standard_input=b"Question: how many? " * 15_000),
    Seed("prompt: no UTF-8", STDIN, ACT, standard_input=b"\xff\xfe"),
)

SEEDS: tuple[Seed, ...] = (*DEVICES, *TEXTS)
