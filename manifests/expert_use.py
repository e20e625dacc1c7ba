"""Popularity files: the use of experts in the routing traces of devices, for `moec compile --popularity`.

A file has counts, and routes of single tokens without their order. It has no text and no tokens.
Source: docs/format.md, Popularity files.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .files.input_file import UnreadableFile, read_input
from .files.limits import MAX_POPULARITY_BYTES, POPULARITY_JSON
from .files.strict_json import load_strict_json, shown
from .model import MAX_EXPERTS, MAX_LAYERS, ModelSpec

FORMAT, FORMAT_VERSION = "moec-popularity", 1
MAX_ROUTES = 1 << 16
"""Most routes of a stack."""
MAX_ROUTE_BYTES = 24 << 20
"""Most bytes of the routes of all stacks."""
ROUTE_ITEM_BYTES = 2
MAX_COUNT = 1 << 60
_KEYS = {"format", "version", "architecture", "experts", "top_k", "traces", "tokens", "chosen", "offered", "routes"}
_ROUTE_KEYS = {"first_layer", "counted", "held_out"}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMEDY = "make it with `moec merge-traces TRACE... -o FILE`"


@dataclass(frozen=True, slots=True)
class SampledRoutes:
    """Routes of some tokens of a stack: an encoder, or a decoder. The order of the tokens is lost.

    first_layer: first layer of the stack.
    counted: experts of each token in each layer of the stack that routes, [T, M, K], little-endian uint16.
    held_out: the same for tokens of other texts, on which predictions are tested.
    """

    first_layer: int
    counted: bytes
    held_out: bytes


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """The content of a popularity file. A list of one layer without experts is empty.

    architecture: digest of the traced model's architecture, see `architecture_digest`.
    experts, top_k: experts and experts per token of each layer, [L].
    traces: number of traces.
    tokens: tokens that passed each layer, [L].
    chosen: tokens that chose each expert, [L][E].
    offered: tokens that passed each layer in a bundle that holds the expert, [L][E].
    routes: routes of each stack, from bundles that hold all experts; empty if there are none.
    """

    architecture: str
    experts: tuple[int, ...]
    top_k: tuple[int, ...]
    traces: int
    tokens: tuple[int, ...]
    chosen: tuple[tuple[int, ...], ...]
    offered: tuple[tuple[int, ...], ...]
    routes: tuple[SampledRoutes, ...]

    @property
    def decoded_tokens(self) -> int:
        """Tokens that passed the last layer."""
        return self.tokens[-1]

    def never_offered(self) -> list[tuple[int, int]]:
        """Return layer and index of the experts that no traced bundle holds."""
        return [(at, e) for at, row in enumerate(self.offered) for e, tokens in enumerate(row) if not tokens]


def architecture_digest(model: ModelSpec) -> str:
    """Return a digest of what decides which experts exist: family, width, and experts of each layer.

    Weights do not count, so a fine-tuned model has the digest of its origin.
    """
    layers = [[layer.experts.count, layer.experts.top_k, layer.experts.width] for layer in model.layers]
    plain = [model.family, model.hidden_size, model.first_decoder_layer, layers]
    return hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()


def encode_use(use: ExpertUse) -> bytes:
    """Return the bytes of a popularity file. Equal values give equal bytes."""
    routes = [
        {"first_layer": stack.first_layer, "counted": _text(stack.counted), "held_out": _text(stack.held_out)}
        for stack in use.routes
    ]
    plain = {
        "format": FORMAT, "version": FORMAT_VERSION, "architecture": use.architecture, "experts": use.experts,
        "top_k": use.top_k, "traces": use.traces, "tokens": use.tokens, "chosen": use.chosen,
        "offered": use.offered, "routes": routes,
    }  # fmt: skip
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in plain.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_use(path: Path) -> tuple[ExpertUse, str]:
    """Return the content of a popularity file, and the SHA-256 of the file. Raises InputError."""
    try:
        data = read_input(path, MAX_POPULARITY_BYTES, follow_links=True)
    except UnreadableFile as error:
        raise InputError(f"`{path}` {error}", "check the path") from error
    try:
        return decode_use(data), hashlib.sha256(data).hexdigest()
    except ValueError as error:
        raise InputError(f"`{path}` is no popularity file: {error}", _REMEDY) from error


def decode_use(data: bytes) -> ExpertUse:
    """Return the content of a popularity file. The experts in routes are not checked.

    Raises ValueError with expected and found value.
    """
    plain = load_strict_json(data, POPULARITY_JSON)
    _require(isinstance(plain, dict), "an object", plain)
    _require(plain.get("format") == FORMAT, f"the format `{FORMAT}`", plain.get("format"))
    _require(plain.get("version") in (FORMAT_VERSION,), f"version {FORMAT_VERSION}", plain.get("version"))
    _require(set(plain) == _KEYS, f"the fields {', '.join(sorted(_KEYS))}", plain)
    digest = plain["architecture"]
    _require(isinstance(digest, str) and bool(_DIGEST.fullmatch(digest)), "a SHA-256 as `architecture`", digest)
    experts = _numbers(plain["experts"], "experts", MAX_EXPERTS)
    _require(1 <= len(experts) <= MAX_LAYERS, f"1 to {MAX_LAYERS} layers", len(experts))
    top_k, tokens = (_numbers(plain[name], name, MAX_COUNT, len(experts)) for name in ("top_k", "tokens"))
    _require(type(plain["traces"]) is int and 1 <= plain["traces"] <= MAX_COUNT, "1 or more `traces`", plain["traces"])
    chosen, offered = (_rows(plain[name], name, experts) for name in ("chosen", "offered"))
    for layer, (used, seen) in enumerate(zip(chosen, offered, strict=True)):
        expected = top_k[layer] * tokens[layer] if experts[layer] else 0
        _require(sum(used) == expected, f"{expected} choices in layer {layer}", sum(used))
        is_possible = all(few <= many <= tokens[layer] for few, many in zip(used, seen, strict=True))
        _require(is_possible, f"at most as many choices of an expert in layer {layer} as tokens", list(used))
    _require(isinstance(plain["routes"], list) and len(plain["routes"]) <= 2, "at most 2 stacks", plain["routes"])
    routes = []
    for row in plain["routes"]:
        _require(isinstance(row, dict) and set(row) == _ROUTE_KEYS, "`first_layer`, `counted` and `held_out`", row)
        first = row["first_layer"]
        _require(type(first) is int and 0 <= first < len(experts), f"a layer from 0 to {len(experts) - 1}", first)
        routes.append(SampledRoutes(first, _bytes(row["counted"]), _bytes(row["held_out"])))
    use = ExpertUse(digest, experts, top_k, plain["traces"], tokens, chosen, offered, tuple(routes))
    for first, end, stack in _stacks(use):
        width = ROUTE_ITEM_BYTES * sum(
            k for k, count in zip(top_k[first:end], experts[first:end], strict=True) if count
        )
        for sample in (stack.counted, stack.held_out):
            is_whole = len(sample) == 0 or (width > 0 and len(sample) % width == 0)
            _require(is_whole, f"routes of {width} bytes", len(sample))
    return use


def _stacks(use: ExpertUse) -> list[tuple[int, int, SampledRoutes]]:
    """Return first layer, end and routes of each stack. Raises ValueError if stacks do not follow each other."""
    if not use.routes:
        return []
    starts = [stack.first_layer for stack in use.routes]
    _require(starts[0] == 0 and starts == sorted(set(starts)), "stacks in order, from layer 0", starts)
    return list(zip(starts, [*starts[1:], len(use.experts)], use.routes, strict=True))


def _bytes(text: Any) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (binascii.Error, ValueError):
        data = None
    if data is None:
        raise ValueError("expected base64 as routes")
    _require(len(data) <= MAX_ROUTE_BYTES, f"at most {MAX_ROUTE_BYTES} bytes of routes", len(data))
    return data


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _rows(plain: Any, name: str, experts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    is_list = isinstance(plain, list) and len(plain) == len(experts)
    _require(is_list, f"`{name}` of {len(experts)} layers", plain)
    return tuple(
        _numbers(row, f"{name}[{at}]", MAX_COUNT, count)
        for at, (row, count) in enumerate(zip(plain, experts, strict=True))
    )


def _numbers(plain: Any, name: str, most: int, length: int | None = None) -> tuple[int, ...]:
    is_list = isinstance(plain, list) and (length is None or len(plain) == length)
    _require(is_list, f"`{name}` as a list{'' if length is None else f' of {length}'}", plain)
    wrong = next((number for number in plain if type(number) is not int or not 0 <= number <= most), None)
    is_right = wrong is None and None not in plain
    _require(is_right, f"whole numbers of 0 to {most} in `{name}`", wrong)
    return tuple(plain)


def _require(holds: bool, expected: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"expected {expected}, found {shown(value)}")
