"""Attention of one layer on a torch device, with its keys and values there.

The specification is `runtime/layers/attention.py`.
Weights are unpacked once, to the float32 values of the kernels. Activations are rounded as in the kernels.
Sums are added in another order. Shapes are those of the specification.
E: positions up to the last one that a query sees.
B: sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from moec.manifests.model import AttentionSpec, LatentSpec
from moec.manifests.quant import ROWS_PER_BLOCK, round_up

from .. import kernels
from ..kernels.packed_matrix import PackedMatrix
from ..layers.attention import RotaryTables, Weights
from .dense import CHUNK_FLOATS, UNPACKED_AT_ONCE
from .torch_weights import round_activations, unpack


def unpacked(matrix: PackedMatrix, device: torch.device) -> torch.Tensor:
    """Return the weights of a matrix on the device, float32 [N, K]."""
    weights = torch.empty((matrix.rows, matrix.columns), dtype=torch.float32, device=device)
    unpack_into(weights, matrix)
    return weights


def unpack_into(weights: torch.Tensor, matrix: PackedMatrix) -> None:
    """Unpack a matrix into a tensor [N, K], some row blocks at a time."""
    blocks = round_up(matrix.rows, ROWS_PER_BLOCK) // ROWS_PER_BLOCK
    block_bytes = len(matrix.data) // blocks
    step = max(1, UNPACKED_AT_ONCE // (ROWS_PER_BLOCK * matrix.columns))
    for first in range(0, blocks, step):
        last = min(first + step, blocks)
        rows = slice(first * ROWS_PER_BLOCK, min(last * ROWS_PER_BLOCK, matrix.rows))
        packed = torch.from_numpy(matrix.data[first * block_bytes : last * block_bytes].copy()).to(weights.device)
        weights[rows] = unpack(packed, rows.stop - rows.start, matrix.columns, matrix.spec)


def rounded_as_read(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """Return rows [..., K] with the rounding that a matrix reads. 16-bit weights read rows without rounding."""
    if matrix.spec.bitwidth == 16:
        return x
    return round_activations(x.reshape(-1, x.shape[-1])).reshape(x.shape)


class TorchLinear:
    """Products x W^T of matrices that read the same rows, each with its bias if there is one."""

    def __init__(
        self, matrices: Sequence[PackedMatrix], biases: Sequence[np.ndarray | None], device: torch.device
    ) -> None:
        self._sizes, self._is_rounded = [matrix.rows for matrix in matrices], matrices[0].spec.bitwidth != 16
        if any((matrix.spec.bitwidth != 16) != self._is_rounded for matrix in matrices):
            raise ValueError("matrices of one product must read the same rows")
        shape = (sum(self._sizes), matrices[0].columns)
        self._weight = torch.empty(shape, dtype=torch.float32, device=device)
        for rows_of_matrix, matrix in zip(torch.split(self._weight, self._sizes), matrices, strict=True):
            unpack_into(rows_of_matrix, matrix)
        self._bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            whole = [
                np.zeros(size, np.float32) if bias is None else bias
                for size, bias in zip(self._sizes, biases, strict=True)
            ]
            self._bias = torch.from_numpy(np.concatenate(whole)).to(device)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Multiply rows, float32 [T, K]. Returns [T, N] for each matrix."""
        rows = round_activations(x) if self._is_rounded else x
        out = rows @ self._weight.T
        if self._bias is not None:
            out += self._bias
        return torch.split(out, self._sizes, dim=1)


