"""Seeds of manifests and bundle files: accepted ones run, others are refused, sizes are bounded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, TABLES_NAME
from moec.manifests.model import (
    AttentionSpec,
    EncoderSpec,
    ExpertKey,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    ModelSpec,
    RelativeBiasSpec,
    RopeSpec,
    RouterSpec,
)
from moec.runtime.bundle.archive.layout import COMPRESSED, Chunk, encode_index
from tests.gates.damage import edit_manifest
from tests.hostile.bundle_writer import EXPERTS, MODEL, empty_tables, tables_file, write_tiny_bundle
from tests.hostile.seed import Seed

DONE, ACT, DAMAGED = frozenset({0}), frozenset({1}), frozenset({3})
RUN = ("run", "{bundle}", "--prompt", "Question: a", "--max-new-tokens", "3")
ARCHIVE = "{bundle}/../given.moec"


# -- models that passed `moec verify` and could not be run --------------------------------------------------------


def _with_model(model: ModelSpec) -> Callable[[Path], None]:
    """Replace the bundle by one of another model."""

    def change(bundle: Path) -> None:
        shutil.rmtree(bundle)
        write_tiny_bundle(bundle, model)

    return change


def _past_checks(spec: Any, **changes: Any) -> Any:
    """Return a copy of a specification with fields that it would refuse, as in a file written by hand."""
    copy = replace(spec)
    for name, value in changes.items():
        object.__setattr__(copy, name, value)
    return copy


def _latent_without_rotation(bundle: Path) -> None:
    latent = LatentSpec(query_rank=0, rank=32, plain_size=16, value_size=16, norm_eps=1e-6)
    whole = AttentionSpec(2, 2, 18, RopeSpec(1e4, 2), latent=latent)
    layer = LayerSpec(_past_checks(whole, rope=None, head_size=16), EXPERTS)
    _with_model(replace(MODEL, layers=(layer, layer)))(bundle)


_BIASED = AttentionSpec(2, 2, 16, None, relative_bias=RelativeBiasSpec(8, 20))


def _shared_bias_of_other_heads(bundle: Path) -> None:
    layers = (LayerSpec(_BIASED, EXPERTS), LayerSpec(replace(_BIASED, num_heads=4), EXPERTS))
    _with_model(_past_checks(MODEL, layers=layers))(bundle)


def _encoder_layers_of_other_sizes(bundle: Path) -> None:
    cross = AttentionSpec(2, 2, 16, None)
    layer = LayerSpec(cross, EXPERTS)
    layers = (layer, replace(layer, attention=replace(cross, head_size=8)), replace(layer, cross=cross))
    whole = replace(MODEL, layers=(layer, layer, layers[2]), encoder=EncoderSpec(2, 0))
    _with_model(_past_checks(whole, layers=layers))(bundle)


def _left_out_and_routers_of_nan(scoring: Any) -> Callable[[Path], None]:
    """Set every router to NaN, and leave out some experts."""

    def change(bundle: Path) -> None:
        shutil.rmtree(bundle)
        experts = ExpertsSpec(4, 2, 32, "silu", RouterSpec(scoring, True))
        model = replace(MODEL, layers=tuple(replace(layer, experts=experts) for layer in MODEL.layers))
        write_tiny_bundle(bundle, model, [ExpertKey(0, 0), ExpertKey(1, 0), ExpertKey(1, 1)])
        path = bundle / DENSE_NAME
        data = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        for name in ("layers.0.router", "layers.1.router"):
            begin, end = header[name]["data_offsets"]
            data[start + begin : start + end] = b"\xff" * (end - begin)
        path.write_bytes(data)

    return change


UNRUNNABLE = (
    Seed("latent attention without a rotary embedding", RUN, DAMAGED, _latent_without_rotation),
    Seed("a relative bias shared by other numbers of heads", RUN, DAMAGED, _shared_bias_of_other_heads),
    Seed("encoder layers with keys of other sizes", RUN, DAMAGED, _encoder_layers_of_other_sizes),
    Seed("experts left out, softmax router of NaN", RUN, ACT, _left_out_and_routers_of_nan("softmax")),
    Seed("experts left out, sigmoid router of NaN", RUN, ACT, _left_out_and_routers_of_nan("sigmoid")),
)


# -- JSON that is nested or large ---------------------------------------------------------------------------------


def _nested(field: tuple[Any, ...], depth: int) -> Callable[[Path], None]:
    """Replace a word by lists in lists, with the correct digest."""

    def change(bundle: Path) -> None:
        value: list[Any] = []
        for _ in range(depth):
            value = [value]

        def put(plain: dict[str, Any]) -> None:
            place: Any = plain
            for part in field[:-1]:
                place = place[part]
            place[field[-1]] = value

        before = sys.getrecursionlimit()
        sys.setrecursionlimit(20_000)
        try:
            edit_manifest(bundle, put)
        finally:
            sys.setrecursionlimit(before)

    return change


NESTED_DEPTHS = (973, 974, 976)


def _nested_seeds() -> tuple[Seed, ...]:
    """Return seeds with depths near the one at which a list can be read, but not printed in a message."""
    layer = ("model", "layers", 0)
    fields = {
        "activation": (*layer, "experts", "activation"),
        "scoring": (*layer, "experts", "router", "scoring"),
        "bias": (*layer, "attention", "bias"),
    }
    return tuple(
        Seed(f"{name} is a list {depth} deep", ("inspect", "{bundle}"), DAMAGED, _nested(field, depth), seal=False)
        for (name, field), depth in zip(fields.items(), NESTED_DEPTHS, strict=True)
    )


def _manifest_of(data: bytes) -> Callable[[Path], None]:
    """Replace the manifest by these bytes."""

    def change(bundle: Path) -> None:
        (bundle / MANIFEST_NAME).write_bytes(data)

    return change


def _many_lists(size_bytes: int) -> bytes:
    """Return an object with a list of empty lists."""
    return b'{"format_version": 1, "x": [' + b"[]," * (size_bytes // 3) + b"[]]}\n"


def _manifest_of_lists(bundle: Path) -> None:
    (bundle / MANIFEST_NAME).write_bytes(_many_lists(60 << 20))


def _manifest_of_blanks(bundle: Path) -> None:
    path = bundle / MANIFEST_NAME
    path.write_bytes(path.read_bytes() + b" " * (100 << 20))


def _header_of_lists(file: str) -> Callable[[Path], None]:
    """Write a safetensors header of 95 MiB of lists."""

    def change(bundle: Path) -> None:
        header = b'{"a":[' + b"[]," * (95 * (1 << 20) // 3) + b"[]]}"
        (bundle / file).write_bytes(len(header).to_bytes(8, "little") + header)

    return change


def _quality_of_lists(bundle: Path) -> None:
    (bundle / "quality.json").write_bytes(_many_lists(60 << 20))


def _archive_of_lists(size_bytes: int) -> Callable[[Path], None]:
    """Write a small archive whose manifest is large."""

    def change(bundle: Path) -> None:
        raw, step = _many_lists(size_bytes), 8 << 20
        chunks, parts = list[Chunk](), list[bytes]()
        for start in range(0, len(raw), step):
            part = raw[start : start + step]
            parts.append(zstandard.ZstdCompressor(1, write_checksum=True).compress(part))
            chunks.append(Chunk(len(parts[-1]), COMPRESSED, hashlib.sha256(part).digest()))
        bundle.with_name("given.moec").write_bytes(encode_index(step, len(raw), chunks) + b"".join(parts))

    return change


LARGE_JSON = (
    Seed("a manifest 100,000 lists deep", ("verify", "{bundle}"), DAMAGED, _manifest_of(b"[" * 100_000), seal=False),
    Seed("a manifest of 20 million lists", RUN, DAMAGED, _manifest_of_lists, seal=False),
    Seed("a manifest with 100 MiB of blanks", ("inspect", "{bundle}"), DAMAGED, _manifest_of_blanks, seal=False),
    Seed("a header of expert file of lists", RUN, DAMAGED, _header_of_lists("experts-00000.safetensors")),
    Seed("a header of the tables of lists", ("inspect", "{bundle}"), DAMAGED, _header_of_lists(TABLES_NAME)),
    Seed("a certificate of 20 million lists", ("inspect", "{bundle}"), DAMAGED, _quality_of_lists),
    Seed(
        "an archive with a manifest of 256 MiB", ("unpack", ARCHIVE, "{work}/o"), DAMAGED, _archive_of_lists(256 << 20)
    ),
    Seed("an archive with a manifest of lists", ("unpack", ARCHIVE, "{work}/o"), DAMAGED, _archive_of_lists(15 << 20)),
)


# -- memory that `--memory` must count ----------------------------------------------------------------------------


def _tables_of_many_paths(bundle: Path) -> None:
    """Write four million different rows in order: 80 MB."""
    rows = 4_000_000
    keys = np.zeros((rows, 3), np.int32)
    keys[:, 2] = np.arange(rows)
    tables = {**empty_tables(MODEL), "path.keys": keys, "path.offsets": np.zeros(rows + 1, np.int64)}
    (bundle / TABLES_NAME).write_bytes(tables_file(tables))


QUESTION = b"Question: there are 12 boxes of 7 pens, how many pens?\n"
BUDGETS = (
    Seed(
        "a prompt of 20 MB",
        ("run", "{bundle}", "--prompt", "-", "--memory", "300MiB"),
        ACT,
        standard_input=QUESTION * (20_000_000 // len(QUESTION)),
    ),
    Seed(
        "tables larger than the budget",
        (*RUN, "--memory", "120MiB", "--expert-cache", "10KiB", "--set", "prefetch=path"),
        frozenset({1, 3}),
        _tables_of_many_paths,
    ),
)


# -- what is no regular file --------------------------------------------------------------------------------------


def _pipe_next_to(ending: str) -> Callable[[Path], None]:
    return lambda bundle: os.mkfifo(bundle.with_name(bundle.name + ending))


def _pipe_instead_of(name: str) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        (bundle / name).unlink()
        os.mkfifo(bundle / name)

    return change


PIPES = (
    Seed("a pipe where the tuning lies", RUN, frozenset({0, 1}), _pipe_next_to(".tune.json")),
    Seed(
        "a pipe where modes lie",
        (*RUN, "--lossy", "big-little gamma=0.5"),
        frozenset({0, 1}),
        _pipe_next_to(".modes.json"),
    ),
    Seed("a pipe as the manifest", RUN, DAMAGED, _pipe_instead_of(MANIFEST_NAME)),
    Seed("a pipe as the tokenizer", RUN, DAMAGED, _pipe_instead_of("tokenizer.json")),
)


# -- control characters -------------------------------------------------------------------------------------------

HOSTILE_TEXT = "x\x1b]0;owned\x07\r\nmoec: all is well\x9b2J\u202e"


def _edited(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda bundle: edit_manifest(bundle, edit)


def _hostile_names(plain: dict[str, Any]) -> None:
    plain["name"] = plain["producer"] = plain["device"]["profile"] = plain["model"]["family"] = HOSTILE_TEXT
    plain["options"] = {HOSTILE_TEXT: HOSTILE_TEXT}
    plain["calibration"] = {
        "task": HOSTILE_TEXT,
        "data_sha256": "0" * 64,
        "items": 1,
        "tokens": 2,
        "seed": 0,
        "experts_without_tokens": [HOSTILE_TEXT],
    }


def _hostile_certificate(bundle: Path) -> None:
    """Write a row of a task with such a name."""
    measured = {"mean": 0.1, "agreement": 0.9}
    task = {
        "metric": HOSTILE_TEXT,
        "n": 1,
        "baseline": 0.5,
        "value": 0.5,
        "loss": None,
        "kl": measured,
        "verdict": None,
    }
    quality = {"verdict": "measured", "target": {"kind": "uniform"}, "tasks": {HOSTILE_TEXT: task}}
    (bundle / "quality.json").write_text(json.dumps(quality))


CONTROLS = (
    Seed("control characters in names", ("inspect", "{bundle}"), frozenset({0, 3}), _edited(_hostile_names)),
    Seed("control characters in a certificate", ("inspect", "{bundle}"), frozenset({0, 3}), _hostile_certificate),
    Seed("control characters in the layout", RUN, DAMAGED, _edited(lambda plain: plain.update(layout=HOSTILE_TEXT))),
    Seed(
        "control characters in a processor feature",
        RUN,
        DAMAGED,
        _edited(lambda plain: plain.update(required_cpu_features=[HOSTILE_TEXT])),
    ),
    Seed(
        "control characters in an unknown field",
        ("verify", "{bundle}"),
        DAMAGED,
        _edited(lambda plain: plain.update({HOSTILE_TEXT: 1})),
    ),
    Seed(
        "control characters in a file name",
        ("verify", "{bundle}"),
        DAMAGED,
        _edited(lambda plain: plain["files"][0].update(name=HOSTILE_TEXT)),
        seal=False,
    ),
)


SEEDS: tuple[Seed, ...] = (
    *UNRUNNABLE,
    *_nested_seeds(),
    *LARGE_JSON,
    *BUDGETS,
    *PIPES,
    *CONTROLS,
)
