"""Attention, keys and values, and head of a model on a torch device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from moec.manifests.model import ModelSpec

from .. import kernels
from ..kernels.packed_matrix import PackedMatrix
from ..layers.attention import DensePart, RotaryTables, layer_weights
from ..layers.kv_cache import KVCache
from ..layers.norms import Norm, stream_norms
from .dense import HEAD_ROWS, DenseOnDevice
from .torch_attention import PlacesOnDevice, TorchHeadAttention, TorchLatentAttention, TorchLinear, TorchRotary


class Attention(Protocol):
    """Attention of one layer, without the norm before it and the sum after it."""

    def __call__(self, normed: np.ndarray, places: kernels.TokenPlaces, keys: Any, values: Any) -> np.ndarray:
        """Compute attention like an MixerBlock, but return the result, [T, D], instead of adding it.

        normed: [T, D].
        """
        ...


@dataclass(frozen=True, slots=True)
class NormedAttention:
    """Norms, attention and sum of one layer, for an attention that has neither norms nor sum."""

    norm: Norm
    attention: Attention
    residual_scale: float
    after: Norm | None

    def __call__(self, hidden: np.ndarray, places: kernels.TokenPlaces, keys: Any, values: Any) -> None:
        out = self.attention(self.norm(hidden), places, keys, values)
        out = out if self.after is None else self.after(out)
        out *= np.float32(self.residual_scale)
        hidden += out


class TorchKVCache(KVCache):
    """Keys and values on a device, for models without an encoder. All positions are held."""

    frees_windows = False

    def __init__(self, model: ModelSpec, slots: int, context: int, device: torch.device) -> None:
        self._device = device
        super().__init__(model, slots, context)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Allocate device memory."""
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    def copied(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of a part."""
        return values.clone()


class TorchHead:
    """The product of the head on a device."""

    def __init__(self, matrix: PackedMatrix, device: torch.device) -> None:
        self._linear, self._rows, self._device = TorchLinear([matrix], [None], device), matrix.rows, device

    def __call__(self, normed: np.ndarray) -> np.ndarray:
        """Multiply float32 [n, D], some rows at a time. Returns logits, float32 [n, V]."""
        out = np.empty((len(normed), self._rows), np.float32)
        for first in range(0, len(normed), HEAD_ROWS):
            rows = torch.from_numpy(normed[first : first + HEAD_ROWS]).to(self._device)
            out[first : first + HEAD_ROWS] = self._linear(rows)[0].cpu().numpy()
        return out


def give_back(device: torch.device) -> None:
    """Return to the device the memory that torch caches and no tensor uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def dense_on(
    device: torch.device, model: ModelSpec, dense: Mapping[str, Any], slots: int, context: int, size_bytes: int
) -> DenseOnDevice:
    """Bring attention and head of a model to a device, and allocate keys and values there.

    dense: all dense weights by name.
    size_bytes: see DenseOnDevice.
    Raises torch's own errors if the device is full.
    """
    ropes = {attention.rope for attention in model.attentions if attention.rope is not None}
    rotary = {rope: TorchRotary(RotaryTables(rope, context), device) for rope in ropes}
    places = PlacesOnDevice(device)

    def attention(at: int) -> Attention:
        spec, weights = model.attentions[at], layer_weights(dense, at)
        tables = None if spec.rope is None else rotary[spec.rope]
        if spec.latent is None:
            return TorchHeadAttention(spec, weights, model.norm_eps, tables, places, device)
        if tables is None:
            raise ValueError("latent attention needs a rotary embedding")
        return TorchLatentAttention(spec, spec.latent, weights, tables, places, device)

    norms = stream_norms(model, dense)
    blocks = [
        NormedAttention(
            norms[f"layers.{at}.attention_norm"],
            attention(at),
            model.residual_scale,
            norms.get(f"layers.{at}.attention_after_norm"),
        )
        for at in range(model.num_layers)
    ]
    head = TorchHead(dense[model.head_name], device)
    return DenseOnDevice(DensePart(blocks, head), TorchKVCache(model, slots, context, device), size_bytes)