def products_of(
    matrices: Sequence[PackedMatrix], biases: Sequence[np.ndarray | None], device: torch.device
) -> list[TorchLinear]:
    """Combine adjacent matrices that read the same rows into one product each, in order."""
    linears, start = list[TorchLinear](), 0
    for end in range(1, len(matrices) + 1):
        is_last = end == len(matrices)
        if is_last or (matrices[end].spec.bitwidth == 16) != (matrices[start].spec.bitwidth == 16):
            linears.append(TorchLinear(matrices[start:end], biases[start:end], device))
            start = end
    return linears


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * (x / sqrt(mean(x^2) + eps)) over the last dimension."""
    return weight * (x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps))


class TorchRotary:
    """Cosines and sines of a `RotaryTables` on a device, and the rotation."""

    def __init__(self, tables: RotaryTables, device: torch.device) -> None:
        self._rope = tables.rope
        self._cos, self._sin = torch.from_numpy(tables.cos).to(device), torch.from_numpy(tables.sin).to(device)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first features of heads [T, H, Dh]. Returns the same shape.

        positions: int64 [T].
        """
        half = self._rope.rotary_size // 2
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        if self._rope.interleaved:
            first, second = heads[..., 0 : 2 * half : 2], heads[..., 1 : 2 * half : 2]
        else:
            first, second = heads[..., :half], heads[..., half : 2 * half]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :]), dim=-1)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens that attention computes at once: all of one slot, or one token of each slot, in the order of rows.

    rows: rows of the pass, int64 [n].
    slots: a slice of adjacent slots, whose cache need not be copied, or any slots, int64 [n].

    end: positions up to the last one that a token sees.
    is_even: whether all tokens see the same number of positions.
    """

    rows: torch.Tensor
    slots: slice | torch.Tensor
    end: int
    is_even: bool = True


class PlacesOnDevice:
    """Slots and positions of a pass's tokens, uploaded to the device once for all layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: kernels.TokenPlaces | None = None
        self.slots = self.positions = torch.empty(0, dtype=torch.int64)
        self.parts: list[Part] = []

    def take(self, places: kernels.TokenPlaces) -> None:
        """Set the pass whose layers follow."""
        if places is self._places:
            return
        self._places = places
        self.slots, self.positions = self._upload(places.slots), self._upload(places.positions)
        known = np.unique(places.slots)
        if len(known) == len(places.slots):
            slots, positions = places.slots, places.positions
            first, end, is_even = int(slots[0]), int(positions.max()) + 1, len(set(positions.tolist())) == 1
            is_run = np.array_equal(slots, np.arange(first, first + len(slots)))
            where = slice(first, first + len(slots)) if is_run else self.slots
            self.parts = [Part(self._upload(np.arange(len(slots))), where, end, is_even)]
            return
        self.parts = []
        for slot in known.tolist():
            rows = np.flatnonzero(places.slots == slot)
            end = int(places.positions[rows].max()) + 1
            self.parts.append(Part(self._upload(rows), slice(slot, slot + 1), end))

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: PlacesOnDevice,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each token to the cache of its slot, like `kernels.attention`. Returns [T, H, Dv].

    query: [T, H, Dh].
    keys, values: [S, Hkv, C, Dh].
    window: sliding window in positions, or 0 for none.
    sinks: [H], or None.
    """
    out = torch.empty((*query.shape[:2], values.shape[3]), dtype=torch.float32, device=query.device)
    for tokens in places.parts:
        # As many queries at once as their scores, and copies of keys and values, fit in CHUNK_FLOATS.
        is_copied = isinstance(tokens.slots, torch.Tensor) or not tokens.is_even
        copied = keys.shape[1] * (keys.shape[3] + 2 * values.shape[3]) if is_copied else 0
        step = max(1, CHUNK_FLOATS // (tokens.end * (3 * query.shape[1] + copied)))
        for rows, slots in _chunks(tokens, step):
            queries = query[rows]
            is_one_slot = isinstance(slots, slice) and slots.stop == slots.start + 1
            queries = queries.unsqueeze(0) if is_one_slot else queries.unsqueeze(1)
            positions = places.positions[rows].view(queries.shape[:2])
            seen = _Seen(keys[slots, :, : tokens.end], values[slots, :, : tokens.end], positions, tokens.is_even)
            mixed = _mix(queries, seen, scale, window, sinks)
            out[rows] = mixed.reshape(len(rows), *out.shape[1:])
            del seen, mixed  # free them before the next ones are made
    return out


def _chunks(tokens: Part, step: int) -> Iterator[tuple[torch.Tensor, slice | torch.Tensor]]:
    """Yield the rows of a part, `step` at a time, with their slots."""
    slots = tokens.slots
    for first in range(0, len(tokens.rows), step):
        rows = tokens.rows[first : first + step]
        if isinstance(slots, torch.Tensor):
            yield rows, slots[first : first + step]
        elif slots.stop == slots.start + 1:
            yield rows, slots
        else:
            yield rows, slice(slots.start + first, slots.start + first + len(rows))


@dataclass(frozen=True, slots=True)
class _Seen:
    """Keys and values that some tokens of each sequence see.

    keys, values: [B, Hkv, E, Dh].
    positions: position of each token, [B, t].
    is_even: whether all sequences have E positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    is_even: bool


