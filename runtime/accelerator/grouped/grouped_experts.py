"""Experts of a layer by Triton: one kernel for all matrices of a shape and format.

The steps are: round the rows of the layer, multiply by gate and up, activate and round, multiply by down.

The first launch of a layer of few pairs is recorded as a CUDA graph when its plan occurs again. To begin its kernels
one by one takes longer than they do. Numbers of jobs and pairs are rounded up to powers of two for it, so that
few graphs serve all layers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from moec.manifests.quant import COLUMNS_PER_TILE, ROWS_PER_BLOCK, QuantSpec, round_up

from ..image import Part
from . import triton_kernels
from .bounds import (
    FLOAT_BYTES,
    RECORDED_PAIRS,
    RECORDED_ROWS,
    RECORDED_TABLE_BYTES,
    recorded_bytes,
)
from .layer_work import LayerWork, Plan, groups_of

_STEP_COLUMNS = 128
_PREPARED_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """Data of a matrix for the kernels.

    blocks: row blocks.
    numbers: rows, and bytes of a row block. They may change from call to call.
    constants: what kernels are compiled for, by the name of the parameter.
    """

    blocks: int
    numbers: tuple[int, ...]
    constants: dict[str, Any]


@lru_cache(maxsize=256)
def shape_of(rows: int, columns: int, spec: QuantSpec) -> Shape:
    """Return the data of a matrix of this format for the kernels."""
    blocks = round_up(rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK
    block_bytes = spec.packed_bytes(rows, columns) // blocks
    is_float = spec.bitwidth == 16
    tile_columns = COLUMNS_PER_TILE if is_float else spec.tile_columns
    tiles = -(-columns // tile_columns)
    low, *high = (0,) if is_float or spec.is_ternary else spec.plane_bits
    constants = {
        "columns": columns,
        "group_tiles": 1 if is_float else tiles // spec.groups(columns),
        "tiles": tiles,
        "kind": _kind(spec),
        "low": low,
        "high": high[0] if high else 0,
        "header": 0 if is_float else spec.group_header_bytes,
        "tile_columns": tile_columns,
        "tile_bytes": 0 if is_float else ROWS_PER_BLOCK * spec.tile_row_bytes,
        "byte_scales": spec.byte_scales,
        "step": _STEP_COLUMNS // tile_columns,
    }
    return Shape(blocks, (rows, block_bytes), constants)


def _kind(spec: QuantSpec) -> int:
    if spec.bitwidth == 16:
        return triton_kernels.BFLOAT16 if spec.float_type == "bfloat16" else triton_kernels.FLOAT16
    if spec.is_ternary:
        return triton_kernels.TERNARY
    return triton_kernels.MXFP4 if spec.is_mxfp4 else triton_kernels.INTEGERS


@dataclass(frozen=True, slots=True)
class Jobs:
    """Products that kernels do.

    table: int64 [n, JOB_FIELDS].
    first, count: the jobs of a call.
    sources: input row of each pair, int64 [n].
    pairs_per_job: most pairs of a job; see `triton_kernels.products`.
    """

    table: torch.Tensor
    first: int
    count: int
    sources: torch.Tensor
    pairs_per_job: int


def multiply(shape: Shape, jobs: Jobs, source: torch.Tensor, target: torch.Tensor) -> None:
    """Begin the products of some jobs whose matrices have one shape and format.

    source, target: rows, float32 [n, columns] and [n, rows].
    """
    constants = shape.constants
    if jobs.pairs_per_job > 1:
        constants = {**constants, "step": max(1, constants["step"] // 2)}
    triton_kernels.products[(shape.blocks, jobs.count)](
        jobs.table, jobs.sources, source, target, jobs.first, *shape.numbers, source.stride(0), target.stride(0),
        **constants, pairs_per_job=jobs.pairs_per_job,
    )  # fmt: skip


def prepare(
    source: torch.Tensor,
    target: torch.Tensor,
    is_rounded: torch.Tensor,
    activation: int = triton_kernels.PLAIN,
    limit: float = 0,
) -> None:
    """Begin to write rows as matrices read them.

    source: float32 [n, columns]; with an activation [2 n, columns], rows of gate and then rows of up.
    target: float32 [n, columns].
    is_rounded: int64 [n].
    """
    count, columns = target.shape
    triton_kernels.prepare[(count, -(-columns // _PREPARED_COLUMNS))](
        source, target, is_rounded, columns, source.stride(0), target.stride(0), count, float(limit), activation,
        _PREPARED_COLUMNS,
    )  # fmt: skip


ACTIVATIONS = {
    "silu": triton_kernels.SILU,
    "relu": triton_kernels.RELU,
    "clamped_swiglu": triton_kernels.CLAMPED_SWIGLU,
}
_RECORDINGS = 64
_MOST_SEEN = 4096


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Memory of a plan on the device.

    table: int64 [table_size].
    rows, rounded: float32 [rows, hidden].
    between: float32 [2 pairs, width]. activated: float32 [pairs, width].
    out: float32 [pairs, hidden].
    """

    table: torch.Tensor
    rows: torch.Tensor
    rounded: torch.Tensor
    between: torch.Tensor
    activated: torch.Tensor
    out: torch.Tensor


