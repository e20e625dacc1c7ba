"""Experts of a layer in numpy: their choice, their outputs, and the weighted sum of the outputs.

Shape letters: T tokens, K ranks, D hidden, F expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..packed_matrix import Floats, Int32s, PackedMatrix, check_array, check_indices, check_shape, require
from .products import products_of

ACTIVATIONS = ("silu", "clamped_swiglu", "relu", "gelu")
SWIGLU_SLOPE = np.float32(1.702)
_GELU_SLOPE, _GELU_CUBE = np.float32(2 * 0.79788456), np.float32(2 * 0.79788456 * 0.044715)
"""Twice sqrt(2 / pi), and this times the factor of the cube."""


class Expert:
    """The projections of one expert: down(activation(gate x) * (up x)), each product plus its bias.

    gate, up: F x D. gate is None with relu.
    down: D x F.
    activation: one of ACTIVATIONS, see `gated`. relu: down(max(up x, 0)), without biases.
    limit: of clamped_swiglu.
    biases: none, or float32 [F], [F], [D].
    reads_bfloats: bfloat16 matrices read activations rounded to bfloat16, see `bfloat_product`.
    Raises ValueError if the shapes do not fit or the activation is unknown.
    """

    __slots__ = ("activation", "biases", "down", "gate", "limit", "reads_bfloats", "up")

    def __init__(
        self,
        gate: PackedMatrix | None,
        up: PackedMatrix,
        down: PackedMatrix,
        activation: str = "silu",
        limit: float = 0.0,
        biases: Sequence[Floats] = (),
        reads_bfloats: bool = False,
    ) -> None:
        is_right = (gate is None) == (activation == "relu") and not (gate is None and biases)
        require(is_right, "gate: expected a matrix, or None and no biases with the activation relu")
        first = up if gate is None else gate
        fits = (first.rows, first.columns) == (up.rows, up.columns) == (down.columns, down.rows)
        shapes = ", ".join(f"{matrix.rows} x {matrix.columns}" for matrix in (first, up, down))
        require(fits, f"gate, up and down: expected F x D, F x D and D x F, found {shapes}")
        require(activation in ACTIVATIONS, f"activation: expected one of {ACTIVATIONS}, found `{activation}`")
        self.gate = gate
        self.up = up
        self.down = down
        require(len(biases) in (0, 3), f"biases: expected none or three, found {len(biases)}")
        for bias, matrix in zip(biases, (first, up, down), strict=False):
            check_array(bias, "bias", np.float32, 1)
            check_shape(bias, "bias", (matrix.rows,))
        self.activation = activation
        self.limit = limit
        self.biases = tuple(biases)
        self.reads_bfloats = reads_bfloats
        self._bind()

    def _bind(self) -> None:
        """Make the form that other kernels keep; numpy needs none."""


def silu(x: Floats) -> Floats:
    """Return x / (1 + exp(-x)), float32; never NaN for finite x."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.divide(x, np.float32(1) + np.exp(-x), dtype=np.float32))


def gated(gate: Floats, up: Floats, activation: str, limit: float) -> Floats:
    """Return the input of the down projection.

    silu: silu(gate) * up. gelu: GELU in its tanh form instead, x / (1 + exp(-2 z)) with z = sqrt(2 / pi) (x + 0.044715
        x^3).
    relu: max(up, 0), without a gate.
    clamped_swiglu: (u + 1) g / (1 + exp(-1.702 g)), g = min(gate, limit), u = up within +-limit.
    Source: gpt-oss model card, section 2.
    """
    if activation == "silu":
        return silu(gate) * up
    if activation == "gelu":
        with np.errstate(over="ignore"):
            slope = np.exp(-gate * (_GELU_SLOPE + _GELU_CUBE * gate * gate))
        return np.asarray(gate / (np.float32(1) + slope) * up, np.float32)
    if activation == "relu":
        return np.asarray(np.maximum(up, np.float32(0)), np.float32)
    bound = np.float32(limit)
    g, u = np.minimum(gate, bound), np.clip(up, -bound, bound)
    with np.errstate(over="ignore"):
        return np.asarray((u + np.float32(1)) * (g / (np.float32(1) + np.exp(-SWIGLU_SLOPE * g))), np.float32)


