"""Traces go to a file and back, also while a run goes on; what is damaged is refused with one sentence."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import InputError
from moec.manifests.files.limits import JsonLimits
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.options.runtime import MAX_PREFETCH_LAYERS, PREFETCH_RULES, PREFETCHERS
from moec.runtime.trace.statistics import PhaseTimes
from moec.runtime.trace.trace import (
    LEAST_READ_BYTES,
    LayerScores,
    PassScores,
    PromptScores,
    Trace,
    TracedPass,
    TraceHeader,
    TraceRecorder,
)
from moec.runtime.trace.trace_file import growing_trace, opened_trace, read_trace, write_trace

NS = st.integers(0, 1 << 60)


def drawn_floats(draw: st.DrawFn, count: int) -> bytes:
    numbers = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=count, max_size=count)
    return np.array(draw(numbers), "<f4").tobytes()


def drawn_ahead(draw: st.DrawFn, experts: list[int]) -> tuple[tuple[bytes, ...], ...]:
    routed, ahead = [layer for layer, count in enumerate(experts) if count], []
    for layer in range(len(experts)):
        following = [each for each in routed if each > layer] or routed[:1]
        ahead.append(tuple(drawn_floats(draw, experts[each]) for each in following[: draw(st.integers(0, 2))]))
    return tuple(ahead)


@st.composite
def scores(draw: st.DrawFn, experts: list[int]) -> PassScores:
    total, ahead, confidence = sum(experts), drawn_ahead(draw, experts), draw(st.none() | st.floats(0, 1))
    little = b"" if confidence is None else drawn_floats(draw, total)
    return PassScores(drawn_floats(draw, total), ahead, little, confidence)


@st.composite
def prompt_scores(draw: st.DrawFn, experts: list[int]) -> PromptScores:
    return PromptScores(drawn_floats(draw, sum(experts)), drawn_ahead(draw, experts), drawn_ahead(draw, experts))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces of decoders, and of decoders with an encoder."""
    layers = draw(st.integers(1, 3))
    encoder = draw(st.integers(0, layers - 1))
    experts = draw(st.lists(st.integers(0, 5), min_size=layers, max_size=layers))
    top_k = [draw(st.integers(0, count)) for count in experts]
    prompts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=1 if encoder else 2))
    tokens = [*prompts, *[1] * draw(st.integers(1 if encoder else 0, 3))]
    total = sum(experts)
    passes = []
    for number, count in enumerate(tokens):
        first = encoder if number else 0
        ran = slice(first, encoder if encoder and not number else layers)
        chosen = []
        for width, few in zip(experts[ran], top_k[ran], strict=True):
            each = st.permutations(range(width)).map(lambda order, few=few: order[:few])
            chosen.append(tuple(e for _ in range(count) for e in draw(each)))
        advice = tuple(tuple(draw(st.lists(st.integers(0, total - 1), max_size=3))) if total else () for _ in chosen)
        per_layer = st.lists(NS, min_size=len(chosen), max_size=len(chosen)).map(tuple)
        times = (draw(per_layer), draw(per_layer), draw(per_layer), draw(NS), draw(NS), draw(NS))
        found = draw(scores(experts)) if count == 1 and not encoder and draw(st.booleans()) else None
        prompt = draw(prompt_scores(experts)) if count > 1 and not encoder and draw(st.booleans()) else None
        passes.append(TracedPass(count, tuple(chosen), advice, *times, first, found, prompt))
    prefetch = draw(st.sampled_from(PREFETCHERS))
    rates = (10**10, 10**9, 64_000)
    header = TraceHeader("0f" * 32, tuple(experts), tuple(top_k), sum(prompts), prefetch, 2, *rates, encoder)
    rule = draw(st.sampled_from(PREFETCH_RULES))
    layers_ahead = draw(st.integers(1, MAX_PREFETCH_LAYERS))
    header = replace(header, prefetch_layers=layers_ahead, prefetch_experts=draw(st.integers(0, 9)), prefetch_rule=rule)
    header = replace(header, little_experts=draw(st.integers(0, 3)))
    if draw(st.booleans()):
        used = [{e for each in passes for e in _of_layer(each, layer)} for layer in range(layers)]
        unused = [[e for e in range(n) if e not in own] for n, own in zip(experts, used, strict=True)]
        left_out = tuple(tuple(row[: n - k]) for row, n, k in zip(unused, experts, top_k, strict=True))
        header = replace(header, architecture="0e" * 32, left_out=left_out, memory_bytes_per_s=0)
    return Trace(header, tuple(passes))


