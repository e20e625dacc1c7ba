"""Traces of many devices become counts and routes: each by its tokens, in any order, in bounded memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import InputError
from moec.manifests.expert_use import ExpertUse, encode_use
from moec.runtime.trace.merging import merge_traces
from moec.runtime.trace.trace import Trace, TracedPass, TraceHeader
from moec.runtime.trace.trace_file import write_trace

EXPERTS, TOP_K = (4, 0, 5), (2, 0, 2)
NOTHING = ((), (), ())


def drawn_pass(draw: random.Random, tokens: int, left_out: tuple[tuple[int, ...], ...], first: int = 0) -> TracedPass:
    """Return a pass over the layers from `first` on, whose tokens choose at random."""
    chosen = [
        tuple(e for _ in range(tokens) for e in draw.sample(sorted(set(range(count)) - set(out)), k))
        for count, k, out in zip(EXPERTS[first:], TOP_K[first:], left_out[first:], strict=True)
    ]
    nothing = (0,) * len(chosen)
    return TracedPass(tokens, tuple(chosen), ((),) * len(chosen), nothing, nothing, nothing, 0, 0, 0, first)


def save(
    path: Path,
    seed: int,
    prompt: int = 3,
    tokens: int = 2,
    left_out: tuple[tuple[int, ...], ...] = NOTHING,
    **header: Any,
) -> Trace:
    """Write the trace of a prompt and some tokens after it."""
    draw = random.Random(seed)
    passes = [drawn_pass(draw, prompt, left_out), *(drawn_pass(draw, 1, left_out) for _ in range(tokens))]
    plain = {"architecture": "ab" * 32, "left_out": left_out, **header}
    trace = Trace(TraceHeader("0f" * 32, EXPERTS, TOP_K, prompt, "off", 2, 0, 0, 0, **plain), tuple(passes))
    write_trace(path, trace)
    return trace


def merged(*paths: Path) -> ExpertUse:
    return merge_traces(paths, lambda done, total: None)


def routes_of(trace: Trace) -> list[bytes]:
    """Return the route of each token through the layers that route."""
    found = list[bytes]()
    for each in trace.passes:
        own = [np.array(each.chosen[layer], "<u2").reshape(each.tokens, 2) for layer in (0, 2)]
        found += [row.tobytes() for row in np.stack(own, axis=1)]
    return found


def test_counts_are_the_sums_over_all_tokens(tmp_path: Path) -> None:
    traces = [save(tmp_path / str(n), n, prompt=n + 1, tokens=2 * n) for n in range(7)]
    use = merged(*(tmp_path / str(n) for n in range(7)))
    tokens = sum(each.tokens for trace in traces for each in trace.passes)
    assert use.traces == 7 and use.tokens == (tokens,) * 3 and use.decoded_tokens == tokens
    for layer, count in enumerate(EXPERTS):
        chosen = [e for trace in traces for each in trace.passes for e in each.chosen[layer]]
        assert use.chosen[layer] == tuple(chosen.count(e) for e in range(count))
        assert use.offered[layer] == (tokens,) * count
    assert use.never_offered() == []


def test_routes_are_those_of_all_tokens_without_their_order(tmp_path: Path) -> None:
    traces = [save(tmp_path / str(n), n) for n in range(10)]
    (stack,) = merged(*(tmp_path / str(n) for n in range(10))).routes
    parts = [[part[at : at + 8] for at in range(0, len(part), 8)] for part in (stack.counted, stack.held_out)]
    assert all(part == sorted(part) for part in parts)
    assert sorted([*parts[0], *parts[1]]) == sorted(route for trace in traces for route in routes_of(trace))
    assert len(parts[1]) == 2 * 5, "the texts of two traces of ten are held out"
    held_out = [sorted(routes_of(trace)) for trace in traces if set(routes_of(trace)) <= set(parts[1])]
    assert parts[1] == sorted(route for routes in held_out for route in routes)


def test_the_order_of_the_traces_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.trace.merging.MAX_ROUTES", 11)
    paths = [tmp_path / str(n) for n in range(9)]
    for n, path in enumerate(paths):
        save(path, n, prompt=n + 1)
    whole = merged(*paths)
    assert len(whole.routes[0].counted + whole.routes[0].held_out) == 11 * 8
    assert encode_use(merged(*reversed(paths))) == encode_use(whole) == encode_use(merged(*paths[4:], *paths[:4]))


def test_the_sample_is_even_over_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of 90 % of the tokens has about 90 % of the routes."""
    monkeypatch.setattr("moec.runtime.trace.merging.MAX_ROUTES", 400)
    monkeypatch.setattr("moec.runtime.trace.merging.HELD_OUT_SHARE", 0.5)
    save(tmp_path / "long", 1, prompt=900, tokens=0)
    save(tmp_path / "short", 2, prompt=100, tokens=0)
    (stack,) = merged(tmp_path / "long", tmp_path / "short").routes
    sizes = sorted((len(stack.counted) // 8, len(stack.held_out) // 8))
    assert sum(sizes) == 400 and 20 <= sizes[0] <= 60


def test_what_a_bundle_leaves_out_was_not_offered(tmp_path: Path) -> None:
    save(tmp_path / "whole", 1, prompt=10, tokens=0)
    save(tmp_path / "less", 2, prompt=4, tokens=0, left_out=((3,), (), ()))
    use = merged(tmp_path / "whole", tmp_path / "less")
    assert use.offered[0] == (14, 14, 14, 10) and use.offered[2] == (14,) * 5 and use.never_offered() == []
    assert len(use.routes[0].counted) == 10 * 8, "routes are those of the bundle with all experts"
    alone = merged(tmp_path / "less")
    assert alone.never_offered() == [(0, 3)] and alone.routes == ()


def test_a_model_with_an_encoder_has_two_stacks(tmp_path: Path) -> None:
    draw = random.Random(3)
    whole, decoded = drawn_pass(draw, 6, NOTHING), [drawn_pass(draw, 1, NOTHING, first=2) for _ in range(4)]
    encoded = TracedPass(6, whole.chosen[:2], ((), ()), (0, 0), (0, 0), (0, 0), 0, 0, 0)
    header = TraceHeader("0f" * 32, EXPERTS, TOP_K, 6, "off", 2, 0, 0, 0, 2, architecture="ab" * 32, left_out=NOTHING)
    write_trace(tmp_path / "a", Trace(header, (encoded, *decoded)))
    use = merged(tmp_path / "a")
    assert use.tokens == (6, 6, 4) and [each.first_layer for each in use.routes] == [0, 2]
    assert [len(each.counted) for each in use.routes] == [6 * 4, 4 * 4]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"architecture": "cd" * 32}, "is of another model than `.*/first`: 3 layers of 5 experts, top-2, 4 experts"),
        ({"architecture": ""}, "does not tell the model and the experts that its bundle leaves out"),
        ({"left_out": ()}, "does not tell the model and the experts that its bundle leaves out"),
    ],
)
def test_a_trace_of_another_model_is_refused(header: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "first", 1)
    trace = save(tmp_path / "other", 2)
    changed = {**{name: getattr(trace.header, name) for name in TraceHeader.__dataclass_fields__}, **header}
    write_trace(tmp_path / "other", Trace(TraceHeader(**changed), trace.passes))
    with pytest.raises(InputError, match=message) as caught:
        merged(tmp_path / "first", tmp_path / "other")
    assert "\n" not in caught.value.message and caught.value.hint


