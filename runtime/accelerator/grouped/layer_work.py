"""The work of a layer for `grouped_experts.py`: which kernels it needs, and the table of their jobs.

A pair is a token of an expert. Pairs of an expert follow each other, cut into jobs of as many as a kernel takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from moec.manifests.quant import QuantSpec

from ..image import ExpertForm, Part
from . import bounds
from .bounds import JOB_FIELDS

_ONE, _SOME, _MANY = 1, 16, 64
"""Pairs of a job. The kernel for one reads the packed weights once for each pair, the others once for all of them."""


Matrix: TypeAlias = tuple[int, int, QuantSpec]
"""Rows, columns and format of a matrix."""


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel call: the matrices' shape and format, and the number of its jobs."""

    matrix: Matrix
    jobs: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernels of a layer, apart from the addresses and rows that they are told. Layers of one plan share a graph.

    rows, pairs: numbers of rows and pairs.
    hidden, width: columns of rows and results, and most columns between.
    pairs_per_job: most pairs of a job.
    first, last: calls for gate and up, and for down.
    """

    rows: int
    pairs: int
    hidden: int
    width: int
    pairs_per_job: int
    first: tuple[Call, ...]
    last: tuple[Call, ...]
    activation: str
    limit: float

    @property
    def jobs(self) -> int:
        """Jobs of all calls."""
        return sum(call.jobs for call in (*self.first, *self.last))

    @property
    def table_size(self) -> int:
        """Numbers of the table: sources, pairs, which pairs and which rows are rounded, and jobs."""
        return 3 * self.pairs + self.rows + self.jobs * JOB_FIELDS


class LayerWork:
    """The work of a layer, in arrays: where its matrices are and what they read.

    sources: row of each pair, int64 [P].
    is_rounded: whether down of its expert reads rounded values, int64 [P].
    first, last: jobs of gate and up, and of down, by shape and format: int64 [n, JOB_FIELDS] each. The last field is 1
        for up and 0 otherwise; `write_table` multiplies it.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        counts = np.array([len(expert.tokens) for expert in parts])
        most = int(counts.max())
        self.pairs_per_job = _ONE if most < 4 else _SOME if most <= _SOME else _MANY
        self.sources = np.concatenate([expert.tokens for expert in parts]).astype(np.int64)
        self.width = max(expert.form.up.rows for expert in parts)
        owner, starts = self._jobs_of(counts)
        bases = np.array([expert.image.data_ptr() for expert in parts], np.int64)
        forms = list(dict.fromkeys(expert.form for expert in parts))
        form_of = np.array([forms.index(expert.form) for expert in parts]) if len(forms) > 1 else np.zeros_like(counts)
        self.is_rounded = np.array([form.down.reads_rounded for form in forms])[form_of].repeat(counts)
        sizes = np.minimum(self.pairs_per_job, (np.cumsum(counts)[owner]) - starts)
        jobs = np.stack((bases[owner], np.zeros_like(starts), starts, sizes, np.zeros_like(starts)), axis=1)
        self.first, self.last = dict[Matrix, np.ndarray](), dict[Matrix, np.ndarray]()
        for number, form in enumerate(forms):
            form_jobs = jobs if len(forms) == 1 else jobs[form_of[owner] == number]
            self._add(form, form_jobs)

    def _jobs_of(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the part of each job and its first pair, for parts of these numbers of pairs."""
        ends = np.cumsum(counts)
        if int(counts.max()) <= self.pairs_per_job:
            return np.arange(len(counts)), ends - counts
        per_part = -(-counts // self.pairs_per_job)
        owner = np.repeat(np.arange(len(counts)), per_part)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(per_part) - per_part, per_part)
        return owner, (ends - counts)[owner] + self.pairs_per_job * within

    def _add(self, form: ExpertForm, jobs: np.ndarray) -> None:
        """Add the jobs of the experts of one form. Field 0 of jobs is the address of an expert."""
        places = (form.gate, 0, 0, self.first), (form.up, 1, 1, self.first), (form.down, 2, 0, self.last)
        for matrix, number, half, calls in places:
            if matrix is None:
                continue
            matrix_jobs = jobs.copy()
            if form.biases:
                matrix_jobs[:, 1] = matrix_jobs[:, 0] + form.biases[number][0]
            matrix_jobs[:, 0] += matrix.start
            matrix_jobs[:, 4] = half
            key = (matrix.rows, matrix.columns, matrix.spec)
            calls[key] = np.concatenate((calls[key], matrix_jobs)) if key in calls else matrix_jobs

    def plan(self, expert: Part, rows: int, hidden: int, padded: bool) -> Plan:
        """Return the plan of this work; `padded` rounds numbers up to powers of two."""

        def rounded(count: int) -> int:
            return max(8, 1 << (count - 1).bit_length()) if padded else count

        first, last = (
            tuple(Call(matrix, rounded(len(calls[matrix]))) for matrix in sorted(calls, key=str))
            for calls in (self.first, self.last)
        )
        rows, pairs, form = rounded(rows), rounded(len(self.sources)), expert.form
        return Plan(rows, pairs, hidden, self.width, self.pairs_per_job, first, last, form.activation, form.limit)

    def write_table(self, plan: Plan, table: np.ndarray) -> None:
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
                at += call.jobs * JOB_FIELDS


def groups_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield parts of one activation with at most MOST_PAIRS pairs at a time. An expert of more pairs is divided."""
    group, pairs = list[Part](), 0
    for expert in parts:
        for start in range(0, len(expert.tokens), bounds.MOST_PAIRS):
            piece = Part(expert.image, expert.form, expert.tokens[start : start + bounds.MOST_PAIRS])
            is_same = not group or _activation(group[0]) == _activation(piece)
            if group and (not is_same or pairs + len(piece.tokens) > bounds.MOST_PAIRS):
                yield group
                group, pairs = [], 0
            group.append(piece)
            pairs += len(piece.tokens)
    if group:
        yield group


def _activation(expert: Part) -> tuple[str, float]:
    return expert.form.activation, expert.form.limit
