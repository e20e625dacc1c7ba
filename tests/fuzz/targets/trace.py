"""Routing traces: JSON lines of `moec bench --trace-out`."""

from __future__ import annotations

import json

from moec.manifests.errors import InputError
from moec.runtime.trace.trace_file import read_trace
from tests.fuzz.targets.scratch import file_of


def target(data: bytes) -> None:
    try:
        read_trace(file_of("a.trace", data))
    except InputError:
        return


def _lines(*objects: dict[str, object]) -> bytes:
    return b"".join(json.dumps(plain).encode() + b"\n" for plain in objects)


def seeds() -> list[bytes]:
    rates = {"memory_bytes_per_s": 1, "storage_bytes_per_s": 1, "storage_latency_ns": 1}
    ahead = {"prefetch_layers": 2, "prefetch_experts": 2, "prefetch_rule": "likely"}
    header: dict[str, object] = {
        "format": "moec-trace",
        "version": 3,
        "bundle": "0" * 64,
        "experts": [4, 4],
        "top_k": [2, 2],
        "prompt_tokens": 2,
        "threads": 1,
        "prefetch": "lookahead",
        "little_experts": 0,
        **rates,
        **ahead,
    }
    times = {name: [1, 1] for name in ("dense_ns", "experts_ns", "shared_ns")}
    rest = {"head_ns": 1, "elapsed_ns": 9, "stall_ns": 0}
    prompt: dict[str, object] = {
        "tokens": 2,
        "chosen": [[0, 1, 2, 3], [3, 2, 1, 0]],
        "advice": [[], []],
        "scores": None,
    }
    token: dict[str, object] = {"tokens": 1, "chosen": [[0, 1], [3, 2]], "advice": [[4, 5], []], "scores": None}
    recorded = {"version": 5, "architecture": "ab" * 32, "left_out": [[], []], "storage_latency_ns": 0}
    unscored = {"prompt_scores": None, **times, **rest}
    return [
        _lines(header, {**prompt, **times, **rest}, {**token, **times, **rest}),
        _lines({**header, **recorded}, {**prompt, **unscored}, {**token, **unscored}),
    ]
