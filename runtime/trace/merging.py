"""Merge routing traces of many devices into one value: how often tokens use each expert, and routes of some tokens.

Memory holds one line of a trace, the counts, and a bounded sample of routes. The result does not depend on the order of
the traces. Each trace counts by its tokens.
Shapes: T tokens, M layers of a stack that route, K top-k.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moec.manifests.errors import InputError
from moec.manifests.expert_use import MAX_ROUTE_BYTES, MAX_ROUTES, ROUTE_ITEM_BYTES, ExpertUse, SampledRoutes
from moec.manifests.files.input_file import UnreadableFile, open_input
from moec.manifests.files.limits import MERGED_LINE_JSON
from moec.manifests.model import MAX_EXPERTS
from moec.manifests.progress import Progress

from .trace import TracedPass, TraceHeader
from .trace_file import opened_trace

HELD_OUT_SHARE = 0.2
"""Share of the traces whose routes test predictions. A calibration holds out as many of its texts."""
_CHUNK_BYTES = 1 << 20
_RECORD = "record it with `moec run BUNDLE --trace-out FILE`"


def merge_traces(paths: Sequence[Path], progress: Progress) -> ExpertUse:
    """Return the use of experts in all traces.

    progress: called with (traces read, traces in all).
    Raises InputError for a damaged trace, one of another model than the first, one without the experts that its bundle
    leaves out, and two traces of equal content.
    """
    known = dict[bytes, Path]()
    merge: _Merge | None = None
    for number, path in enumerate(paths, 1):
        digest = _digest(path)
        if digest in known:
            raise InputError(f"`{path}` has the same content as `{known[digest]}`", "name each trace once")
        known[digest] = path
        with opened_trace(path, MERGED_LINE_JSON) as (header, passes):
            merge = merge or _Merge(path, header)
            merge.begin(path, header, digest)
            for traced in passes:
                merge.add(traced)
        progress(number, len(paths))
    if merge is None:
        raise InputError("there is no trace to merge", "name at least one")
    return merge.result()


def _digest(path: Path) -> bytes:
    """Return the SHA-256 of a regular file. Raises InputError."""
    try:
        descriptor = open_input(path, follow_links=True)
    except UnreadableFile as error:
        raise InputError(f"the trace `{path}` {error}", "check the path") from error
    digest = hashlib.sha256()
    with os.fdopen(descriptor, "rb") as file:
        try:
            while data := file.read(_CHUNK_BYTES):
                digest.update(data)
        except OSError as error:
            raise InputError(f"the trace `{path}` cannot be read: {error.strerror}", "check the path") from error
    return digest.digest()


class _Merge:
    """The sums over traces of one model.

    path, header: the first trace.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self._first, self._header = path, header
        if not 0 < sum(header.experts) <= MAX_EXPERTS:
            raise InputError(
                f"`{path}` is of a model of {sum(header.experts)} routed experts, expected 1 to {MAX_EXPERTS}", _RECORD
            )
        self._traces, self._tokens = 0, [0] * len(header.experts)
        self._chosen = [np.zeros(count, np.int64) for count in header.experts]
        self._offered = [np.zeros(count, np.int64) for count in header.experts]
        starts = [0, header.first_decoder_layer] if header.first_decoder_layer else [0]
        ends = [*starts[1:], len(header.experts)]
        self._stacks = [_Stack(header, *span, len(starts)) for span in zip(starts, ends, strict=True)]

    def begin(self, path: Path, header: TraceHeader, digest: bytes) -> None:
        """Begin a trace. Raises InputError if it does not fit the first one."""
        if not header.architecture or not header.left_out:
            raise InputError(
                f"`{path}` does not tell the model and the experts that its bundle leaves out: an older moec wrote it",
                _RECORD,
            )
        if _model_of(header) != _model_of(self._header):
            raise InputError(
                f"`{path}` is of another model than `{self._first}`: {_shape(header)}, expected {_shape(self._header)}",
                "merge the traces of each model on their own",
            )
        self._traces += 1
        self._is_held = [~np.isin(np.arange(n), out) for n, out in zip(header.experts, header.left_out, strict=True)]
        for stack in self._stacks:
            stack.begin(digest, is_whole=not any(header.left_out))

    def add(self, traced: TracedPass) -> None:
        """Add a pass of the trace that was begun last."""
        for layer, chosen in enumerate(traced.chosen, traced.first_layer):
            self._tokens[layer] += traced.tokens
            self._chosen[layer] += np.bincount(np.array(chosen, np.int64), minlength=len(self._chosen[layer]))
            self._offered[layer] += traced.tokens * self._is_held[layer]
        for stack in self._stacks:
            stack.add(traced)

    def result(self) -> ExpertUse:
        """Return the sums."""
        header = self._header
        routes = tuple(stack.routes() for stack in self._stacks)
        return ExpertUse(
            architecture=header.architecture,
            experts=header.experts,
            top_k=header.top_k,
            traces=self._traces,
            tokens=tuple(self._tokens),
            chosen=tuple(tuple(row.tolist()) for row in self._chosen),
            offered=tuple(tuple(row.tolist()) for row in self._offered),
            routes=routes if routes[-1].counted else (),
        )


