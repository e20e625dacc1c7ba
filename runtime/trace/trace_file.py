"""Trace files: JSON Lines with the header first, then one object per pass. Reading is strict.

Source: docs/format.md, Routing traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO, cast

from moec.manifests.errors import InputError
from moec.manifests.files.limits import MAX_TRACE_BYTES, TRACE_LINE_JSON, JsonLimits
from moec.manifests.files.output_file import output_file
from moec.manifests.files.strict_json import load_strict_json, shown

from ..options.runtime import MAX_PREFETCH_EXPERTS, MAX_PREFETCH_LAYERS, PREFETCH_RULES, PREFETCHERS, Prefetch
from .trace import PassOrder, Trace, TracedPass, TraceHeader
from .trace_scores import prompt_scores_plain, read_prompt_scores, read_scores, scores_plain

FORMAT = "moec-trace"
FORMAT_VERSION = 5
MAX_LAYERS = 4096
MAX_EXPERTS = 1 << 16
MAX_TOKENS = 1 << 20
_MAX_NUMBER = 1 << 60
_HEADER_KEYS = {"format", "version", *(item.name for item in fields(TraceHeader))}
_PASS_KEYS = {item.name for item in fields(TracedPass)}
# Only in traces of models with an encoder.
_ENCODER_HEADER_KEY, _ENCODER_PASS_KEY = "first_decoder_layer", "first_layer"
_DIGEST = "[0-9a-f]{64}"


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace atomically.

    Raises the errors of `output_file`.
    Raises ValueError if passes begin at a decoder but the header has no encoder.
    """
    with growing_trace(path, trace.header) as add:
        for traced in trace.passes:
            add(traced)


@contextmanager
def growing_trace(path: Path, header: TraceHeader) -> Iterator[Callable[[TracedPass], None]]:
    """Write a trace pass by pass. The file appears on a clean exit; before that, and on any failure, nothing changes.

    Yields a function that writes the next pass. It raises ValueError for a pass that begins at a decoder if the header
    has no encoder.
    Raises the errors of `output_file`.
    """
    has_encoder = header.first_decoder_layer > 0
    with output_file(path) as file:

        def write(plain: dict[str, Any]) -> None:
            left_out = () if has_encoder else (_ENCODER_HEADER_KEY, _ENCODER_PASS_KEY)
            written = {name: value for name, value in plain.items() if name not in left_out}
            file.write(json.dumps(written, separators=(",", ":")).encode() + b"\n")

        def add(traced: TracedPass) -> None:
            if traced.first_layer and not has_encoder:
                raise ValueError("the header has no encoder, but passes begin after one")
            plain = asdict(traced)
            plain["scores"] = None if traced.scores is None else scores_plain(traced.scores)
            prompt_scores = traced.prompt_scores
            plain["prompt_scores"] = None if prompt_scores is None else prompt_scores_plain(prompt_scores)
            write(plain)

        write({"format": FORMAT, "version": FORMAT_VERSION, **asdict(header)})
        yield add


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises InputError with the file, the line, and what was expected and found."""
    with opened_trace(path) as (header, passes):
        return Trace(header, tuple(passes))


@contextmanager
def opened_trace(
    path: Path, line_limits: JsonLimits = TRACE_LINE_JSON
) -> Iterator[tuple[TraceHeader, Iterator[TracedPass]]]:
    """Open a trace for reading. Memory holds one line at a time.

    Yields the header, and the passes, each checked when it is read, in their order.

    line_limits: bounds of a line.
    Raises InputError as `read_trace`.
    """
    lines = _Lines(path, line_limits)
    with ExitStack() as stack:
        with lines.errors():
            if path.stat().st_size > MAX_TRACE_BYTES:
                raise ValueError(f"expected at most {MAX_TRACE_BYTES} bytes, found {path.stat().st_size}")
            file = stack.enter_context(path.open("rb"))
            header = _header(lines.following(file) or {})
        yield header, lines.passes(file, header)


class _Lines:
    """The lines of a trace, read one after the other.

    path: the file, for messages.
    limits: bounds of a line.
    """

    def __init__(self, path: Path, limits: JsonLimits) -> None:
        self._path, self._limits, self._number, self._read_bytes = path, limits, 0, 0

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn OSError and ValueError into InputError with the file and the line that was read last."""
        try:
            yield
        except OSError as error:
            raise InputError(f"the trace `{self._path}` cannot be read: {error.strerror}", "check the path") from error
        except ValueError as error:
            place = f", line {self._number}" if self._number else ""
            remedy = "record it with `moec bench BUNDLE --trace-out FILE`"
            raise InputError(f"`{self._path}`{place} is not of a routing trace: {error}", remedy) from error

    def following(self, file: BinaryIO) -> dict[str, Any] | None:
        """Return the object of the next line; None at the end of the file. Raises ValueError, OSError."""
        data = file.readline(self._limits.size_bytes + 1)
        if not data and self._number:
            return None
        self._number += 1
        self._read_bytes += len(data)
        if self._read_bytes > MAX_TRACE_BYTES:  # a pipe reports no size
            raise ValueError(f"expected at most {MAX_TRACE_BYTES} bytes")
        return _object(data, self._limits)

    def passes(self, file: BinaryIO, header: TraceHeader) -> Iterator[TracedPass]:
        """Yield the passes. Raises InputError."""
        order = PassOrder(header)
        while True:
            with self.errors():
                plain = self.following(file)
                if plain is None:
                    order.check_end()
                    return
                traced = _pass(plain, header)
                order.add(traced)
            yield traced