def _mix(query: torch.Tensor, seen: _Seen, scale: float, window: int, sinks: torch.Tensor | None) -> torch.Tensor:
    """Attend from some tokens of each sequence to its keys and values. Returns [B, t, H, Dv].

    Values after the end of a sequence are set to 0. An earlier sequence may have left NaN there, and a weight of 0 does
    not remove a NaN.
    query: [B, t, H, Dh].
    """
    batch, count, heads, size = query.shape
    keys, values, positions = seen.keys, seen.values, seen.positions
    groups, end = keys.shape[1], keys.shape[2]
    rows = query.view(batch, count, groups, -1, size).permute(0, 2, 3, 1, 4).reshape(batch, groups, -1, size)
    scores = (rows @ keys.transpose(-1, -2)).mul_(scale).view(batch, groups, -1, count, end)
    at = torch.arange(end, device=query.device)
    hidden = at > positions.unsqueeze(-1)
    if not seen.is_even:
        values = values.masked_fill(hidden.all(dim=1)[:, None, :, None], 0)
    if window:
        hidden |= at <= positions.unsqueeze(-1) - window
    scores.masked_fill_(hidden[:, None, None], -torch.inf)
    if sinks is None:
        shares = torch.softmax(scores, dim=-1)
    else:
        sink_scores = sinks.view(1, groups, -1, 1, 1)
        peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sink_scores)
        shares = scores.sub_(peak).exp_()
        shares = shares / (shares.sum(dim=-1, keepdim=True) + torch.exp(sink_scores - peak))
    mixed = shares.view(batch, groups, -1, end) @ values
    return mixed.view(batch, heads, count, -1).transpose(1, 2)


class TorchHeadAttention:
    """`attention.HeadAttention` on a device, without its norm and its sum."""

    def __init__(
        self,
        spec: AttentionSpec,
        weights: Weights,
        norm_eps: float,
        rotary: TorchRotary | None,
        places: PlacesOnDevice,
        device: torch.device,
    ) -> None:
        self._spec, self._norm_eps, self._rotary, self._places, self._device = spec, norm_eps, rotary, places, device
        names = ("query", "key", "value")
        self._inputs = products_of([weights[name] for name in names], [weights.get(f"{n}_bias") for n in names], device)
        self._output = TorchLinear([weights["output"]], [weights.get("output_bias")], device)
        gate = weights.get("output_gate")
        self._gate = None if gate is None else TorchLinear([gate], [None], device)
        vectors = ("query_norm", "key_norm", "sinks")
        self._vectors = {name: torch.from_numpy(weights[name]).to(device) for name in vectors if name in weights}

    def __call__(self, normed: np.ndarray, places: kernels.TokenPlaces, keys: Any, values: Any) -> np.ndarray:
        """Implement `torch_dense.Attention`.

        keys, values: tensors of this device.
        """
        spec, count, where = self._spec, len(normed), self._places
        where.take(places)
        x = torch.from_numpy(normed).to(self._device)
        flat = [rows for linear in self._inputs for rows in linear(x)]
        query, key, value = (rows.reshape(count, -1, spec.head_size) for rows in flat)
        if spec.query_key_norm != "none":
            query, key = self._normed("query_norm", query), self._normed("key_norm", key)
        if self._rotary is not None:
            query, key = self._rotary.rotate(query, where.positions), self._rotary.rotate(key, where.positions)
        keys[where.slots, :, where.positions] = key
        values[where.slots, :, where.positions] = value
        window, sinks = spec.sliding_window or 0, self._vectors.get("sinks")
        mixed = attend(query, keys, values, where, spec.score_scale, window, sinks)
        if self._gate is not None:
            (gates,) = self._gate(x)
            gates = torch.sigmoid(gates) if spec.output_gate == "sigmoid" else torch.nn.functional.softplus(gates)
            mixed = mixed * gates.reshape(count, spec.num_heads, -1)
        (out,) = self._output(mixed.reshape(count, -1))
        return np.asarray(out.cpu().numpy())

    def _normed(self, name: str, heads: torch.Tensor) -> torch.Tensor:
        """Normalise each head, or all heads of a token together."""
        rows = heads.flatten(1) if self._spec.query_key_norm == "full" else heads
        return rms_norm(rows, self._vectors[name], self._norm_eps).view(heads.shape)


