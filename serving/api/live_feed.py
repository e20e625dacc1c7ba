"""`GET /v1/moec/events`: what the engine does, ten times a second, for pages that show it. No listener: no work."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.types import Receive, Scope, Send

from moec.profiles.probe import resident_set_bytes
from moec.runtime.expert_cache.cache_spec import RESIDENT
from moec.runtime.expert_cache.cache_stats import CacheStats

from .answer import sent_event, until_gone
from .errors import RequestError
from .service import Service

ABSENT, IN_MEMORY, HIT, MISSED, READ_AHEAD, LEFT_OUT = range(6)
"""States of an expert in the feed."""
MAX_LISTENERS = 16
_PERIOD_S, _QUIET_S, _WINDOW_S = 0.1, 1.0, 1.0
_SEND_S = 30.0


def experts(service: Service) -> dict[str, Any]:
    """Return the answer of `GET /v1/moec/experts`: what does not change about each expert, in the feed's order."""
    manifest, records = service.engine.bundle.manifest, service.engine.records
    count = len(manifest.experts)
    bits = []
    for entry in manifest.experts:
        hidden, width = manifest.model.hidden_size, manifest.model.layers[entry.layer].experts.width
        units = [(entry.gate, hidden), (entry.up, hidden), (entry.down, width)]
        known = [unit.bits_per_weight(columns) for unit, columns in units if unit is not None]
        bits.append(round(sum(known) / len(known), 3))
    return {
        "layers": [layer.experts.count for layer in manifest.model.layers],
        "experts": count,
        "bits": bits,
        "bytes": [entry.size_bytes for entry in manifest.experts],
        "popularity": [round(float(share), 5) for share in records.frequency[:count]],
    }


@dataclass(slots=True)
class _Before:
    """Counts at the last snapshot."""

    time_s: float
    uses: np.ndarray
    ahead: np.ndarray
    states: np.ndarray
    cache: CacheStats
    running_ns: int
    tokens: int


class LiveFeed:
    """Snapshots of the engine. One task makes them for all listeners, and it runs only while there are some."""

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        manifest = self._engine.bundle.manifest
        self._count = len(manifest.experts)
        self._left_out = np.array([entry.is_pruned for entry in manifest.experts], bool)
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._message, self._number, self._changed = b"", 0, asyncio.Event()
        self._rates = deque[tuple[float, int]]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream snapshots until the client leaves or the server ends."""
        listening = asyncio.create_task(self._listen(send))
        leaving = asyncio.create_task(until_gone(receive))
        self._listeners += 1
        if self._listeners == 1:
            self._task = asyncio.create_task(self._make_snapshots())
        try:
            await asyncio.wait({listening, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listeners -= 1
            if self._listeners == 0 and self._task is not None:
                self._task.cancel()
            for task in (listening, leaving):
                task.cancel()
            await asyncio.gather(listening, leaving, return_exceptions=True)

    def require_place(self) -> None:
        """Refuse one listener too many. Raises RequestError."""
        if self._listeners >= MAX_LISTENERS:
            raise RequestError(429, f"{MAX_LISTENERS} pages listen already", None, "too_many_listeners")

    async def _listen(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        hello = sent_event({**self._service.facts(), "listeners": self._listeners}, "hello")
        await send({"type": "http.response.body", "body": hello, "more_body": True})
        number = 0
        while self._service.scheduler.is_alive:
            if number == self._number:
                changed = self._changed
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), _QUIET_S)
                continue
            number = self._number
            part = {"type": "http.response.body", "body": self._message, "more_body": True}
            await asyncio.wait_for(send(part), _SEND_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _make_snapshots(self) -> None:
        before = self._counts()
        last_shown_s, last_shown = 0.0, None
        while True:
            scheduler = self._service.scheduler
            shown = (scheduler.activity.passes, scheduler.running, scheduler.waiting)
            now_s = time.monotonic()
            if shown != last_shown or now_s - last_shown_s >= _QUIET_S:
                last_shown_s, last_shown = now_s, shown
                now = self._counts()
                self._message = sent_event(self._snapshot(before, now), "state")
                before, self._number = now, self._number + 1
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()
            await asyncio.sleep(_PERIOD_S)

    def _counts(self) -> _Before:
        engine, activity = self._engine, self._service.scheduler.activity
        return _Before(
            time.monotonic(),
            engine.records.uses.copy(),
            engine.cache.prefetches[0].copy(),
            engine.cache.states(),
            activity.cache,
            activity.running_ns,
            activity.answer_tokens,
        )

    def _snapshot(self, before: _Before, now: _Before) -> dict[str, Any]:
        scheduler, engine = self._service.scheduler, self._engine
        cache, running_ns = now.cache.since(before.cache), now.running_ns - before.running_ns
        tokens, ttft_ns = now.tokens - before.tokens, scheduler.activity.ttft_ns
        self._rates.append((now.time_s, now.tokens))
        while now.time_s - self._rates[0][0] > _WINDOW_S and len(self._rates) > 2:
            self._rates.popleft()
        (first_s, first), (last_s, last) = self._rates[0], self._rates[-1]
        return {
            "number": self._number + 1,
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "tokens": now.tokens,
            "tokens_per_s": round((last - first) / (last_s - first_s), 2) if last_s > first_s else 0.0,
            "ttft_ms": None if ttft_ns is None else round(ttft_ns / 1e6, 2),
            "hit_rate": round(cache.hit_rate, 4) if cache.lookups else None,
            "mib_per_token": round(cache.bytes_read / 2**20 / tokens, 4) if tokens else None,
            "waiting_share": round(min(cache.stall_ns / running_ns, 1.0), 4) if running_ns else None,
            "memory_bytes": resident_set_bytes(),
            "budget_bytes": engine.memory.budget_bytes,
            "cache_bytes": engine.cache.used_bytes,
            "cache_capacity_bytes": engine.cache.capacity_bytes,
            "states": base64.b64encode(self._states(before, now).tobytes()).decode(),
        }

    def _states(self, before: _Before, now: _Before) -> np.ndarray:
        """Return the state of each expert since the last snapshot, uint8 [N]. A low version counts for its expert."""
        count = self._count
        used, ahead, resident, was_resident = (
            self._by_expert(values)
            for values in (
                now.uses > before.uses,
                now.ahead > before.ahead,
                now.states == RESIDENT,
                before.states == RESIDENT,
            )
        )
        states = np.where(resident, IN_MEMORY, ABSENT).astype(np.uint8)
        states[ahead] = READ_AHEAD
        states[used] = np.where(was_resident[used] | ahead[used], HIT, MISSED)
        states[self._left_out] = LEFT_OUT
        return np.asarray(states[:count])

    def _by_expert(self, values: np.ndarray) -> np.ndarray:
        """Return whether something holds for an expert in any version, bool [E]. Low versions come last."""
        expert = self._engine.records.expert
        if expert is None:
            return np.asarray(values[: self._count])
        is_any = np.zeros(self._count, bool)
        np.logical_or.at(is_any, expert[: len(values)], values)
        return is_any
