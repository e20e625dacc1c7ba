"""Layers with a recurrent state: their weights, and their single steps. The specification of the extension's layers.

Shape letters:
T tokens, D hidden, S slots, K taps.
Hk and Hv heads of keys and values, Dk and Dv their sizes, Cn features of a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .elementary import exp, sigmoid, silu, softplus
from .packed_matrix import Floats, Int32s, PackedMatrix
from .stream_layer import StreamLayer, TokenPlaces, product

LENGTH_EPS = 1e-6
"""Added to the square of the length of queries and keys."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Adjacent tokens of one slot.

    kept: the number of these tokens after which the state is kept; 0 for never.
    """

    slot: int
    rows: slice
    kept: int


def _runs(places: TokenPlaces, kept_at: Int32s) -> Iterator[_Run]:
    starts = [0, *(np.flatnonzero(np.diff(places.slots)) + 1).tolist(), len(places.slots)]
    for start, stop in pairwise(starts):
        if start < stop:
            slot = int(places.slots[start])
            kept = int(kept_at[slot]) - int(places.positions[start])
            yield _Run(slot, slice(start, stop), kept if 0 < kept <= stop - start else 0)


def convolve(x: Floats, taps: Floats, live: Floats, kept: Floats, places: TokenPlaces, kept_at: Int32s) -> np.ndarray:
    """Return a causal convolution of each feature by itself: out[t] = sum over j of taps[j] * x[t - K + 1 + j].

    x: [T, Cn].
    taps: [K, Cn].
    live, kept: the K - 1 inputs before the first token of each slot, [S, K - 1, Cn], and kept ones; written.
    """
    count, out = len(taps), np.empty_like(x)
    for run in _runs(places, kept_at):
        rows = np.concatenate([live[run.slot], x[run.rows]])
        length = len(rows) - count + 1
        total = taps[0] * rows[:length]
        for j in range(1, count):
            total = total + taps[j] * rows[j : j + length]
        out[run.rows] = total
        if run.kept:
            kept[run.slot] = rows[run.kept : run.kept + count - 1]
        live[run.slot] = rows[length:]
    return out


@dataclass(kw_only=True)
class ConvolutionLayer(StreamLayer):
    """Weights of a short convolution between two gates: output(c * convolve(b * x)).

    input: [3 D, D], for b, c and x.
    taps: float32 [K, D], oldest first.
    output: [D, D].
    """

    input: PackedMatrix
    taps: Floats
    output: PackedMatrix

    def _mix(self, steps: Any, normed: Floats, state: Sequence[np.ndarray], places: TokenPlaces) -> Floats:
        live, kept, kept_at = state
        before, after, x = np.split(product(steps, self.input, normed), 3, axis=1)
        mixed = after * convolve(before * x, self.taps, live, kept, places, kept_at)
        return product(steps, self.output, mixed)


@dataclass(kw_only=True)
class DeltaLayer(StreamLayer):
    """Weights of linear attention by the gated delta rule, see `manifests.recurrent.DeltaSpec`.

    matrices: of query [Hk Dk, D], key [Hk Dk, D], value [Hv Dv, D], gate [Hv Dv, D], rate [Hv, D], step [Hv, D] and
        output [D, Hv Dv].
    taps: float32 [K, Cn], oldest first.
    decay_rate, step_bias: float32 [Hv].
    length_scales: factors of the features of queries and keys of mean square one, float32 [Dk].
    output_norm, output_norm_eps: the RMS norm of each head of the output, float32 [Dv].
    """

    matrices: tuple[PackedMatrix, ...]
    taps: Floats
    decay_rate: Floats
    step_bias: Floats
    length_scales: tuple[Floats, Floats]
    output_norm: Floats
    output_norm_eps: float
    key_heads: int
    value_heads: int

    def _mix(self, steps: Any, normed: Floats, state: Sequence[np.ndarray], places: TokenPlaces) -> Floats:
        rows, kept_rows, live, kept, kept_at = state
        *inputs, gate, rate, step, output = self.matrices
        flat = np.concatenate([product(steps, matrix, normed) for matrix in inputs], axis=1)
        flat = convolve(flat, self.taps, rows, kept_rows, places, kept_at)
        flat = silu(flat)
        keys = inputs[0].rows
        query, key, value = flat[:, :keys], flat[:, keys : 2 * keys], flat[:, 2 * keys :]
        query, key = (
            self._unit(steps, part, scale) for part, scale in zip((query, key), self.length_scales, strict=True)
        )
        value = value.reshape(len(normed), self.value_heads, -1)
        decay = exp(-self.decay_rate * softplus(product(steps, step, normed) + self.step_bias))
        rates = sigmoid(product(steps, rate, normed))
        mixed = np.empty_like(value)
        for run in _runs(places, kept_at):
            for at, row in enumerate(range(run.rows.start, run.rows.stop)):
                memory = _unblocked(live[run.slot], value.shape[2])
                known = decay[row, :, None] * (memory * key[row][:, :, None]).sum(axis=1)
                change = (value[row] - known) * rates[row, :, None]
                memory = memory * decay[row, :, None, None] + key[row][:, :, None] * change[:, None, :]
                mixed[row] = (memory * query[row][:, :, None]).sum(axis=1)
                live[run.slot] = _blocked(memory)
                if at + 1 == run.kept:
                    kept[run.slot] = live[run.slot]
        heads = mixed.reshape(-1, value.shape[2])
        steps.rms_norm(heads, self.output_norm, self.output_norm_eps, heads)
        gates = product(steps, gate, normed)
        return product(steps, output, mixed.reshape(gates.shape) * silu(gates))

    def _unit(self, steps: Any, rows: np.ndarray, scale: Floats) -> np.ndarray:
        """Scale each head of queries or keys to one length, for each head of values: [T, Hk Dk] -> [T, Hv, Dk]."""
        size = len(scale)
        heads = np.ascontiguousarray(rows).reshape(-1, size)
        steps.rms_norm(heads, scale, LENGTH_EPS / size, heads)
        return heads.reshape(len(rows), self.key_heads, size).repeat(self.value_heads // self.key_heads, axis=1)


def _unblocked(state: np.ndarray, value_size: int) -> np.ndarray:
    """Return the states of all heads: [Hv, Dv / 16 * Dk, 16] -> [Hv, Dk, Dv]."""
    heads, rows, columns = state.shape
    blocks = value_size // columns
    return state.reshape(heads, blocks, rows // blocks, columns).transpose(0, 2, 1, 3).reshape(heads, -1, value_size)


def _blocked(memory: np.ndarray) -> np.ndarray:
    """Return the states of all heads as they are stored: [Hv, Dk, Dv] -> [Hv, Dv / 16 * Dk, 16]."""
    heads, keys, values = memory.shape
    return memory.reshape(heads, keys, values // 16, 16).transpose(0, 2, 1, 3).reshape(heads, -1, 16)
