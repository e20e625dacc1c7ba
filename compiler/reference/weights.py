"""Weights of the loaded model under canonical names. They can be exchanged for quantized ones and restored exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, UnitKey

from .expert_module import projection_of
from .network import Network
from .routers import RouterMasks

WeightName = UnitKey | str
"""One projection of one expert, or the canonical name of a dense weight (manifests.model, dense_shapes)."""


def weight_view(network: Network, name: WeightName) -> Tensor:
    """Return the memory that a network computes with, shaped like TensorSource.view. Raises KeyError."""
    return _unit(network, name) if isinstance(name, UnitKey) else _dense(network, name)


def _unit(network: Network, key: UnitKey) -> Tensor:
    module = network.experts[key.layer]
    if key.projection not in PROJECTIONS or not 0 <= key.expert < module.num_experts:
        raise KeyError(key)
    return projection_of(module, key.expert, key.projection)


def _dense(network: Network, name: str) -> Tensor:
    parameter, source = network.parameters[name]
    return source.view(network.model.get_parameter(parameter).data)


class WeightStore:
    """The weights of a network by name. Originals of changed weights are kept in 16 bits, so `restore` is exact.

    A unit without columns stands for a pruned expert. The router of its layer then chooses among the others.
    """

    def __init__(self, network: Network, dtype: torch.dtype) -> None:
        """dtype: the 16-bit type that holds every weight of the checkpoint."""
        self._network, self._dtype = network, dtype
        self._originals: dict[WeightName, Tensor] = {}
        self._changed: set[WeightName] = set()
        self._masks, self._left_out = RouterMasks(network), frozenset[UnitKey]()

    def original(self, name: WeightName) -> Tensor:
        """Return the checkpoint's own weight as a float32 copy. Raises KeyError for an unknown name."""
        if name in self._changed:
            return self._matrix(name, self._originals[name].float())
        return self._matrix(name, self._view(name)).clone()

    def set(self, name: WeightName, weight: Tensor) -> None:
        """Compute with `weight` from now on.

        Raises KeyError for an unknown name.
        Raises ValueError if the shape differs.
        """
        view = self._view(name)
        shape = self._matrix(name, view).shape
        left_out = {name} if isinstance(name, UnitKey) and weight.shape == (shape[0], 0) else set()
        if not left_out and weight.shape != shape:
            raise ValueError(f"weight {name} has shape {tuple(shape)}, found {tuple(weight.shape)}")
        if name not in self._originals:
            self._originals[name] = view.to(self._dtype)
        self._leave_out(self._left_out - {name} | left_out)
        if not left_out:
            view.copy_(weight.reshape(view.shape))
        self._changed.add(name)

    def restore(self) -> None:
        """Restore every changed weight."""
        self._leave_out(frozenset())
        for name in self._changed:
            self._view(name).copy_(self._originals[name])
        self._changed.clear()

    @contextmanager
    def exchanged(self, weights: Mapping[WeightName, Tensor]) -> Iterator[None]:
        """Compute with `weights` inside the block. Afterwards, also after an error, restore the previous weights."""
        before = {name: self._view(name).clone() for name in weights if name in self._changed}
        left_out = self._left_out
        try:
            for name, weight in weights.items():
                self.set(name, weight)
            yield
        finally:
            self._leave_out(left_out)
            for name in self._changed.intersection(weights):
                if name in before:
                    self._view(name).copy_(before[name])
                else:
                    self._view(name).copy_(self._originals[name])
                    self._changed.discard(name)

    def _leave_out(self, units: frozenset[UnitKey]) -> None:
        """Leave out exactly these units, which form whole experts."""
        for layer in {unit.layer for unit in units ^ self._left_out}:
            router, _ = self._network.parameters[f"layers.{layer}.router"]
            self._masks.leave_out(router, {unit.expert for unit in units if unit.layer == layer})
        self._left_out = units

    def _matrix(self, name: WeightName, view: Tensor) -> Tensor:
        return view if isinstance(name, UnitKey) else self._network.parameters[name][1].matrix(view)

    def _view(self, name: WeightName) -> Tensor:
        return weight_view(self._network, name)
