"""Seeds of command lines: names of bundles and files that no system has, extreme values of options, and input files.

Input files stand next to a bundle: task files, device profiles, data of tasks, and model folders.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.hostile.seed import Seed
from tests.hostile.seeds_manifest import RUN

PROMPTS = "{bundle}/../prompts.jsonl"


def _with_prompts(bundle: Path) -> None:
    bundle.with_name("prompts.jsonl").write_text('{"prompt": "a b"}\n')


def _generate(bundle: str, out: str) -> tuple[str, ...]:
    return ("generate", bundle, "--prompts", PROMPTS, "--out", out, "--max-new-tokens", "2")


def _commands(path: str) -> dict[str, tuple[str, ...]]:
    """Return the commands that take a bundle or an archive, with this path."""
    return {
        "run": ("run", path, "--prompt", "x"),
        "generate": _generate(path, "{work}/out.jsonl"),
        "inspect": ("inspect", path),
        "verify": ("verify", path),
        "pack": ("pack", path, "{work}/x.moec"),
        "unpack": ("unpack", path, "{work}/x"),
    }


REFUSED = frozenset({1, 2, 3})
NAMES = (
    *(
        Seed(f"{command} on the root folder", arguments, REFUSED, _with_prompts)
        for command, arguments in _commands("/").items()
    ),
    *(
        Seed(f"{command} on a path of 5,000 characters", arguments, REFUSED, _with_prompts)
        for command, arguments in _commands("{bundle}/" + "x" * 5000).items()
    ),
    Seed("pack into a path of 5,000 characters", ("pack", "{bundle}", "{work}/" + "x" * 5000), REFUSED),
    Seed("pack into the root folder", ("pack", "{bundle}", "/"), REFUSED),
    *(
        Seed(f"generate into {what}", _generate("{bundle}", out), REFUSED, _with_prompts)
        for what, out in {"nothing": "", "the root folder": "/", "a long name": "{work}/" + "x" * 300}.items()
    ),
)

OPTIONS = (
    Seed(
        "a repetition penalty of 1e-40",
        (*RUN, "--temperature", "1", "--repetition-penalty", "1e-40"),
        frozenset({0, 1, 2}),
    ),
)
TASK_REFUSED = frozenset({1})
ROW = b'{"q": "a b", "a": "b"}\n'
TASK = b'prompt = "{q}"\nanswer = "a"\nmax_new_tokens = 4\n'
DEEP = b"a" + b".a" * 30_000 + b" = 1"


def _write(files: dict[str, bytes], bundle: Path) -> None:
    for name, content in files.items():
        bundle.with_name(name).write_bytes(content)


def _in_cache(files: dict[str, bytes], bundle: Path) -> None:
    """Write files as the cache of a hub holds them: links in `snapshots` to files in `blobs`."""
    blobs, snapshot = bundle.with_name("cache") / "blobs", bundle.with_name("cache") / "snapshots" / "0"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for at, (name, content) in enumerate(files.items()):
        (blobs / str(at)).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{at}")


def _task(name: str, content: bytes, codes: frozenset[int] = TASK_REFUSED) -> Seed:
    arguments = ("eval", "{bundle}", "--data", "{bundle}/../rows.jsonl", "--task", "{bundle}/../words.toml")
    return Seed(f"task file: {name}", arguments, codes, partial(_write, {"rows.jsonl": ROW, "words.toml": content}))


def _filter(name: str, pattern: bytes, codes: frozenset[int]) -> Seed:
    return _task(f"filter {name}", TASK + b"filter = '" + pattern + b"'", codes)


def _profile(name: str, content: bytes) -> Seed:
    arguments = ("compile", "{bundle}", "--uniform", "4", "-o", "{work}/x", "--device", "{bundle}/../board.toml")
    return Seed(f"profile: {name}", arguments, TASK_REFUSED, partial(_write, {"board.toml": content}))


INPUTS = (
    _task("30,000 parts of a key", DEEP),
    _task("30,000 parts of a table's name", b"[" + DEEP[:-4] + b"]"),
    _task("30,000 brackets", b"a = " + b"[" * 30_000),
    _task("tables of 8 parts", b"".join(b"%x.b.c.d.e.f.g.h=1\n" % at for at in range(3200))),
    _task("a number of 5,000 digits", TASK + b"stop = " + b"9" * 5000),
    _task("a hexadecimal number of 60,000 digits", TASK + b"stop = 0x" + b"f" * 60_000),
    _task("60,000 zero bytes", b"\0" * 60_000),
    _filter("of 5,000 parentheses", b"(" * 5000, TASK_REFUSED),
    _filter("of a huge repetition", b"a{4294967296}", frozenset({0})),
    _filter("of nested repetitions", b"(?:a{999}){999}", TASK_REFUSED),
    _filter("of no character", rb"\U99999999", TASK_REFUSED),
    _filter("with a backreference", rb"(a)\1", TASK_REFUSED),
    _filter("that backtracks", rb"(?:[\s\S]+)+\x01", frozenset({0})),
    _profile("30,000 parts of a key", DEEP),
    _profile("a number of 5,000 digits", b"threads = " + b"9" * 5000),
)
SNAPSHOT = "{bundle}/../cache/snapshots/0"
LISTS = b"[" + b"[]," * 2_000_000 + b"[]]"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
MORE_SIZES = ("num_local_experts", "num_experts_per_tok", "vocab_size", "max_position_embeddings", "head_dim")
FIXED = {"model_type": "mixtral", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4}
CONFIG = json.dumps({**FIXED, **dict.fromkeys(SIZES + MORE_SIZES, 2)}).encode()
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MODEL = {"config.json": CONFIG, "model.safetensors": b"\2\0\0\0\0\0\0\0{}"}
COMPILE = ("compile", SNAPSHOT, "--uniform", "4", "-o", "{work}/x")


def _cached(name: str, arguments: tuple[str, ...], files: dict[str, bytes]) -> Seed:
    return Seed(f"cache of a hub: {name}", arguments, TASK_REFUSED, partial(_in_cache, files))


def _cached_data(name: str, content: bytes) -> Seed:
    arguments = ("eval", "{bundle}", "--task", "perplexity", "--data", SNAPSHOT)
    return _cached(f"data {name}", arguments, {f"test{name}": content})


CACHED = (
    _cached(
        "a task file",
        ("eval", "{bundle}", "--task", f"{SNAPSHOT}/words.toml", "--data", f"{SNAPSHOT}/rows.jsonl"),
        {"words.toml": DEEP, "rows.jsonl": ROW},
    ),
    _cached("a profile", (*COMPILE[:-2], "--device", f"{SNAPSHOT}/board.toml"), {**MODEL, "board.toml": DEEP}),
    *(
        _cached(name, COMPILE, {**MODEL, name: LISTS})
        for name in ("config.json", "generation_config.json", *COMPANIONS)
    ),
    _cached("an index", COMPILE, {"config.json": CONFIG, "model.safetensors.index.json": LISTS}),
    _cached("a header", COMPILE, {**MODEL, "model.safetensors": len(LISTS).to_bytes(8, "little") + LISTS}),
    _cached_data(".json", LISTS),
    _cached_data(".jsonl", b'{"text": ' + b"[" * 100_000),
    _cached_data(".csv", b"a," * 1_000_000),
    _cached_data(".parquet", b"PAR1" * 100_000),
)

SEEDS: tuple[Seed, ...] = (*NAMES, *OPTIONS, *INPUTS, *CACHED)