class TorchLatentAttention:
    """`attention.LatentAttention` on a device, without its norm and its sum."""

    def __init__(
        self,
        spec: AttentionSpec,
        latent: LatentSpec,
        weights: Weights,
        rotary: TorchRotary,
        places: PlacesOnDevice,
        device: torch.device,
    ) -> None:
        self._spec, self._latent, self._rotary, self._places, self._device = spec, latent, rotary, places, device
        self._weights = weights
        names = ("query_down", "query", "latent_down", "output")
        self._linears = {name: TorchLinear([weights[name]], [None], device) for name in names if name in weights}
        norms = ("query_down_norm", "latent_norm")
        self._norms = {name: torch.from_numpy(weights[name]).to(device) for name in norms if name in weights}
        self._key_up = unpacked(weights["key_up"], device).view(spec.num_heads, latent.rank, latent.plain_size)
        self._value_up = unpacked(weights["value_up"], device).view(spec.num_heads, latent.value_size, latent.rank)

    def __call__(self, normed: np.ndarray, places: kernels.TokenPlaces, keys: Any, values: Any) -> np.ndarray:
        """Implement `torch_dense.Attention`.

        keys: a tensor of this device.
        values: the same tensor.
        """
        spec, rank, plain, where = self._spec, self._latent.rank, self._latent.plain_size, self._places
        where.take(places)
        x = torch.from_numpy(normed).to(self._device)
        heads = self._queries(x).reshape(len(x), spec.num_heads, spec.head_size)
        read = rounded_as_read(heads[..., :plain], self._weights["key_up"])
        query = torch.einsum("thp,hrp->thr", read, self._key_up)
        rotated = self._rotary.rotate(heads[..., plain:], where.positions)
        query = torch.cat((query, rotated), dim=-1)

        (shared,) = self._linears["latent_down"](x)
        vector = self._normed(shared[:, :rank], "latent_norm")
        rotated = self._rotary.rotate(shared[:, None, rank:], where.positions)
        keys[where.slots, :, where.positions] = torch.cat((vector.unsqueeze(1), rotated), dim=-1)

        mixed = attend(query, keys, keys[..., :rank], where, spec.score_scale)
        read = rounded_as_read(mixed, self._weights["value_up"])
        out = torch.einsum("thr,hvr->thv", read, self._value_up)
        (rows,) = self._linears["output"](out.flatten(1))
        return np.asarray(rows.cpu().numpy())

    def _queries(self, x: torch.Tensor) -> torch.Tensor:
        if self._latent.query_rank:
            (down,) = self._linears["query_down"](x)
            x = self._normed(down, "query_down_norm")
        (query,) = self._linears["query"](x)
        return query

    def _normed(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(rows, self._norms[name], self._latent.norm_eps)