def expert_ffn(expert: Expert, x: Floats, tokens: Int32s, ranks: Int32s, out: Floats) -> None:
    """Compute one expert: out[tokens[i], ranks[i]] = down(activation(gate x[tokens[i]]) * (up x[tokens[i]])).

    x: [T, D].
    tokens, ranks: int32[n], no pair twice.
    out: [T, K, D], written at these places only.
    Raises ValueError.
    """
    check_array(x, "x", np.float32, 2)
    check_array(tokens, "tokens", np.int32, 1)
    check_array(ranks, "ranks", np.int32, 1)
    check_array(out, "out", np.float32, 3)
    check_shape(x, "x", (x.shape[0], expert.up.columns))
    check_shape(ranks, "ranks", tokens.shape)
    check_shape(out, "out", (x.shape[0], out.shape[1], expert.down.rows))
    check_indices(tokens, "tokens", x.shape[0])
    check_indices(ranks, "ranks", out.shape[1])
    gate, up = (
        products_of(matrix, x[tokens], expert.reads_bfloats) for matrix in (expert.gate or expert.up, expert.up)
    )
    if expert.biases:
        gate, up = gate + expert.biases[0], up + expert.biases[1]
    hidden = gated(gate, up, expert.activation, expert.limit)
    found = products_of(expert.down, hidden, expert.reads_bfloats)
    out[tokens, ranks] = found + expert.biases[2] if expert.biases else found


def experts_of_token(experts: Sequence[Expert], x: Floats, ranks: Int32s, out: Floats) -> None:
    """Compute several experts for one token: out[0, ranks[i]] = experts[i](x[0]), as `expert_ffn` one by one.

    x: [1, D].
    ranks: int32[n], none twice.
    out: [1, K, D], written at these ranks only.
    Raises ValueError, also for experts of different sizes.
    """
    check_array(ranks, "ranks", np.int32, 1)
    check_shape(ranks, "ranks", (len(experts),))
    sizes = {(expert.up.rows, expert.up.columns) for expert in experts}
    require(len(sizes) <= 1, "experts: expected one size for all")
    if experts:
        check_array(x, "x", np.float32, 2)
        check_shape(x, "x", (1, experts[0].up.columns))
    for expert, rank in zip(experts, ranks, strict=True):
        expert_ffn(expert, x, np.zeros(1, np.int32), np.array([rank], np.int32), out)


def combine(parts: Floats, weights: Floats, out: Floats) -> None:
    """Add the parts of each token: out[t] = sum over ranks, in order, of weights[t, k] * parts[t, k].

    parts: [T, K, D].
    weights: [T, K].
    out: [T, D], written.
    Raises ValueError.
    """
    check_array(parts, "parts", np.float32, 3)
    check_array(weights, "weights", np.float32, 2)
    check_array(out, "out", np.float32, 2)
    check_shape(weights, "weights", parts.shape[:2])
    check_shape(out, "out", (parts.shape[0], parts.shape[2]))
    total = np.zeros_like(out)
    for rank in range(parts.shape[1]):
        total += weights[:, rank, None] * parts[:, rank]
    out[:] = total


def route(logits: Floats, top_k: int, renormalize: bool) -> tuple[Int32s, Floats]:
    """Choose experts: softmax over all experts, then the top_k of each token, best first.

    Of equal logits the lowest expert wins, in every kernel.
    logits: [T, E].
    renormalize: make the weights of each token sum to 1.
    Returns experts int32[T, K] and weights float32[T, K].
    Raises ValueError.
    """
    check_array(logits, "logits", np.float32, 2)
    require(0 < top_k <= logits.shape[1], f"top_k: expected 1 to {logits.shape[1]}, found {top_k}")
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(shares, experts, axis=1)
    if renormalize:
        weights /= weights.sum(axis=1, keepdims=True)
    return experts.astype(np.int32), weights
