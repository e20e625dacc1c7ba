"""Experts of a layer by Triton: one kernel for all matrices of a shape and format.

A pair is a token of an expert. Pairs of an expert follow each other, cut into jobs of as many as a kernel takes.
The steps are: round the rows of the layer, multiply by gate and up, activate and round, multiply by down.

A layer of few pairs is recorded as a CUDA graph, because beginning its kernels one by one takes longer than they do.
Numbers of jobs and pairs are rounded up to powers of two for it, so that few graphs serve all layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from moec.manifests.quant import QuantSpec

from . import triton_kernels as own
from .expert_form import ExpertForm, Part
from .grouped_bounds import FLOAT_BYTES, MOST_PAIRS, RECORDED_PAIRS, RECORDED_ROWS, RECORDED_TABLE_BYTES
from .triton_products import Jobs, multiply, prepare, shape_of

ACTIVATIONS = {"silu": own.SILU, "relu": own.RELU, "clamped_swiglu": own.CLAMPED_SWIGLU}
_RECORDINGS = 64
_FEW, _SOME, _MANY = 1, 16, 64
"""Pairs of a job: the kernel for one does not use the unit for matrix products, the others do."""


_Matrix: TypeAlias = tuple[int, int, QuantSpec]
"""Rows, columns and format of a matrix."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A kernel call: the matrices' shape and format, and the number of its jobs."""

    matrix: _Matrix
    jobs: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """The kernels of a layer, apart from the addresses and rows that they are told. Layers of one plan share a graph.

    rows, pairs: numbers of rows and pairs.
    hidden, width: columns of rows and results, and most columns between.
    tokens: most pairs of a job.
    first, last: calls for gate and up, and for down.
    """

    rows: int
    pairs: int
    hidden: int
    width: int
    tokens: int
    first: tuple[_Call, ...]
    last: tuple[_Call, ...]
    activation: str
    limit: float

    @property
    def jobs(self) -> int:
        """Jobs of all calls."""
        return sum(call.jobs for call in (*self.first, *self.last))

    @property
    def table_size(self) -> int:
        """Numbers of the table: sources, pairs, which pairs and which rows are rounded, and jobs."""
        return 3 * self.pairs + self.rows + self.jobs * own.JOB_FIELDS


class _Layer:
    """The work of a layer, in arrays: where its matrices are and what they read.

    sources: row of each pair, int64 [P].
    is_rounded: whether down of its expert reads rounded values, int64 [P].
    first, last: jobs of gate and up, and of down, by shape and format: int64 [n, JOB_FIELDS] each. The last field is 1
        for up and 0 otherwise; `write_table` multiplies it.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        counts = np.array([len(part.tokens) for part in parts])
        most = int(counts.max())
        self.tokens = _FEW if most < 4 else _SOME if most <= _SOME else _MANY
        self.sources = np.concatenate([part.tokens for part in parts]).astype(np.int64)
        self.width = max(part.form.up.rows for part in parts)
        owner, starts = self._jobs_of(counts)
        bases = np.array([part.image.data_ptr() for part in parts], np.int64)
        forms = list(dict.fromkeys(part.form for part in parts))
        form_of = np.array([forms.index(part.form) for part in parts]) if len(forms) > 1 else np.zeros_like(counts)
        self.is_rounded = np.array([form.down.reads_rounded for form in forms])[form_of].repeat(counts)
        sizes = np.minimum(self.tokens, (np.cumsum(counts)[owner]) - starts)
        jobs = np.stack((bases[owner], np.zeros_like(starts), starts, sizes, np.zeros_like(starts)), axis=1)
        self.first, self.last = dict[_Matrix, np.ndarray](), dict[_Matrix, np.ndarray]()
        for number, form in enumerate(forms):
            own = jobs if len(forms) == 1 else jobs[form_of[owner] == number]
            self._add(form, own)

    def _jobs_of(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each job and its first pair, for parts of these numbers of pairs."""
        ends = np.cumsum(counts)
        if int(counts.max()) <= self.tokens:
            return np.arange(len(counts)), ends - counts
        per_part = -(-counts // self.tokens)
        owner = np.repeat(np.arange(len(counts)), per_part)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(per_part) - per_part, per_part)
        return owner, (ends - counts)[owner] + self.tokens * within

    def _add(self, form: ExpertForm, jobs: np.ndarray) -> None:
        """Add the jobs of the experts of one form. Field 0 of jobs is the address of an expert."""
        places = (form.gate, 0, 0, self.first), (form.up, 1, 1, self.first), (form.down, 2, 0, self.last)
        for matrix, number, half, calls in places:
            if matrix is None:
                continue
            own = jobs.copy()
            if form.biases:
                own[:, 1] = own[:, 0] + form.biases[number][0]
            own[:, 0] += matrix.start
            own[:, 4] = half
            key = (matrix.rows, matrix.columns, matrix.spec)
            calls[key] = np.concatenate((calls[key], own)) if key in calls else own

    def plan(self, part: Part, rows: int, hidden: int, padded: bool) -> _Plan:
        """Return the plan of this work; `padded` rounds numbers up to powers of two."""
        up = _power_of_two if padded else int
        first, last = (
            tuple(_Call(matrix, up(len(jobs))) for matrix, jobs in calls.items()) for calls in (self.first, self.last)
        )
        form = part.form
        return _Plan(
            up(rows), up(len(self.sources)), hidden, self.width, self.tokens, first, last, form.activation, form.limit
        )

    def write_table(self, plan: _Plan, table: np.ndarray) -> None:
        """Write the table of a plan, int64 [table_size]."""
        table[:] = 0
        pairs, count = plan.pairs, len(self.sources)
        table[:count] = self.sources
        table[pairs : pairs + count] = np.arange(count)
        table[2 * pairs : 2 * pairs + count] = self.is_rounded
        at = 3 * pairs
        table[at : at + plan.rows] = 1
        at += plan.rows
        for calls, all_jobs in ((plan.first, self.first), (plan.last, self.last)):
            for call in calls:
                jobs = all_jobs[call.matrix]
                written = table[at : at + jobs.size].reshape(jobs.shape)
                written[:] = jobs
                written[:, 4] *= pairs
                at += call.jobs * own.JOB_FIELDS


