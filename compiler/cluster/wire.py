"""Values between the driver and workers: handles, matrices in plain form, the files of a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from ..quantization.quantized import QuantizedMatrix

Handle = Any
"""Names an object that the cluster holds; `Site.fetch` gives it. Equal handles name the same object."""
PlainMatrix = tuple[Any, ...]
"""A QuantizedMatrix on its way: its fields in order, arrays for tensors."""


def to_plain(matrix: QuantizedMatrix) -> PlainMatrix:
    """Fields of a matrix, each array with its own memory: a pickled view of a batch would carry all of the batch."""
    values = (getattr(matrix, item.name) for item in fields(matrix))
    return tuple(value.contiguous().numpy().copy() if isinstance(value, torch.Tensor) else value for value in values)


def from_plain(values: PlainMatrix) -> QuantizedMatrix:
    """The inverse of `to_plain`."""
    fields_again: list[Any] = [torch.tensor(value) if isinstance(value, np.ndarray) else value for value in values]
    return QuantizedMatrix(*fields_again)


@dataclass(frozen=True, slots=True)
class BundleFiles:
    """An unpublished bundle on its way to workers.

    digest: name of the bundle.
    files: file name -> handles of its pieces, in order.
    share: share of a node's memory for the runtime on it. The runtime then stays open until it is closed. 0: the free
        memory, until another bundle is needed.
    """

    digest: str
    files: Mapping[str, Sequence[Handle]]
    share: float = 0.0