def _object(data: bytes, limits: JsonLimits) -> dict[str, Any]:
    if len(data) > limits.size_bytes:
        raise ValueError(f"expected at most {limits.size_bytes} bytes in a line")
    try:
        plain = load_strict_json(data, limits)
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
    if type(plain.get("version")) is not int or plain["version"] != FORMAT_VERSION:
        raise ValueError(f"expected version {FORMAT_VERSION}, found {shown(plain.get('version'))}")
    has_encoder = _ENCODER_HEADER_KEY in plain
    _check_keys(plain, _HEADER_KEYS - (set() if has_encoder else {_ENCODER_HEADER_KEY}))
    if not isinstance(plain["bundle"], str) or not re.fullmatch(_DIGEST, plain["bundle"]):
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
    if not isinstance(plain["architecture"], str) or not re.fullmatch(f"({_DIGEST})?", plain["architecture"]):
        raise ValueError(f"`architecture`: expected a SHA-256, found {shown(plain['architecture'])}")
    layers_ahead, experts_ahead = _number(plain, "prefetch_layers", 1), _number(plain, "prefetch_experts")
    if layers_ahead > MAX_PREFETCH_LAYERS or experts_ahead > MAX_PREFETCH_EXPERTS:
        raise ValueError(f"expected at most {MAX_PREFETCH_LAYERS} layers and {MAX_PREFETCH_EXPERTS} experts ahead")
    if plain["prefetch_rule"] not in PREFETCH_RULES:
        raise ValueError(f"`prefetch_rule`: expected one of {', '.join(PREFETCH_RULES)}")
    return TraceHeader(
        bundle=plain["bundle"],
        experts=experts,
        top_k=top_k,
        prompt_tokens=_number(plain, "prompt_tokens", 1),
        prefetch=cast(Prefetch, plain["prefetch"]),
        threads=_number(plain, "threads", 1),
        memory_bytes_per_s=_number(plain, "memory_bytes_per_s"),
        storage_bytes_per_s=_number(plain, "storage_bytes_per_s"),
        storage_latency_ns=_number(plain, "storage_latency_ns"),
        first_decoder_layer=first,
        prefetch_layers=layers_ahead,
        prefetch_experts=experts_ahead,
        prefetch_rule=plain["prefetch_rule"],
        little_experts=_number(plain, "little_experts"),
        architecture=plain["architecture"],
        left_out=_left_out(_list(plain, "left_out"), experts, top_k),
    )