def _of_layer(each: TracedPass, layer: int) -> tuple[int, ...]:
    at = layer - each.first_layer
    return each.chosen[at] if 0 <= at < len(each.chosen) else ()


@given(trace=traces())
def test_a_trace_comes_back_as_it_was(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write_trace(path, trace)
    assert read_trace(path) == trace
    assert [item.name for item in tmp_path.iterdir()] == ["a.trace"]


@given(trace=traces(), data=st.data())
def test_damage_is_refused_or_harmless(trace: Trace, data: st.DataObject, tmp_path: Path) -> None:
    """Any byte changed, or the file cut anywhere: a trace that holds its own rules, or one error."""
    path = tmp_path / "a.trace"
    write_trace(path, trace)
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] = data.draw(st.integers(0, 255))
    else:
        del content[at:]
    path.write_bytes(bytes(content))
    try:
        found = read_trace(path)
    except InputError as error:
        assert error.message.startswith(f"`{path}`") and "\n" not in error.message and error.hint
        return
    assert found.prompt_passes >= 1
    for each in found.passes:
        for layer, asked in each.accesses(found.header.first_expert):
            low, high = found.header.first_expert[layer], found.header.first_expert[layer + 1]
            assert all(low <= expert < high for expert in asked) and len(set(asked)) == len(asked)


