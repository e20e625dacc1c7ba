"""Experts on a torch device. They stay packed in its memory and are unpacked for each use; products are float32.

`cuda` copies through pinned buffers on its own stream, while it computes.
`torch-cpu` runs the same code on torch's CPU device. It serves only to test the code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from moec.manifests.quant import UNIT_ALIGNMENT_BYTES, QuantSpec, round_up

from .. import kernels
from ..kernels.packed_matrix import PackedMatrix
from ..kernels.reference import SWIGLU_SLOPE
from .device import COPY_SLOTS
from .image import expert_bytes, write_image
from .torch_weights import round_activations, unpack


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A packed matrix in an expert's image: its first and last byte, its shape and format."""

    start: int
    end: int
    rows: int
    columns: int
    spec: QuantSpec


@dataclass(frozen=True, slots=True)
class _Form:
    """Data that a device needs to compute an expert, apart from its bytes.

    gate: None without one.
    biases: first and last byte of each in the image.
    """

    gate: _Matrix | None
    up: _Matrix
    down: _Matrix
    biases: tuple[tuple[int, int], ...]
    activation: str
    limit: float


def _form(expert: kernels.Expert) -> _Form:
    at, matrices = 0, list[_Matrix | None]()
    for matrix in (expert.gate, expert.up, expert.down):
        matrices.append(None if matrix is None else _place(matrix, at))
        at = at if matrix is None else round_up(at + matrix.data.nbytes, UNIT_ALIGNMENT_BYTES)
    biases = []
    for bias in expert.biases:
        biases.append((at, at + bias.nbytes))
        at = round_up(at + bias.nbytes, UNIT_ALIGNMENT_BYTES)
    gate, up, down = matrices
    if up is None or down is None:
        raise ValueError("an expert has up and down")
    return _Form(gate, up, down, tuple(biases), expert.activation, expert.limit)


def _place(matrix: PackedMatrix, at: int) -> _Matrix:
    return _Matrix(at, at + matrix.data.nbytes, matrix.rows, matrix.columns, matrix.spec)


@dataclass(slots=True, eq=False)
class TorchExpert:
    """An expert on the device.

    slot: copy slot, None for a resident.
    arrived: event at the end of its copy, on cuda.
    """

    image: torch.Tensor
    form: _Form
    slot: int | None = None
    arrived: torch.cuda.Event | None = None