def _left_out(layers: list[Any], counts: Sequence[int], top_k: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the experts of each layer that the bundle leaves out. An empty list is of a writer that did not know."""
    if len(layers) not in (0, len(counts)):
        raise ValueError(f"`left_out`: expected a list of {len(counts)}")
    left_out = tuple(_experts(f"left_out[{at}]", experts, counts[at]) for at, experts in enumerate(layers))
    for layer, (experts, count, few) in enumerate(zip(left_out, counts, top_k, strict=False)):
        if len(set(experts)) != len(experts) or len(experts) > count - few:
            raise ValueError(f"`left_out[{layer}]`: expected at most {count - few} different experts")
    return left_out


def _pass(plain: dict[str, Any], header: TraceHeader) -> TracedPass:
    has_encoder, first = header.first_decoder_layer > 0, 0
    _check_keys(plain, _PASS_KEYS - (set() if has_encoder else {_ENCODER_PASS_KEY}))
    if has_encoder:
        first = _number(plain, _ENCODER_PASS_KEY)
        if first not in (0, header.first_decoder_layer):
            raise ValueError(f"`{_ENCODER_PASS_KEY}`: expected 0 or {header.first_decoder_layer}, found {first}")
    end = header.first_decoder_layer if has_encoder and not first else len(header.experts)
    layers, tokens = end - first, _number(plain, "tokens", 1)
    if tokens > MAX_TOKENS:
        raise ValueError(f"`tokens`: expected at most {MAX_TOKENS}, found {tokens}")
    chosen = [
        _experts(f"chosen[{layer}]", experts, header.experts[first + layer])
        for layer, experts in enumerate(_list(plain, "chosen", layers))
    ]
    for layer, (experts, top_k) in enumerate(zip(chosen, header.top_k[first:end], strict=True)):
        _check_choice(layer, experts, tokens, top_k)
    for layer, left_out in enumerate(header.left_out[first:end]):
        if left_out and not set(left_out).isdisjoint(chosen[layer]):
            raise ValueError(f"`chosen[{layer}]`: a token chooses an expert that the bundle leaves out")
    total, prompt_scores = sum(header.experts), plain["prompt_scores"]
    for name, is_wanted in (("scores", tokens == 1), ("prompt_scores", tokens > 1)):
        if plain[name] is not None and (has_encoder or not is_wanted):
            count = "one token" if tokens == 1 else f"{tokens} tokens"
            raise ValueError(f"`{name}`: expected null {'with an encoder' if has_encoder else f'in a pass of {count}'}")
    advice = [
        _experts(f"advice[{layer}]", experts, total) for layer, experts in enumerate(_list(plain, "advice", layers))
    ]
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
        scores=None if plain["scores"] is None else read_scores(plain["scores"], header.experts),
        prompt_scores=None if prompt_scores is None else read_prompt_scores(prompt_scores, header.experts),
    )


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


def _experts(name: str, values: object, count: int) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"`{name}`: expected a list of experts")
    return _checked(name, values, count - 1)


def _checked(name: str, values: Iterable[Any], most: int) -> tuple[int, ...]:
    numbers = tuple(values)
    wrong = next((number for number in numbers if type(number) is not int or not 0 <= number <= most), None)
    if wrong is not None or None in numbers:
        raise ValueError(f"`{name}`: expected whole numbers of 0 to {most}, found {shown(wrong)}")
    return numbers


def _number(plain: dict[str, Any], name: str, least: int = 0) -> int:
    number = plain[name]
    if type(number) is not int or not least <= number <= _MAX_NUMBER:
        raise ValueError(f"`{name}`: expected a whole number of {least} or more, found {shown(number)}")
    return number