def _model_of(header: TraceHeader) -> tuple[object, ...]:
    return header.architecture, header.experts, header.top_k, header.first_decoder_layer


def _shape(header: TraceHeader) -> str:
    kinds = sorted(set(zip(header.experts, header.top_k, strict=True)), reverse=True)
    experts = ", ".join(f"{count} experts, top-{top_k}" for count, top_k in kinds[:3])
    return f"{len(header.experts)} layers of {experts}, architecture {header.architecture[:8]}"


@dataclass(slots=True)
class _Sample:
    """The routes with the smallest priorities.

    most: number of routes that are kept.
    routes: uint16 [2 * most, M, K].
    priorities: uint64 [2 * most].
    traces: number of each route's trace, int64 [2 * most].
    """

    most: int
    routes: np.ndarray
    priorities: np.ndarray
    traces: np.ndarray
    count: int = 0

    @classmethod
    def of(cls, most: int, layers: int, top_k: int) -> _Sample:
        """Return an empty sample. The system gives memory when it is written."""
        room = 2 * most
        return cls(
            most, np.empty((room, layers, top_k), np.uint16), np.empty(room, np.uint64), np.empty(room, np.int64)
        )

    def add(self, routes: np.ndarray, priorities: np.ndarray, trace: int) -> None:
        """Add routes [T, M, K] of a trace."""
        for start in range(0, len(routes), self.most):
            chunk = slice(start, start + self.most)
            rows = len(routes[chunk])
            if self.count + rows > len(self.routes):
                self.reduce()
            here = slice(self.count, self.count + rows)
            self.routes[here], self.priorities[here], self.traces[here] = routes[chunk], priorities[chunk], trace
            self.count += rows

    def reduce(self) -> None:
        """Keep the routes of the smallest priorities."""
        smallest = np.argsort(self.priorities[: self.count], kind="stable")[: self.most]
        self.routes[: len(smallest)] = self.routes[smallest]
        self.priorities[: len(smallest)], self.traces[: len(smallest)] = (
            self.priorities[smallest],
            self.traces[smallest],
        )
        self.count = len(smallest)


@dataclass(slots=True)
class _Stack:
    """Routes of one stack. Tokens get random priorities from the digest of their trace.

    header: of the first trace.
    first, end: layers of the stack.
    stacks: number of stacks that share the bytes of a file.
    """

    header: TraceHeader
    first: int
    end: int
    stacks: int
    _digests: list[bytes] = field(default_factory=list)
    _random: np.random.Philox | None = None
    _sample: _Sample | None = None

    def begin(self, digest: bytes, is_whole: bool) -> None:
        """Begin a trace. Routes around experts that the bundle leaves out are not kept: others would go elsewhere."""
        self._random = None
        if is_whole and self._top_k():
            self._digests.append(digest)
            self._random = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def _layers(self) -> list[int]:
        return [layer for layer in range(self.first, self.end) if self.header.experts[layer]]

    def _top_k(self) -> int:
        """Return the experts per token of all layers that route; 0 if they differ, or none routes."""
        counts = {self.header.top_k[layer] for layer in self._layers()}
        return counts.pop() if len(counts) == 1 else 0

    def add(self, traced: TracedPass) -> None:
        """Add a pass, if it is of this stack."""
        if self._random is None or traced.first_layer != self.first:
            return
        layers, top_k = self._layers(), self._top_k()
        if self._sample is None:
            route_bytes = ROUTE_ITEM_BYTES * len(layers) * top_k
            most = max(1, min(MAX_ROUTES, MAX_ROUTE_BYTES // self.stacks // route_bytes))
            self._sample = _Sample.of(most, len(layers), top_k)
        routes_by_layer = [
            np.array(traced.chosen[layer - self.first], np.uint16).reshape(-1, top_k) for layer in layers
        ]
        self._sample.add(
            np.stack(routes_by_layer, axis=1), self._random.random_raw(traced.tokens), len(self._digests) - 1
        )

    def routes(self) -> SampledRoutes:
        """Return the sample. Sorting removes the order of the tokens."""
        if self._sample is None:
            return SampledRoutes(self.first, b"", b"")
        self._sample.reduce()
        routes, traces = self._sample.routes[: self._sample.count], self._sample.traces[: self._sample.count]
        order = sorted(range(len(self._digests)), key=self._digests.__getitem__)
        is_held_out = np.isin(traces, order[: round(HELD_OUT_SHARE * len(order))])
        return SampledRoutes(self.first, _joined(routes[~is_held_out]), _joined(routes[is_held_out]))


def _joined(routes: np.ndarray) -> bytes:
    return b"".join(sorted(row.astype("<u2").tobytes() for row in routes))