HEADER: dict[str, Any] = {
    "format": "moec-trace", "version": 5, "bundle": "0" * 64, "experts": [4, 4], "top_k": [2, 1], "prompt_tokens": 2,
    "prefetch": "lookahead", "threads": 2, "memory_bytes_per_s": 1, "storage_bytes_per_s": 1, "storage_latency_ns": 0,
    "prefetch_layers": 2, "prefetch_experts": 0, "prefetch_rule": "spread", "little_experts": 3,
    "architecture": "ab" * 32, "left_out": [[3], []],
}  # fmt: skip
PROMPT: dict[str, Any] = {
    "tokens": 2, "chosen": [[0, 1, 1, 2], [3, 3]], "advice": [[4, 7], []], "dense_ns": [1, 1], "experts_ns": [1, 1],
    "shared_ns": [0, 0], "head_ns": 5, "elapsed_ns": 50, "stall_ns": 3,
    "scores": None, "prompt_scores": None,
}  # fmt: skip
TOKEN = {**PROMPT, "tokens": 1, "chosen": [[2, 0], [3]]}


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_by_hand(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", HEADER, PROMPT, TOKEN))
    assert trace.prompt_passes == 1 and trace.header.first_expert == [0, 4, 8]
    assert trace.accesses() == [(0, (0, 1, 2)), (1, (7,)), (0, (2, 0)), (1, (7,))]
    assert trace.passes[0].other_ns == 50 - 3 - 2 - 2 - 5


# One layer of an encoder, one of a decoder.
ENCODER_HEADER = {**HEADER, "first_decoder_layer": 1, "left_out": []}
_TIMES = {"dense_ns": [1], "experts_ns": [1], "shared_ns": [0]}
ENCODED = {**PROMPT, **_TIMES, "chosen": [[0, 1, 1, 2]], "advice": [[4]], "first_layer": 0}
DECODED = {**PROMPT, **_TIMES, "tokens": 1, "chosen": [[3]], "advice": [[]], "first_layer": 1}


def test_a_trace_with_an_encoder_by_hand(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", ENCODER_HEADER, ENCODED, DECODED, DECODED))
    assert trace.prompt_passes == 2 and [each.first_layer for each in trace.passes] == [0, 1, 1]
    assert trace.accesses() == [(0, (0, 1, 2)), (1, (7,)), (1, (7,))]


def numbers(*values: float) -> str:
    return b64encode(np.array(values, "<f4").tobytes()).decode()


EIGHT = numbers(*range(8))
SCORES: dict[str, Any] = {
    "logits": EIGHT, "ahead": [[numbers(1, 2, 3, 4)], []], "little_logits": EIGHT, "confidence": 0.25,
}  # fmt: skip


def test_scores_by_hand(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", HEADER, PROMPT, {**TOKEN, "scores": SCORES}))
    found = trace.passes[1].scores
    assert found is not None and trace.passes[0].scores is None and found.confidence == 0.25
    assert np.frombuffer(found.logits, "<f4").tolist() == list(range(8))
    assert np.frombuffer(found.ahead[0][0], "<f4").tolist() == [1, 2, 3, 4] and found.ahead[1] == ()
    assert trace.header.prefetch_layers == 2 and trace.header.little_experts == 3


FOUR = numbers(0, 0.5, 0.25, 2)
PROMPT_SCORES: dict[str, Any] = {"unimportance": EIGHT, "ahead": [[FOUR], []], "ahead_unimportance": [[FOUR], []]}


def test_scores_of_a_prompt_by_hand(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "t", HEADER, {**PROMPT, "prompt_scores": PROMPT_SCORES}, TOKEN))
    found = trace.passes[0].prompt_scores
    assert found is not None and trace.passes[1].prompt_scores is None
    assert np.frombuffer(found.unimportance, "<f4").tolist() == list(range(8))
    assert np.frombuffer(found.ahead_unimportance[0][0], "<f4").tolist() == [0, 0.5, 0.25, 2]


def prompted(**changes: Any) -> Callable[[], list[Any]]:
    scores = {**PROMPT_SCORES, **changes}
    return lambda: [HEADER, {**PROMPT, "prompt_scores": scores}, TOKEN]


def scored(**changes: Any) -> Callable[[], list[Any]]:
    return lambda: [HEADER, PROMPT, {**TOKEN, "scores": {**SCORES, **changes}}]


def header(**changes: Any) -> Callable[[], list[Any]]:
    return lambda: [{**HEADER, **changes}, PROMPT, TOKEN]


def token(**changes: Any) -> Callable[[], list[Any]]:
    return lambda: [HEADER, PROMPT, {**TOKEN, **changes}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (header(format="trace"), "line 1 is not of a routing trace: expected the format `moec-trace`, found 'trace'"),
        (header(version=6), "expected version 5, found 6"),
        (header(version=4), "expected version 5, found 4"),
        (header(version=True), "expected version 5, found True"),
        (header(extra=1), "unknown ['extra'], missing []"),
        (header(bundle="x"), "`bundle`: expected a SHA-256"),
        (header(prefetch="magic"), "`prefetch`: expected one of lookahead"),
        (header(experts=[]), "`experts`: expected 1 to 4096 layers, found 0"),
        (header(experts=[4, -1]), "`experts`: expected whole numbers of 0 to 65536, found -1"),
        (header(top_k=[2]), "`top_k`: expected a list of 2"),
        (header(top_k=[5, 1]), "`top_k`: expected at most a layer's experts"),
        (header(threads=0), "`threads`: expected a whole number of 1 or more, found 0"),
        (header(storage_latency_ns=1.5), "`storage_latency_ns`: expected a whole number"),
        (header(prompt_tokens=1), "no pass ends with the prompt, after 1 tokens"),
        (token(tokens=0), "line 3 is not of a routing trace: `tokens`: expected a whole number of 1 or more"),
        (token(tokens=1 << 21), "`tokens`: expected at most 1048576"),
        (token(chosen=[[2, 0]]), "`chosen`: expected a list of 2"),
        (token(chosen=[[2, 4], [3]]), "`chosen[0]`: expected whole numbers of 0 to 3, found 4"),
        (token(chosen=[[2, None], [3]]), "`chosen[0]`: expected whole numbers of 0 to 3, found None"),
        (token(chosen=[[2, 2], [3]]), "`chosen[0]`: token 0 chooses an expert twice"),
        (token(chosen=[[2], [3]]), "`chosen[0]`: expected 1 x 2 experts, found 1"),
        (token(advice=[[8], []]), "`advice[0]`: expected whole numbers of 0 to 7, found 8"),
        (token(advice=[1, []]), "`advice[0]`: expected a list of experts"),
        (token(dense_ns=[1, True]), "`dense_ns`: expected whole numbers"),
        (token(head_ns=1 << 61), "`head_ns`: expected a whole number"),
        (scored(logits="AA"), "`logits`: expected base64"),
        (scored(logits=7), "`logits`: expected base64"),
        (scored(logits=numbers(1, 2)), "`logits`: expected 8 numbers, found 8 bytes"),
        (scored(logits=numbers(*[np.nan] * 8)), "`logits`: expected finite numbers"),
        (scored(ahead=[[]]), "`ahead`: expected a list of 2"),
        (scored(ahead=[[EIGHT], []]), "`ahead[0]`: expected 4 numbers, found 32 bytes"),
        (scored(ahead=[[], [numbers(1, 2, 3, 4)] * 2]), "`ahead[1]`: expected a list of at most 1"),
        (scored(confidence=1.5), "`confidence`: expected null or a number of 0 to 1, found 1.5"),
        (scored(confidence=True), "`confidence`: expected null or a number"),
        (scored(confidence=None), "`little_logits`: expected 0 numbers, found 32 bytes"),
        (scored(more=1), "`scores`: expected null or an object of ahead, confidence, little_logits, logits"),
        (lambda: [HEADER, {**PROMPT, "scores": SCORES}], "`scores`: expected null in a pass of 2 tokens"),
        (lambda: [{**HEADER, "prefetch_layers": 9}], "expected at most 4 layers"),
        (
            lambda: [{**HEADER, "prefetch_rule": "all"}],
            "`prefetch_rule`: expected one of likely, spread",
        ),
        (lambda: [{**HEADER, "little_experts": -1}], "`little_experts`: expected a whole number"),
        (prompted(unimportance=FOUR), "`unimportance`: expected 8 numbers, found 16 bytes"),
        (prompted(ahead=[]), "`ahead`: expected a list of 2"),
        (prompted(ahead_unimportance=[[EIGHT], []]), "`ahead_unimportance[0]`: expected 4 numbers, found 32 bytes"),
        (prompted(more=1), "`prompt_scores`: expected null or an object of ahead, ahead_unimportance, unimportance"),
        (
            lambda: [{**HEADER, "prompt_tokens": 1}, {**TOKEN, "prompt_scores": PROMPT_SCORES}],
            "`prompt_scores`: expected null in a pass of one token",
        ),
        (lambda: [HEADER, PROMPT, {**PROMPT}], "expected passes of one token after the prompt"),
        (lambda: [HEADER], "no pass ends with the prompt"),
        (header(first_decoder_layer=0), "`first_decoder_layer`: expected a whole number of 1 or more"),
        (header(first_decoder_layer=2), "`first_decoder_layer`: expected less than the 2 layers, found 2"),
        (header(first_decoder_layer=1), "line 2 is not of a routing trace: expected other fields, unknown []"),
        (lambda: [HEADER, ENCODED], "expected other fields, unknown ['first_layer'], missing []"),
        (lambda: [ENCODER_HEADER, {**ENCODED, "first_layer": 2}], "`first_layer`: expected 0 or 1, found 2"),
        (lambda: [ENCODER_HEADER, {**ENCODED, "chosen": [[0, 1, 1, 2], [3, 3]]}], "`chosen`: expected a list of 1"),
        (lambda: [ENCODER_HEADER, ENCODED], "expected one pass of the encoder, over 2 tokens, then passes of the"),
        (lambda: [ENCODER_HEADER, DECODED, ENCODED], "expected one pass of the encoder, over 2 tokens, then"),
        (lambda: [ENCODER_HEADER, ENCODED, DECODED, ENCODED], "expected one pass of the encoder, over 2 tokens"),
        (lambda: [{**ENCODER_HEADER, "prompt_tokens": 3}, ENCODED, DECODED], "the encoder, over 3 tokens, then"),
        (
            lambda: [ENCODER_HEADER, ENCODED, {**DECODED, "tokens": 2, "chosen": [[3, 1]]}],
            "expected a first pass of the decoder over 1 token, found 2",
        ),
        (lambda: [HEADER, [1]], "line 2 is not of a routing trace: expected a JSON object"),
        (
            header(left_out=[[2], []]),
            "line 2 is not of a routing trace: `chosen[0]`: a token chooses an expert that the",
        ),
        (header(left_out=[[3]]), "`left_out`: expected a list of 2"),
        (header(left_out=[[4], []]), "`left_out[0]`: expected whole numbers of 0 to 3, found 4"),
        (header(left_out=[[3, 3], []]), "`left_out[0]`: expected at most 2 different experts"),
        (header(left_out=[[], [0, 1, 2, 3]]), "`left_out[1]`: expected at most 3 different experts"),
        (header(architecture="ab"), "`architecture`: expected a SHA-256, found 'ab'"),
        (header(architecture=None), "`architecture`: expected a SHA-256, found None"),
        (header(threads=0), "`threads`: expected a whole number of 1 or more"),
    ],
)
def test_what_breaks_the_rules_is_refused(lines: Callable[[], list[Any]], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.trace", *lines())
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert message in caught.value.message and caught.value.message.startswith(f"`{path}`")
    assert caught.value.hint == "record it with `moec bench BUNDLE --trace-out FILE`"


def test_what_is_no_file_of_text_is_refused(tmp_path: Path) -> None:
    for content, message in ((b"", "expected JSON"), (b"\xff\xfe", "expected UTF-8"), (b"{", "expected JSON")):
        path = tmp_path / "bad"
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_trace(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(path / "t", Trace(TraceHeader("", (), (), 1, "off", 1, 1, 1, 1), ()))
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(InputError, match="bad"):
        read_trace(path)


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(InputError, match="expected at most 1073741824 bytes"):
        read_trace(path)


def test_times_go_to_the_layer_that_took_them() -> None:
    """Two layers; a mark is taken when a layer has chosen, before its experts run."""
    times, cache = PhaseTimes(), CacheStats()
    recorder = TraceRecorder(times, lambda: cache)
    times.dense_ns += 10
    recorder.add_layer(0, np.array([[3, 1]], np.int32), [5])
    times.experts_ns += 20
    times.dense_ns += 7  # of it 4 the shared expert of layer 0
    times.shared_ns += 4
    cache.stall_ns += 9
    recorder.add_layer(1, np.empty((1, 0), np.int32), [])
    times.dense_ns += 6
    recorder.end()
    (found,) = recorder.passes
    assert found.chosen == ((3, 1), ()) and found.advice == ((5,), ()) and found.tokens == 1
    assert (found.dense_ns, found.experts_ns, found.shared_ns, found.head_ns) == ((10, 3), (20, 0), (4, 0), 6)
    assert found.stall_ns == 9 and found.elapsed_ns > 0
    recorder.add_layer(0, np.array([[0, 1]], np.int32), [])
    recorder.add_layer(0, np.array([[2, 1]], np.int32), [])  # a long prompt: the next pass begins
    recorder.begin()
    assert [each.chosen for each in recorder.passes[1:]] == [((0, 1),)], "what was begun anew is dropped"


def test_passes_of_an_encoder_and_of_the_decoder_behind_it_are_kept_apart(tmp_path: Path) -> None:
    """One layer of an encoder, two of a decoder, four experts each."""
    recorder = TraceRecorder(PhaseTimes(), CacheStats, first_decoder_layer=1)
    recorder.add_layer(0, np.array([[3], [1]], np.int32), [])
    for _ in range(2):
        for layer in (1, 2):
            recorder.add_layer(layer, np.array([[layer]], np.int32), [])
    recorder.end()
    assert [(each.first_layer, each.tokens) for each in recorder.passes] == [(0, 2), (1, 1), (1, 1)]
    accesses = [access for each in recorder.passes for access in each.accesses([0, 4, 8, 12])]
    assert accesses == [(0, (1, 3)), (1, (5,)), (2, (10,)), (1, (5,)), (2, (10,))]
    header = TraceHeader("0f" * 32, (4, 4, 4), (1, 1, 1), 2, "off", 2, 10**10, 10**9, 64_000, first_decoder_layer=1)
    trace = Trace(header, tuple(recorder.passes))
    assert trace.prompt_passes == 2 and trace.accesses() == accesses
    write_trace(tmp_path / "a.trace", trace)
    assert read_trace(tmp_path / "a.trace") == trace
    (tmp_path / "a.trace").unlink()
    with pytest.raises(ValueError, match="passes begin after one"):
        write_trace(tmp_path / "a.trace", replace(trace, header=replace(header, first_decoder_layer=0)))
    assert not list(tmp_path.iterdir())


def test_the_rate_of_storage_is_that_of_the_run_where_it_read_enough() -> None:
    cache = CacheStats(bytes_read=1 << 40, busy_ns=1)
    recorder = TraceRecorder(PhaseTimes(), lambda: cache)
    assert recorder.read_bytes_per_s is None
    cache.bytes_read += LEAST_READ_BYTES
    assert recorder.read_bytes_per_s is None, "no time has passed"
    cache.busy_ns += 10**9 // 2
    assert recorder.read_bytes_per_s == 2 * LEAST_READ_BYTES
    cache.bytes_read -= 1
    assert recorder.read_bytes_per_s is None


def test_a_trace_of_a_bundle_without_some_experts_by_hand(tmp_path: Path) -> None:
    found = read_trace(written(tmp_path / "t", HEADER, PROMPT, TOKEN)).header
    assert found.left_out == ((3,), ()) and found.architecture == "ab" * 32 and found.has_rates
    unknown = {**HEADER, "left_out": [], "architecture": "", "memory_bytes_per_s": 0}
    assert not read_trace(written(tmp_path / "t", unknown, PROMPT, TOKEN)).header.has_rates


def test_a_trace_grows_pass_by_pass_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    header = TraceHeader("0f" * 32, (4,), (1,), 2, "off", 2, 0, 0, 0, architecture="0e" * 32, left_out=((),))
    path = tmp_path / "a.trace"
    with growing_trace(path, header) as take:
        recorder = TraceRecorder(PhaseTimes(), CacheStats, keeps_scores=False, take=take)
        for chosen in ([[3], [1]], [[2]]):
            recorder.add_layer(0, np.array(chosen, np.int32), [], LayerScores(np.zeros((len(chosen), 4), np.float32)))
        assert recorder.passes == [] and not path.exists()
        recorder.end()
    found = read_trace(path)
    assert found.header == header and [each.chosen for each in found.passes] == [((3, 1),), ((2,),)]
    assert found.passes[1].scores is None
    with pytest.raises(KeyError), growing_trace(tmp_path / "b.trace", header):
        raise KeyError
    assert [each.name for each in tmp_path.iterdir()] == ["a.trace"]


def test_lines_within_limits_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "a.trace", HEADER, {**PROMPT, "advice": [[4, 7], [5, 6, 7] * 5]}, TOKEN)
    few = JsonLimits(1 << 10, containers=20, values=60, texts=60)
    with opened_trace(path, few) as (_, passes):
        assert len(list(passes)) == 2
    narrow = JsonLimits(1 << 10, containers=20, values=30, texts=60)
    with opened_trace(path, narrow) as (_, passes), pytest.raises(InputError, match=r"line 2 .* more than 30 values"):
        list(passes)