def _power_of_two(count: int) -> int:
    return max(8, 1 << (count - 1).bit_length())


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


def _begin(plan: _Plan, memory: _Buffers) -> None:
    """Begin the kernels of a plan."""
    pairs, at = plan.pairs, 3 * plan.pairs
    sources, themselves = memory.table[:pairs], memory.table[pairs : 2 * pairs]
    jobs, number = memory.table[at + plan.rows :], 0
    if any(call.matrix[2].bitwidth != 16 for call in plan.first):
        prepare(memory.rows, memory.rounded, memory.table[at : at + plan.rows])
    for call in plan.first:
        source = memory.rows if call.matrix[2].bitwidth == 16 else memory.rounded
        multiply(shape_of(*call.matrix), Jobs(jobs, number, call.jobs, sources, plan.tokens), source, memory.between)
        number += call.jobs
    activation = ACTIVATIONS[plan.activation]
    prepare(memory.between, memory.activated, memory.table[2 * pairs : at], activation, plan.limit)
    for call in plan.last:
        made = Jobs(jobs, number, call.jobs, themselves, plan.tokens)
        multiply(shape_of(*call.matrix), made, memory.activated, memory.out)
        number += call.jobs


class GroupedExperts:
    """Begins the experts of layers. The results of a call are read before the next layer begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorder: _Recorder | None = None
        self._seen = Counter[_Plan]()

    def begin_layer(self) -> None:
        """Begin a layer. Results of an earlier layer are lost."""
        if self._recorder is not None:
            self._recorder.wait()

    def compute(self, parts: Sequence[Part], rows: np.ndarray) -> Iterator[tuple[list[Part], Callable[[], np.ndarray]]]:
        """Begin to compute experts.

        rows: rows of the layer, float32 [T, D].
        Yields some parts at a time, and a function that waits for their results, float32 [pairs of these parts, D].
        """
        for group in _groups(parts):
            yield group, self._compute(group, rows)

    def _compute(self, parts: list[Part], rows: np.ndarray) -> Callable[[], np.ndarray]:
        layer, (count, hidden) = _Layer(parts), rows.shape
        if len(layer.sources) <= RECORDED_PAIRS and count <= RECORDED_ROWS:
            plan = layer.plan(parts[0], count, hidden, padded=True)
            self._seen[plan] += 1
            # The first time compiles the kernels
            if self._seen[plan] > 1 and 8 * plan.table_size <= RECORDED_TABLE_BYTES:
                recorder = self._recorder_for(plan)
                if not recorder.is_busy:
                    return recorder.run(plan, layer, rows)
        plan = layer.plan(parts[0], count, hidden, padded=False)
        table = np.empty(plan.table_size, np.int64)
        layer.write_table(plan, table)
        table_on_device, rows_on_device = (torch.from_numpy(each).to(self._device) for each in (table, rows))
        memory = _allocate(plan, table_on_device, rows_on_device)
        _begin(plan, memory)
        out = memory.out
        return lambda: np.asarray(out.cpu().numpy())

    def _recorder_for(self, plan: _Plan) -> _Recorder:
        """Return the recorder, made anew if its memory is too small for a plan."""
        if self._recorder is None or not self._recorder.holds(plan):
            self._recorder = _Recorder(self._device, plan.hidden, plan.width)
        return self._recorder

    def close(self) -> None:
        """Free the memory of recordings."""
        self._recorder = None


def _groups(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield parts of one activation with at most MOST_PAIRS pairs at a time; an expert of more pairs is divided."""
    group, pairs = list[Part](), 0
    for part in parts:
        for start in range(0, len(part.tokens), MOST_PAIRS):
            piece = Part(part.image, part.form, part.tokens[start : start + MOST_PAIRS])
            is_same = not group or _activation(group[0]) == _activation(piece)
            if group and (not is_same or pairs + len(piece.tokens) > MOST_PAIRS):
                yield group
                group, pairs = [], 0
            group.append(piece)
            pairs += len(piece.tokens)
    if group:
        yield group