def test_the_same_architecture_with_other_layers_is_refused(tmp_path: Path) -> None:
    """A digest is only text in a trace: the layers must agree, too."""
    save(tmp_path / "first", 1)
    nothing = (0,)
    each = TracedPass(1, ((0,),), ((),), nothing, nothing, nothing, 0, 0, 0)
    header = TraceHeader("0f" * 32, (4,), (1,), 1, "off", 2, 0, 0, 0, architecture="ab" * 32, left_out=((),))
    write_trace(tmp_path / "other", Trace(header, (each,)))
    with pytest.raises(InputError, match="another model"):
        merged(tmp_path / "first", tmp_path / "other")


def test_a_trace_counts_once(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes())
    with pytest.raises(InputError, match=r"`.*/b` has the same content as `.*/a`"):
        merged(tmp_path / "a", tmp_path / "b")


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    damaged = (tmp_path / "a").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut").write_bytes(b"".join(damaged[:1]))
    (tmp_path / "folder").mkdir()
    for name, message in (("cut", "no pass ends with the prompt"), ("folder", "is a folder"), ("none", "is missing")):
        with pytest.raises(InputError, match=message):
            merged(tmp_path / "a", tmp_path / name)
    with pytest.raises(InputError, match="no trace"):
        merged()


def test_a_header_of_too_many_experts_takes_no_memory(tmp_path: Path) -> None:
    layers = 4096
    plain = {
        "format": "moec-trace", "version": 5, "bundle": "0" * 64, "experts": [65535] * layers, "top_k": [1] * layers,
        "prompt_tokens": 1, "prefetch": "off", "prefetch_layers": 1, "prefetch_experts": 0, "prefetch_rule": "likely",
        "little_experts": 0, "threads": 1, "memory_bytes_per_s": 0, "storage_bytes_per_s": 0, "storage_latency_ns": 0,
        "architecture": "ab" * 32, "left_out": [[]] * layers,
    }  # fmt: skip
    (tmp_path / "a").write_text(json.dumps(plain) + "\n")
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="268431360 routed experts"):
            merged(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moec.runtime.trace.merging.MAX_ROUTES", 256)
    for n in range(24):
        save(tmp_path / str(n), n, prompt=800, tokens=0)
    peaks = []
    for count in (2, 24):
        tracemalloc.start()
        merged(*(tmp_path / str(n) for n in range(count)))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
