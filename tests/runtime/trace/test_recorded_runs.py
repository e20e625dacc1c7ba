"""Traces of runs: written while they run, without scores and rates, with the experts that the bundle leaves out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import InputError
from moec.manifests.files.limits import JsonLimits
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.trace.statistics import PhaseTimes
from moec.runtime.trace.trace import LayerScores, TraceHeader, TraceRecorder
from moec.runtime.trace.trace_file import growing_trace, opened_trace, read_trace
from tests.runtime.trace.test_trace_file import BARE, HEADER, PROMPT, TOKEN, VERSION_4, written

VERSION_5 = {**VERSION_4, "version": 5, "architecture": "ab" * 32, "left_out": [[3], []], "storage_latency_ns": 0}


def test_a_trace_of_a_bundle_without_some_experts_by_hand(tmp_path: Path) -> None:
    passes = [{**PROMPT, **BARE}, {**TOKEN, **BARE}]
    found = read_trace(written(tmp_path / "t", VERSION_5, *passes)).header
    assert found.left_out == ((3,), ()) and found.architecture == "ab" * 32 and found.has_rates
    earlier = read_trace(written(tmp_path / "t", VERSION_4, *passes)).header
    assert earlier.left_out == () and earlier.architecture == ""
    unknown = {**VERSION_5, "left_out": [], "architecture": "", "memory_bytes_per_s": 0}
    assert not read_trace(written(tmp_path / "t", unknown, *passes)).header.has_rates


def held(**changes: Any) -> Callable[[], list[Any]]:
    return lambda: [{**VERSION_5, **changes}, {**PROMPT, **BARE}, {**TOKEN, **BARE}]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (held(left_out=[[2], []]), "line 2 is not of a routing trace: `chosen[0]`: a token chooses an expert that the"),
        (held(left_out=[[3]]), "`left_out`: expected a list of 2"),
        (held(left_out=[[4], []]), "`left_out[0]`: expected whole numbers of 0 to 3, found 4"),
        (held(left_out=[[3, 3], []]), "`left_out[0]`: expected at most 2 different experts"),
        (held(left_out=[[], [0, 1, 2, 3]]), "`left_out[1]`: expected at most 3 different experts"),
        (held(architecture="ab"), "`architecture`: expected a SHA-256, found 'ab'"),
        (held(architecture=None), "`architecture`: expected a SHA-256, found None"),
        (held(threads=0), "`threads`: expected a whole number of 1 or more"),
        (lambda: [{**VERSION_5, "version": 4}], "unknown ['architecture', 'left_out'], missing []"),
    ],
)
def test_what_contradicts_itself_is_refused(lines: Callable[[], list[Any]], message: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bad.trace", *lines())
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert message in caught.value.message and caught.value.message.startswith(f"`{path}`")


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
    path = written(tmp_path / "a.trace", HEADER, PROMPT, TOKEN)
    few = JsonLimits(1 << 10, containers=20, values=60, texts=60)
    with opened_trace(path, few) as (_, passes):
        assert len(list(passes)) == 2
    narrow = JsonLimits(1 << 10, containers=20, values=20, texts=60)
    with opened_trace(path, narrow) as (_, passes), pytest.raises(InputError, match=r"line 2 .* more than 20 values"):
        list(passes)
