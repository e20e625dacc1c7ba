"""Observe the effect of options on a run: by the operating system, and by a replay of its trace."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from moec.cli.simulation.traces import replayed_bundle
from moec.manifests.bundle import LOOKAHEAD_NAME
from moec.profiles.probe import available_threads
from moec.runtime import Engine, RuntimeOptions, kernels
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.expert_cache import open_cache as choice_of_cache
from moec.runtime.expert_cache.cache_stats import CacheStats
from moec.runtime.expert_cache.interface import StreamingCache
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.expert_cache.policies import policy_score
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.prefetch.predictors import LookaheadPredictor, PathPredictor, PopularityPredictor
from moec.runtime.simulation.replay import replay
from moec.runtime.trace.trace import TraceRecorder

_MODE = re.compile(
    r"mode: (?P<kind>streaming|resident), (?P<loss>.*); expert cache (?P<cache>.*), policy (?P<policy>.*), "
    r"prefetch (?P<prefetch>.*), io (?P<io>\w+), readers (?P<readers>\d+), kernels (?P<kernels>\w+), "
    r"threads (?P<threads>\d+), cache (?P<cache_kind>native|python).*, layers in (?P<layers>one call|steps).*"
)
_TASKS = Path("/proc/self/task")
PATIENCE_S = 120
_PREDICTORS = {"lookahead": LookaheadPredictor, "path": PathPredictor, "popularity": PopularityPredictor}


def mode_parts(engine: Engine) -> dict[str, str]:
    """The parts of the `mode:` line by name."""
    found = _MODE.fullmatch(engine.mode)
    assert found is not None, engine.mode
    return found.groupdict()


def check_took_effect(engine: Engine, options: RuntimeOptions) -> None:
    """Check that options are in use and in the `mode:` line. io `auto` may be either kind of read.

    Call `forget_mappings` before the engine is loaded.
    """
    parts, any_file = mode_parts(engine), engine.bundle.manifest.experts[0].file
    has_learned = options.uses_learned_routers and engine.bundle.has_file(LOOKAHEAD_NAME)
    learned = " by learned routers" if has_learned else ""
    asked = {
        "policy": " ".join(filter(None, (options.policy, options.policy_weights))),
        "prefetch": options.prefetch_text + learned if parts["kind"] == "streaming" else "off (all fit)",
        "readers": str(options.readers),
        "threads": str(options.threads or available_threads()),
        "io": how_read(engine.bundle.path / any_file),
    }
    assert {name: parts[name] for name in asked} == asked, engine.mode
    assert parts["io"] in (("direct", "buffered") if options.io == "auto" else (options.io,)), engine.mode
    predictor = engine.model.advisor.predictor
    assert type(predictor) is (type(None) if asked["prefetch"].startswith("off") else _PREDICTORS[options.prefetch])
    assert engine.model.advisor.rule == options.prefetch_rule
    assert type(engine.cache) is cache_kind(engine, options)
    assert parts["cache_kind"] == ("native" if isinstance(engine.cache, NativeCache) else "python"), engine.mode
    assert parts["layers"] == ("steps" if engine.model.pass_experts is None else "one call"), engine.mode
    assert reader_threads(engine) == len(options.reader_threads.takes)


def cache_kind(engine: Engine, options: RuntimeOptions) -> type[StreamingCache]:
    """Return the class of the cache: PythonCache for encoders and without the extension, else NativeCache."""
    if isinstance(choice_of_cache.why_not_native, mock.Mock):  # tests/runtime/cache_kinds.py
        return PythonCache
    is_native = engine.model.spec.encoder is None and kernels.compiled() is not None
    return NativeCache if is_native else PythonCache


def is_mapped(path: Path) -> bool:
    """Return whether this process has mapped the file."""
    return any(line.endswith(str(path.resolve())) for line in Path("/proc/self/maps").read_text().splitlines())


def forget_mappings(bundle: Path) -> None:
    """Let go of the files that an engine before has mapped: they stay until its arrays are collected."""
    file = bundle / open_bundle(bundle).manifest.experts[0].file
    if is_mapped(file):
        gc.collect()
        assert not is_mapped(file)


def how_read(path: Path) -> str:
    """Return how a file is open, by the operating system: mmap, direct, buffered or closed.

    A bundle keeps its files open for what is not read directly, next to what reads experts.
    """
    if is_mapped(path):
        return "mmap"
    direct = []
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") == str(path.resolve()):
                direct.append(bool(fcntl.fcntl(int(number), fcntl.F_GETFL) & os.O_DIRECT))
        except OSError:  # that of the listing itself, closed by now
            continue
    if not direct:
        return "closed"
    return "direct" if any(direct) else "buffered"


def threads() -> set[int]:
    """Ids of all threads of this process."""
    return {int(each.name) for each in _TASKS.iterdir()}


class Workers:
    """Threads of the kernels: those that are there now, were not before, and are none of Python's.

    before: ids of the threads that there were before the engine was loaded.
    """

    def __init__(self, before: set[int]) -> None:
        python = {thread.native_id for thread in threading.enumerate()}
        self._ids = sorted(worker for worker in threads() - before if worker not in python)
        wait_until(lambda: all(state == "S" for state, _ in self._status()), "workers sleep")
        self._slept = [count for _, count in self._status()]

    def __len__(self) -> int:
        return len(self._ids)

    def check_woken(self) -> None:
        """Every one has been woken since, for work that it was to share, however late it came to it."""
        wait_until(
            lambda: all(now > then for (_, now), then in zip(self._status(), self._slept, strict=True)),
            "each worker wakes and sleeps again",
        )

    def _status(self) -> list[tuple[str, int]]:
        """State, and how often it has gone to sleep by itself, of each."""
        found = []
        for worker in self._ids:
            text = (_TASKS / str(worker) / "status").read_text()
            state = re.findall(r"^State:\s*(\w)", text, re.MULTILINE)
            slept = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)
            found.append((state[0], int(slept[0])))
        return found


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Return as soon as it holds; fail if it does not within PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.001)


def reader_threads(engine: Engine) -> int:
    """Threads of an engine that read experts now."""
    return engine.cache.running_readers


def begin_trace(engine: Engine) -> TraceRecorder:
    """Note which experts every pass asks for, from here on."""
    tracer = TraceRecorder(engine.model.times, lambda: engine.cache.stats, engine.model.spec.first_decoder_layer)
    engine.model.trace = tracer
    return tracer


def replayed(engine: Engine, tracer: TraceRecorder, policy: str, weights: str | None = None) -> CacheStats:
    """Return the counts of a warm cache of the engine's size for its requests, with a policy, without prefetch."""
    known, first = replayed_bundle(engine.bundle), engine.model.first_expert
    accesses = [access for each in tracer.passes for access in each.accesses(first)]
    score = policy_score(policy, weights)
    return replay(accesses, known.cache_spec(engine.cache.capacity_bytes), score, known.warm)


def counts(stats: CacheStats) -> dict[str, int]:
    """Return the counts that a policy decides, for a run without prefetch."""
    return {name: value for name, value in stats.replayable_counts().items() if name != "late_hits"}