def _activation(part: Part) -> tuple[str, float]:
    return part.form.activation, part.form.limit


def _allocate(plan: _Plan, table: torch.Tensor, rows: torch.Tensor) -> _Buffers:
    def empty(count: int, columns: int) -> torch.Tensor:
        return torch.empty((count, columns), dtype=torch.float32, device=rows.device)

    return _Buffers(
        table,
        rows,
        empty(plan.rows, plan.hidden),
        empty(2 * plan.pairs, plan.width),
        empty(plan.pairs, plan.width),
        empty(plan.pairs, plan.hidden),
    )


class _Recorder:
    """Layers of few pairs, recorded with their way to the device and back. All recordings use the same memory.

    On the CPU nothing is recorded: the kernels begin one by one, in the same memory.
    """

    def __init__(self, device: torch.device, hidden: int, width: int) -> None:
        self._device, self._hidden, self._width = device, hidden, width
        self._is_cuda = device.type == "cuda"
        given = RECORDED_ROWS * hidden * FLOAT_BYTES + RECORDED_TABLE_BYTES
        self._given = torch.empty(given, dtype=torch.uint8, pin_memory=self._is_cuda)
        self._given_there = torch.empty(given, dtype=torch.uint8, device=device)
        self._out = torch.empty((RECORDED_PAIRS, hidden), dtype=torch.float32, pin_memory=self._is_cuda)
        self._memory = self._scratch()
        self._recordings = dict[_Plan, Callable[[], None]]()
        self._end = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self.is_busy = False

    def _scratch(self) -> tuple[torch.Tensor, ...]:
        shapes = (
            (RECORDED_ROWS, self._hidden),
            (2 * RECORDED_PAIRS, self._width),
            (RECORDED_PAIRS, self._width),
            (RECORDED_PAIRS, self._hidden),
        )
        return tuple(torch.empty(shape, dtype=torch.float32, device=self._device) for shape in shapes)

    def holds(self, plan: _Plan) -> bool:
        """Return whether the memory is large enough for a plan."""
        return plan.hidden == self._hidden and plan.width <= self._width

    def wait(self) -> None:
        """Wait for the layer that was begun last."""
        if self.is_busy and self._end is not None:
            self._end.synchronize()
        self.is_busy = False

    def run(self, plan: _Plan, layer: _Layer, rows: np.ndarray) -> Callable[[], np.ndarray]:
        """Begin a layer. Returns a function that waits for its results."""
        row_bytes, table_bytes = plan.rows * self._hidden * FLOAT_BYTES, 8 * plan.table_size
        given = self._given.numpy()
        given[: rows.nbytes].view(np.float32)[:] = rows.reshape(-1)
        layer.write_table(plan, given[row_bytes : row_bytes + table_bytes].view(np.int64))
        replay = self._recordings.get(plan)
        if replay is None:
            replay = self._record(plan, row_bytes, table_bytes)
        self.is_busy = True
        replay()
        if self._end is not None:
            self._end.record(torch.cuda.current_stream(self._device))
        count = len(layer.sources)

        def results() -> np.ndarray:
            self.wait()
            return self._out[:count].numpy().copy()

        return results

    def _record(self, plan: _Plan, row_bytes: int, table_bytes: int) -> Callable[[], None]:
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
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                begin()
            replay: Callable[[], None] = graph.replay
        else:
            replay = begin
        if len(self._recordings) == _RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[plan] = replay
        return replay