class TorchDevice:
    """A device of torch.

    resident_bytes: size of the memory for residents.
    copy_bytes: size of the largest copy; there are COPY_SLOTS buffers of this size.
    Raises torch's own errors if the device has less memory.
    """

    host_bytes = 0

    def __init__(self, name: str, device: torch.device, resident_bytes: int, copy_bytes: int) -> None:
        self.name, self._device = name, device
        self._is_cuda = self.counts_all = device.type == "cuda"
        self._arena = torch.empty(resident_bytes, dtype=torch.uint8, device=device)
        self._taken = 0
        self._slots = [torch.empty(copy_bytes, dtype=torch.uint8, device=device) for _ in range(COPY_SLOTS)]
        # On the CPU a copy is complete as soon as it is written.
        self._staging = [
            torch.empty(copy_bytes, dtype=torch.uint8, pin_memory=True) if self._is_cuda else slot
            for slot in self._slots
        ]
        self._copies = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._done: list[torch.cuda.Event | None] = [None] * COPY_SLOTS
        self._next_slot = 0
        self._rows = torch.empty(0)
        self._rounded: torch.Tensor | None = None
        self._results: list[tuple[np.ndarray, np.ndarray, torch.Tensor]] = []

    @property
    def used_bytes(self) -> int:
        """Largest amount of memory taken: on cuda torch's peak, on the CPU residents and copy slots. Bytes."""
        if self._is_cuda:
            return int(torch.cuda.max_memory_allocated(self._device))
        return self._arena.nbytes + sum(slot.nbytes for slot in self._slots)

    def keep(self, expert: kernels.Expert) -> TorchExpert:
        """Upload an expert that stays on the device. Raises ValueError if the memory for residents is full."""
        size = expert_bytes(expert)
        free_bytes = self._arena.nbytes - self._taken
        if size > free_bytes:
            raise ValueError(f"target of an expert: expected {size} bytes, found {free_bytes} free")
        image = self._arena[self._taken : self._taken + size]
        if self._is_cuda:
            staged = torch.empty(size, dtype=torch.uint8)
            write_image(expert, staged.numpy())
            image.copy_(staged)
        else:
            write_image(expert, image.numpy())
        self._taken += size
        return TorchExpert(image, _form(expert))

    def copy(self, expert: kernels.Expert) -> TorchExpert:
        """Begin to copy an expert for one `run`. Waits while its slot is in use."""
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % COPY_SLOTS
        done = self._done[slot]
        if done is not None:
            done.synchronize()
        size = write_image(expert, self._staging[slot].numpy())
        image = self._slots[slot][:size]
        arrived = None
        if self._copies is not None:
            with torch.cuda.stream(self._copies):
                image.copy_(self._staging[slot][:size], non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(self._copies)
            self._done[slot] = arrived  # `run` replaces it by an event at the end of its computation
        return TorchExpert(image, _form(expert), slot, arrived)

    def drop(self, expert: TorchExpert) -> None:
        """Do nothing: its slot is free when the copy has arrived."""

    def begin(self, hidden_states: np.ndarray) -> None:
        """Set the rows of a layer, float32 [T, D]. Drops results that were not collected."""
        self._results = []
        self._rows = torch.from_numpy(hidden_states).to(self._device)
        self._rounded = None

    def run(self, expert: TorchExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        """Begin to compute an expert.

        tokens, ranks: where its results go, int32 [n] each.
        """
        if expert.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(expert.arrived)
        at = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
        out = self._compute(expert, at)
        if expert.slot is not None and self._is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._device))
            self._done[expert.slot] = done
        self._results.append((tokens, ranks, out))

    def _compute(self, expert: TorchExpert, at: torch.Tensor) -> torch.Tensor:
        """Return down(activation(gate x, up x)), each product with its bias, [n, D].

        at: rows of the layer, int64 [n].
        """
        form = expert.form
        products = []
        biases = [expert.image[start:end].view(torch.float32) for start, end in form.biases]
        for number, matrix in enumerate((form.gate or form.up, form.up)):
            if form.gate is None and number == 0:  # relu uses up alone
                continue
            product = self._inputs(matrix).index_select(0, at) @ self._weights(expert, matrix).T
            products.append(product + biases[number] if biases else product)
        hidden = _activate(products, form.activation, form.limit)
        if form.down.spec.bitwidth != 16:
            hidden = round_activations(hidden)
        out = hidden @ self._weights(expert, form.down).T
        return out + biases[2] if biases else out

    def _inputs(self, matrix: _Matrix) -> torch.Tensor:
        """Return the rows of the layer as a matrix reads them. They are rounded once for all experts."""
        if matrix.spec.bitwidth == 16:
            return self._rows
        if self._rounded is None:
            self._rounded = round_activations(self._rows)
        return self._rounded

    def _weights(self, expert: TorchExpert, matrix: _Matrix) -> torch.Tensor:
        return unpack(expert.image[matrix.start : matrix.end], matrix.rows, matrix.columns, matrix.spec)

    def collect(self, parts: np.ndarray) -> None:
        """Wait for the results and write them into parts, float32 [T, K, D]."""
        if not self._results:
            return
        rows = torch.cat([out for _, _, out in self._results]).cpu().numpy()
        tokens = np.concatenate([tokens for tokens, _, _ in self._results])
        ranks = np.concatenate([ranks for _, ranks, _ in self._results])
        parts[tokens, ranks] = rows
        self._results = []

    def synchronize(self) -> None:
        """Wait for all work that was begun."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free the memory."""
        self.synchronize()
        self._arena = self._rows = torch.empty(0)
        self._rounded = None
        self._slots, self._staging, self._results = [], [], []
        if self._is_cuda:
            torch.cuda.empty_cache()


def _activate(products: list[torch.Tensor], activation: str, limit: float) -> torch.Tensor:
    """Return the input of down; see `kernels.reference.gated`.

    products: of gate and up, or of up alone.
    """
    if activation == "relu":
        return products[-1].clamp_min(0)
    gate, up = products
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    g, u = gate.clamp_max(limit), up.clamp(-limit, limit)
    return (u + 1) * (g / (1 + torch.exp(-float(SWIGLU_SLOPE) * g)))
