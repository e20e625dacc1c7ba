"""Weights of the loaded model under this project's names: exchanged for quantized ones, and put back exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from moec.manifests.model import PROJECTIONS, UnitKey

from .expert_module import projection_of
from .reference_network import Network

WeightName = UnitKey | str
"""One projection of one expert, or the canonical name of a dense weight (manifests.model, dense_shapes)."""


def weight_view(network: Network, name: WeightName) -> Tensor:
    """The memory that a network computes with under this name, as TensorSource.view has it. Raises KeyError."""
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
    """The weights of a network by name. Changed ones are remembered in 16 bits, so `restore` is exact."""

    def __init__(self, network: Network, dtype: torch.dtype) -> None:
        """dtype: the 16-bit type that holds every weight of the checkpoint."""
        self._network, self._dtype = network, dtype
        self._originals: dict[WeightName, Tensor] = {}
        self._changed: set[WeightName] = set()

    def original(self, name: WeightName) -> Tensor:
        """The checkpoint's own weight, a float32 copy. Raises KeyError for a name the model does not have."""
        if name in self._changed:
            return self._matrix(name, self._originals[name].float())
        return self._matrix(name, self._view(name)).clone()

    def set(self, name: WeightName, weight: Tensor) -> None:
        """Compute with `weight` from now on. Raises KeyError, or ValueError if the shape differs."""
        view = self._view(name)
        shape = self._matrix(name, view).shape
        if weight.shape != shape:
            raise ValueError(f"weight {name} has shape {tuple(shape)}, found {tuple(weight.shape)}")
        if name not in self._originals:
            self._originals[name] = view.to(self._dtype)
        view.copy_(weight.reshape(view.shape))
        self._changed.add(name)

    def restore(self) -> None:
        """Put back every changed weight."""
        for name in self._changed:
            self._view(name).copy_(self._originals[name])
        self._changed.clear()

    @contextmanager
    def exchanged(self, weights: Mapping[WeightName, Tensor]) -> Iterator[None]:
        """Compute with `weights` inside the block; afterwards with what was there before, also after an error."""
        before = {name: self._view(name).clone() for name in weights if name in self._changed}
        try:
            for name, weight in weights.items():
                self.set(name, weight)
            yield
        finally:
            for name in self._changed.intersection(weights):
                if name in before:
                    self._view(name).copy_(before[name])
                else:
                    self._view(name).copy_(self._originals[name])
                    self._changed.discard(name)

    def _matrix(self, name: WeightName, view: Tensor) -> Tensor:
        return view if isinstance(name, UnitKey) else self._network.parameters[name][1].matrix(view)

    def _view(self, name: WeightName) -> Tensor:
        return weight_view(self._network, name)
