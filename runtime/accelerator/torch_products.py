"""The products of one expert on a torch device, without Triton: unpack each matrix, then multiply."""

from __future__ import annotations

import torch

from ..kernels.reference import SWIGLU_SLOPE
from .image import ExpertForm, MatrixForm
from .torch_weights import round_activations, unpack


class LayerRows:
    """Rows of a layer, float32 [T, D], and their rounded form, which is made once for all experts."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.plain = rows
        self._rounded: torch.Tensor | None = None

    def read_by(self, matrix: MatrixForm) -> torch.Tensor:
        """Return the rows as a matrix reads them."""
        if not matrix.reads_rounded:
            return self.plain
        if self._rounded is None:
            self._rounded = round_activations(self.plain)
        return self._rounded


def compute_expert(image: torch.Tensor, form: ExpertForm, rows: LayerRows, at: torch.Tensor) -> torch.Tensor:
    """Return down(activation(gate x, up x)), each product with its bias, float32 [n, D].

    image: bytes of the expert, uint8 [n].
    at: rows of the layer, int64 [n].
    """
    products = []
    biases = [image[start:end].view(torch.float32) for start, end in form.biases]
    for number, matrix in enumerate((form.gate or form.up, form.up)):
        if form.gate is None and number == 0:  # relu uses up alone
            continue
        product = rows.read_by(matrix).index_select(0, at) @ _weights(image, matrix).T
        products.append(product + biases[number] if biases else product)
    hidden = _activate(products, form.activation, form.limit)
    if form.down.reads_rounded:
        hidden = round_activations(hidden)
    out = hidden @ _weights(image, form.down).T
    return out + biases[2] if biases else out


def _weights(image: torch.Tensor, matrix: MatrixForm) -> torch.Tensor:
    return unpack(image[matrix.start : matrix.end], matrix.rows, matrix.columns, matrix.spec)


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
