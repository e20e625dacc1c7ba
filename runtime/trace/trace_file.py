"""Trace files: JSON Lines with the header first, then one object per pass. Reading is strict.

Source: docs/format.md, Routing traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

from moec.manifests.errors import InputError
from moec.manifests.files.limits import MAX_TRACE_BYTES, MAX_TRACE_LINE_BYTES, TRACE_LINE_JSON
from moec.manifests.files.output_file import output_file
from moec.manifests.files.strict_json import load_strict_json, shown

from ..options.runtime import MAX_PREFETCH_EXPERTS, MAX_PREFETCH_LAYERS, PREFETCH_RULES, PREFETCHERS, Prefetch
from .trace import PassScores, PromptScores, Trace, TracedPass, TraceHeader
from .trace_scores import prompt_scores_plain, read_prompt_scores, read_scores, scores_plain

FORMAT = "moec-trace"
FORMAT_VERSION = 4
READ_VERSIONS = (1, 2, 3, 4)
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_TOKENS = 1 << 20
_MAX_NUMBER = 1 << 60
_RATES = ("memory_bytes_per_s", "storage_bytes_per_s", "storage_latency_ns")
_HEADER_KEYS = {"format", "version", *(item.name for item in fields(TraceHeader))}
_PASS_KEYS = {item.name for item in fields(TracedPass)}
# Only in traces of models with an encoder.
_ENCODER_HEADER_KEY, _ENCODER_PASS_KEY = "first_decoder_layer", "first_layer"
_SINCE_2 = {"prefetch_layers", "prefetch_experts", "prefetch_rule", "scores"}
_SINCE_3 = {"little_experts"}
_SINCE_4 = {"prompt_scores"}


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace atomically.

    Raises the errors of `output_file`.
    Raises ValueError if passes begin at a decoder but the header has no encoder.
    """
    has_encoder = trace.header.first_decoder_layer > 0
    if not has_encoder and any(each.first_layer for each in trace.passes):
        raise ValueError("the header has no encoder, but passes begin after one")
    header = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(trace.header)}
    lines = [header, *map(_pass_plain, trace.passes)]
    if not has_encoder:
        lines = [_without(line, _ENCODER_HEADER_KEY, _ENCODER_PASS_KEY) for line in lines]
    with output_file(path) as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises InputError with the file, the line, and what was expected and found."""
    line = read_bytes = 0
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise ValueError(f"expected at most {MAX_TRACE_BYTES} bytes, found {path.stat().st_size}")
        with path.open("rb") as file:
            line = 1
            plain = _object(file.readline(MAX_TRACE_LINE_BYTES + 1))
            header, passes = _header(plain), list[TracedPass]()
            while data := file.readline(MAX_TRACE_LINE_BYTES + 1):
                line += 1
                read_bytes += len(data)
                if read_bytes > MAX_TRACE_BYTES:  # a pipe reports no size
                    raise ValueError(f"expected at most {MAX_TRACE_BYTES} bytes")
                passes.append(_pass(_object(data), header, plain["version"]))
        trace = Trace(header, tuple(passes))
        if any(each.tokens != 1 for each in passes[trace.prompt_passes :]):
            raise ValueError("expected passes of one token after the prompt")
    except OSError as error:
        raise InputError(f"the trace `{path}` cannot be read: {error.strerror}", "check the path") from error
    except ValueError as error:
        place = f", line {line}" if line else ""
        remedy = "record it with `moec bench BUNDLE --trace-out FILE`"
        raise InputError(f"`{path}`{place} is not of a routing trace: {error}", remedy) from error
    return trace


def _without(plain: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in plain.items() if name not in keys}


def _pass_plain(each: TracedPass) -> dict[str, Any]:
    plain = asdict(each)
    plain["scores"] = None if each.scores is None else scores_plain(each.scores)
    plain["prompt_scores"] = None if each.prompt_scores is None else prompt_scores_plain(each.prompt_scores)
    return plain


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_TRACE_LINE_BYTES:
        raise ValueError(f"expected at most {MAX_TRACE_LINE_BYTES} bytes in a line")
    try:
        plain = load_strict_json(data, TRACE_LINE_JSON)
    except UnicodeDecodeError:
        raise ValueError("expected UTF-8") from None
    except ValueError as error:
        raise ValueError(f"expected JSON: {error}") from None
    if not isinstance(plain, dict):
        raise ValueError("expected a JSON object")
    return plain


def _header(plain: dict[str, Any]) -> TraceHeader:
    if plain.get("format") != FORMAT:
        raise ValueError(f"expected the format `{FORMAT}`, found {shown(plain.get('format'))}")
    if type(plain.get("version")) is not int or plain["version"] not in READ_VERSIONS:
        versions = ", ".join(map(str, READ_VERSIONS))
        raise ValueError(f"expected version {versions}, found {shown(plain.get('version'))}")
    has_encoder = _ENCODER_HEADER_KEY in plain
    unknown = (_SINCE_2 if plain["version"] < 2 else set()) | (_SINCE_3 if plain["version"] < 3 else set())
    _check_keys(plain, _HEADER_KEYS - unknown - (set() if has_encoder else {_ENCODER_HEADER_KEY}))
    if not isinstance(plain["bundle"], str) or not re.fullmatch(r"[0-9a-f]{64}", plain["bundle"]):
        raise ValueError(f"`bundle`: expected a SHA-256, found {shown(plain['bundle'])}")
    if plain["prefetch"] not in PREFETCHERS:
        raise ValueError(f"`prefetch`: expected one of {', '.join(PREFETCHERS)}")
    experts = _numbers(plain, "experts", MAX_EXPERTS)
    if not 1 <= len(experts) <= MAX_LAYERS:
        raise ValueError(f"`experts`: expected 1 to {MAX_LAYERS} layers, found {len(experts)}")
    top_k = _numbers(plain, "top_k", MAX_EXPERTS, len(experts))
    if any(few > count for few, count in zip(top_k, experts, strict=True)):
        raise ValueError("`top_k`: expected at most a layer's experts")
    first = _number(plain, _ENCODER_HEADER_KEY, 1) if has_encoder else 0
    if first >= len(experts):
        raise ValueError(f"`{_ENCODER_HEADER_KEY}`: expected less than the {len(experts)} layers, found {first}")
    numbers = {name: _number(plain, name, 1) for name in ("prompt_tokens", "threads", *_RATES)}
    known: dict[str, Any] = {"bundle": plain["bundle"], "experts": experts, "top_k": top_k, **numbers}
    header = TraceHeader(prefetch=cast(Prefetch, plain["prefetch"]), first_decoder_layer=first, **known)
    if "little_experts" in plain:
        header = replace(header, little_experts=_number(plain, "little_experts"))
    return header if plain["version"] == 1 else replace(header, **_advice_options(plain))


def _advice_options(plain: dict[str, Any]) -> dict[str, Any]:
    layers, experts = _number(plain, "prefetch_layers", 1), _number(plain, "prefetch_experts")
    if layers > MAX_PREFETCH_LAYERS or experts > MAX_PREFETCH_EXPERTS:
        raise ValueError(f"expected at most {MAX_PREFETCH_LAYERS} layers and {MAX_PREFETCH_EXPERTS} experts ahead")
    if plain["prefetch_rule"] not in PREFETCH_RULES:
        raise ValueError(f"`prefetch_rule`: expected one of {', '.join(PREFETCH_RULES)}")
    return {"prefetch_layers": layers, "prefetch_experts": experts, "prefetch_rule": plain["prefetch_rule"]}


def _pass(plain: dict[str, Any], header: TraceHeader, version: int) -> TracedPass:
    has_encoder, first = header.first_decoder_layer > 0, 0
    unknown = (_SINCE_2 if version < 2 else set()) | (_SINCE_4 if version < 4 else set())
    _check_keys(plain, _PASS_KEYS - unknown - (set() if has_encoder else {_ENCODER_PASS_KEY}))
    if has_encoder:
        first = _number(plain, _ENCODER_PASS_KEY)
        if first not in (0, header.first_decoder_layer):
            raise ValueError(f"`{_ENCODER_PASS_KEY}`: expected 0 or {header.first_decoder_layer}, found {first}")
    end = header.first_decoder_layer if has_encoder and not first else len(header.experts)
    layers, tokens = end - first, _number(plain, "tokens", 1)
    if tokens > MAX_TOKENS:
        raise ValueError(f"`tokens`: expected at most {MAX_TOKENS}, found {tokens}")
    chosen = [
        _experts(f"chosen[{layer}]", found, header.experts[first + layer])
        for layer, found in enumerate(_list(plain, "chosen", layers))
    ]
    for layer, (experts, top_k) in enumerate(zip(chosen, header.top_k[first:end], strict=True)):
        _check_choice(layer, experts, tokens, top_k)
    total = sum(header.experts)
    advice = [_experts(f"advice[{layer}]", found, total) for layer, found in enumerate(_list(plain, "advice", layers))]
    return TracedPass(
        tokens=tokens,
        chosen=tuple(chosen),
        advice=tuple(advice),
        dense_ns=_numbers(plain, "dense_ns", _MAX_NUMBER, layers),
        experts_ns=_numbers(plain, "experts_ns", _MAX_NUMBER, layers),
        shared_ns=_numbers(plain, "shared_ns", _MAX_NUMBER, layers),
        head_ns=_number(plain, "head_ns"),
        elapsed_ns=_number(plain, "elapsed_ns"),
        stall_ns=_number(plain, "stall_ns"),
        first_layer=first,
        scores=_scores(plain.get("scores"), header, tokens),
        prompt_scores=_prompt_scores(plain.get("prompt_scores"), header, tokens),
    )


def _scores(plain: object, header: TraceHeader, tokens: int) -> PassScores | None:
    if plain is None:
        return None
    if tokens != 1 or header.first_decoder_layer:
        which = "with an encoder" if header.first_decoder_layer else f"in a pass of {tokens} tokens"
        raise ValueError(f"`scores`: expected null {which}")
    return read_scores(plain, header.experts)


def _prompt_scores(plain: object, header: TraceHeader, tokens: int) -> PromptScores | None:
    if plain is None:
        return None
    if tokens == 1 or header.first_decoder_layer:
        which = "with an encoder" if header.first_decoder_layer else "in a pass of one token"
        raise ValueError(f"`prompt_scores`: expected null {which}")
    return read_prompt_scores(plain, header.experts)


def _check_choice(layer: int, experts: Sequence[int], tokens: int, top_k: int) -> None:
    if len(experts) != tokens * top_k:
        raise ValueError(f"`chosen[{layer}]`: expected {tokens} x {top_k} experts, found {len(experts)}")
    for token in range(tokens if top_k else 0):
        if len(set(experts[token * top_k : (token + 1) * top_k])) != top_k:
            raise ValueError(f"`chosen[{layer}]`: token {token} chooses an expert twice")


def _check_keys(plain: dict[str, Any], expected: set[str]) -> None:
    if set(plain) != expected:
        unknown, missing = sorted(set(plain) - expected)[:3], sorted(expected - set(plain))[:3]
        raise ValueError(f"expected other fields, unknown {[name[:40] for name in unknown]}, missing {missing}")


def _list(plain: dict[str, Any], name: str, length: int | None = None) -> list[Any]:
    values = plain[name]
    if not isinstance(values, list) or (length is not None and len(values) != length):
        raise ValueError(f"`{name}`: expected a list{'' if length is None else f' of {length}'}")
    return values


def _numbers(plain: dict[str, Any], name: str, most: int, length: int | None = None) -> tuple[int, ...]:
    return _checked(name, _list(plain, name, length), most)


def _experts(name: str, found: object, count: int) -> tuple[int, ...]:
    if not isinstance(found, list):
        raise ValueError(f"`{name}`: expected a list of experts")
    return _checked(name, found, count - 1)


def _checked(name: str, found: Iterable[Any], most: int) -> tuple[int, ...]:
    numbers = tuple(found)
    wrong = next((number for number in numbers if type(number) is not int or not 0 <= number <= most), None)
    if wrong is not None or None in numbers:
        raise ValueError(f"`{name}`: expected whole numbers of 0 to {most}, found {shown(wrong)}")
    return numbers


def _number(plain: dict[str, Any], name: str, least: int = 0) -> int:
    number = plain[name]
    if type(number) is not int or not least <= number <= _MAX_NUMBER:
        raise ValueError(f"`{name}`: expected a whole number of {least} or more, found {shown(number)}")
    return number