def _begin(plan: Plan, memory: _Buffers) -> None:
    """Begin the kernels of a plan."""
    pairs, at = plan.pairs, 3 * plan.pairs
    sources, themselves = memory.table[:pairs], memory.table[pairs : 2 * pairs]
    jobs, number = memory.table[at + plan.rows :], 0
    if any(call.matrix[2].bitwidth != 16 for call in plan.first):
        prepare(memory.rows, memory.rounded, memory.table[at : at + plan.rows])
    for call in plan.first:
        source = memory.rows if call.matrix[2].bitwidth == 16 else memory.rounded
        multiply(
            shape_of(*call.matrix), Jobs(jobs, number, call.jobs, sources, plan.pairs_per_job), source, memory.between
        )
        number += call.jobs
    activation = ACTIVATIONS[plan.activation]
    prepare(memory.between, memory.activated, memory.table[2 * pairs : at], activation, plan.limit)
    for call in plan.last:
        last_jobs = Jobs(jobs, number, call.jobs, themselves, plan.pairs_per_job)
        multiply(shape_of(*call.matrix), last_jobs, memory.activated, memory.out)
        number += call.jobs


class GroupedExperts:
    """Begins the experts of layers. The results of a call are read before the next layer begins.

    note: why nothing is recorded, as text for people, or "".
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._recorder: Recorder | None = None
        self._seen = Counter[Plan]()
        self._rows: torch.Tensor | None = None
        self.note = ""

    def begin_layer(self) -> None:
        """Begin a layer. Results of an earlier layer are lost."""
        self._rows = None
        if self._recorder is not None:
            self._recorder.wait()

    def compute(
        self, parts: Sequence[Part], rows: np.ndarray, arrive: Callable[[], None]
    ) -> list[Callable[[], np.ndarray]]:
        """Begin to compute experts.

        rows: rows of the layer, float32 [T, D]. They are the same for all calls of a layer.
        arrive: lets the device wait for the bytes of the experts.
        Returns functions that wait for the results of some parts each, in order: float32 [pairs of these parts, D].
        """
        return [self._compute(group, rows, arrive) for group in groups_of(parts)]

    def _compute(self, parts: list[Part], rows: np.ndarray, arrive: Callable[[], None]) -> Callable[[], np.ndarray]:
        work, (count, hidden) = LayerWork(parts), rows.shape
        if len(work.sources) <= RECORDED_PAIRS and count <= RECORDED_ROWS and not self.note:
            read = self._recorded(work.plan(parts[0], count, hidden, padded=True), work, rows, arrive)
            if read is not None:
                return read
        plan = work.plan(parts[0], count, hidden, padded=False)
        table = torch.empty(plan.table_size, dtype=torch.int64, pin_memory=self._is_cuda)
        work.write_table(plan, table.numpy())
        if self._rows is None:
            self._rows = torch.from_numpy(rows).to(self._device)
        sizes = (
            (plan.rows, plan.hidden),
            (2 * plan.pairs, plan.width),
            (plan.pairs, plan.width),
            (plan.pairs, plan.hidden),
        )
        scratch = (torch.empty(size, dtype=torch.float32, device=self._device) for size in sizes)
        memory = _Buffers(table.to(self._device, non_blocking=True), self._rows, *scratch)
        arrive()
        _begin(plan, memory)
        out = memory.out
        return lambda: np.asarray(out.cpu().numpy())

    def _recorder_for(self, plan: Plan) -> Recorder | None:
        """Return the recorder that is ready for a plan, None if the plan is not recorded or the recorder is in use.

        A plan is recorded when it occurs for the second time. The first time compiles the kernels.
        """
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen[plan] += 1
        if self._seen[plan] == 1 or 8 * plan.table_size > RECORDED_TABLE_BYTES:
            return None
        if self._recorder is not None and not self._recorder.holds(plan):
            self._recorder.wait()
            self._recorder = None  # before a larger one is made
        if self._recorder is None:
            self._recorder = Recorder(self._device, plan.hidden, plan.width)
        self._recorder.plan = plan
        return None if self._recorder.is_busy else self._recorder

    def _recorded(
        self, plan: Plan, work: LayerWork, rows: np.ndarray, arrive: Callable[[], None]
    ) -> Callable[[], np.ndarray] | None:
        """Begin a recorded layer. Returns None if it is not recorded.

        After an error of the device nothing is recorded any more.
        """
        try:
            recorder = self._recorder_for(plan)
            return None if recorder is None else recorder.run(work, rows, arrive)
        except RuntimeError as error:  # of torch: no memory, or a device without graphs
            self.note = f"layers are not recorded ({(str(error).splitlines() or [''])[0][:120]})"
            self._recorder = None
            return None


class Recorder:
    """Layers of few pairs, recorded with their way to the device and back. All recordings use the same memory.

    plan: plan of the next `run`.
    is_busy: whether a layer was begun whose results have not been read.

    On the CPU nothing is recorded: the kernels begin one by one, in the same memory.
    """

    def __init__(self, device: torch.device, hidden: int, width: int) -> None:
        self._device, self._hidden, self._width = device, hidden, width
        self._is_cuda = device.type == "cuda"
        given = recorded_bytes(hidden)
        self._given = torch.empty(given, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._given_there = torch.empty(given, dtype=torch.uint8, device=device)
        self._out = torch.empty((RECORDED_PAIRS, hidden), dtype=torch.float32, pin_memory=self._is_cuda)
        rows, pairs = RECORDED_ROWS, RECORDED_PAIRS
        shapes = ((rows, hidden), (2 * pairs, width), (pairs, width), (pairs, hidden))
        self._memory = tuple(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
        self._recordings = OrderedDict[Plan, Callable[[], None]]()
        self._end = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self.is_busy = False
        self.plan: Plan

    def holds(self, plan: Plan) -> bool:
        """Return whether the memory is large enough for a plan."""
        return plan.hidden == self._hidden and plan.width <= self._width

    def wait(self) -> None:
        """Wait for the layer that was begun last."""
        if self.is_busy and self._end is not None:
            self._end.synchronize()
        self.is_busy = False

    def run(self, work: LayerWork, rows: np.ndarray, arrive: Callable[[], None]) -> Callable[[], np.ndarray]:
        """Begin a layer of `plan`. Returns a function that waits for its results. Raises torch's own errors."""
        plan = self.plan
        row_bytes, table_bytes = plan.rows * self._hidden * FLOAT_BYTES, 8 * plan.table_size
        given = self._given.numpy()
        given[: rows.nbytes].view(np.float32)[:] = rows.reshape(-1)
        work.write_table(plan, given[row_bytes : row_bytes + table_bytes].view(np.int64))
        replay = self._recordings.get(plan)
        arrive()
        if replay is None:
            replay = self._record(plan, row_bytes, table_bytes)
        self._recordings.move_to_end(plan)
        self.is_busy = True
        replay()
        if self._end is not None:
            self._end.record(torch.cuda.current_stream(self._device))
        count = len(work.sources)

        def results() -> np.ndarray:
            self.wait()
            return self._out[:count].numpy().copy()

        return results

    def _record(self, plan: Plan, row_bytes: int, table_bytes: int) -> Callable[[], None]:
        """Return a function that begins a plan with what `_given` has then."""
        size, pairs = row_bytes + table_bytes, plan.pairs
        there = self._given_there
        rounded, between, activated, out = self._memory
        # Rows between are at most as wide as the memory. A plan uses the first `width` columns of each.
        memory = _Buffers(
            there[row_bytes:size].view(torch.int64),
            there[:row_bytes].view(torch.float32).view(plan.rows, self._hidden),
            rounded[: plan.rows],
            between[: 2 * pairs, : plan.width],
            activated[:pairs, : plan.width],
            out[:pairs],
        )

        def begin() -> None:
            there[:size].copy_(self._given[:size], non_blocking=True)
            _begin(plan, memory)
            self._out[:pairs].copy_(out[:pairs], non_blocking=True)

        if self._is_cuda:
            begin()  # compiles what is not yet compiled, which a capture must not
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                begin()
            replay: Callable[[], None] = graph.replay
        else:
            replay = begin
        if len(self._recordings) == _RECORDINGS:
            self._recordings.popitem(last=False)
        self._recordings[plan] = replay
        return replay
