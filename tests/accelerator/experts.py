"""Experts computed by numpy and on a torch device, at given places."""

from __future__ import annotations

import numpy as np
import torch

from moec.runtime import kernels
from moec.runtime.accelerator.image import expert_bytes
from moec.runtime.accelerator.torch_device import TorchDevice
from moec.runtime.kernels import reference

TOKENS, RANKS = np.array([8, 0, 3, 4], np.int32), np.array([0, 1, 1, 0], np.int32)


def computed_by_numpy(expert: kernels.Expert, x: np.ndarray) -> tuple[np.ndarray, float]:
    """Return results at TOKENS and RANKS, float32 [9, 2, D], and the allowed difference of other results.

    Sums differ in their last bits: 1e-5 of the largest result. This can move an input of `down` to the next 8-bit code.
    Then a step times a weight is added. One such input in a row is allowed.
    """
    out = np.zeros((9, 2, expert.down.rows), np.float32)
    reference.expert_ffn(expert, x, TOKENS, RANKS, out)
    rounding = 1e-5 * float(np.abs(out).max())
    if expert.down.spec.bitwidth == 16:
        return out, rounding
    products = [np.empty((9, expert.up.rows), np.float32) for _ in range(2)]
    for matrix, product, bias in zip(
        (expert.gate or expert.up, expert.up), products, (*expert.biases, 0, 0), strict=False
    ):
        reference.linear(matrix, x, product)
        np.add(product, bias, out=product)
    middle = reference.gated(*products, expert.activation, expert.limit)
    down = np.empty((expert.down.rows, expert.down.columns), np.float32)
    reference.dequantize_rows(expert.down, np.arange(expert.down.rows), down)
    return out, rounding + float(np.abs(middle).max()) / 127 * float(np.abs(down).max())


def opened(device: torch.device, experts: list[kernels.Expert], kept: int, has_triton: bool = False) -> TorchDevice:
    """Return a device with memory for so many of the experts, and for copies of the largest."""
    sizes = [expert_bytes(expert) for expert in experts]
    return TorchDevice("test", device, sum(sizes[:kept]), max(sizes), has_triton)


def launched_together(chosen: TorchDevice, experts: list[kernels.Expert], x: np.ndarray) -> np.ndarray:
    """Return the results of copied experts in one layer, float32 [9, experts, D]."""
    together = np.zeros((9, len(experts), experts[0].down.rows), np.float32)
    chosen.begin(x)
    for rank, expert in enumerate(experts):
        chosen.run(chosen.copy(expert), TOKENS, np.full(4, rank, np.int32))
    chosen.launch()
    chosen.collect(together)
    return together


def computed_by(device: TorchDevice, expert: kernels.Expert, x: np.ndarray, is_kept: bool) -> np.ndarray:
    parts = np.zeros((9, 2, expert.down.rows), np.float32)
    on_device = device.keep(expert) if is_kept else device.copy(expert)
    device.begin(x)
    device.run(on_device, TOKENS, RANKS)
    device.collect(parts)
    return parts
