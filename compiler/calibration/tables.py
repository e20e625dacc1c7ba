"""`tables.safetensors`: the counts of calibration in the form that the runtime's prefetcher and cache read.

Shapes: L layers, E experts of the largest layer, K top-k, N paths, P successors of all paths, Q quantiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moec.manifests.model import ModelSpec
from moec.manifests.path_tables import PAIR_COLUMNS, set_columns
from moec.manifests.safetensors_header import build_header

from .collect import ActivationStatistics

# In file order. The widest items come first, so that every tensor starts at a multiple of its item size.
_TENSORS = {
    "path.offsets": ("path_offsets", "I64", "<i8"),
    "popularity": ("popularity", "U32", "<u4"),
    "transitions": ("transitions", "U32", "<u4"),
    "path.keys": ("path_keys", "I32", "<i4"),
    "path.counts": ("path_counts", "U32", "<u4"),
    "router_score_quantiles": ("router_quantiles", "F32", "<f4"),
    "path.experts": ("path_experts", "U16", "<u2"),
}


@dataclass(frozen=True, eq=False, slots=True)
class Tables:
    """The arrays of the file.

    popularity: uint32 [L, E].
    transitions: uint32 [L-1, E, E].
    path_keys: int32 [N, 3], or [N, 1 + 2K] in the exact-set form; sorted.
    path_offsets: int64 [N+1], start of each key in `path_experts` and `path_counts`.
    path_experts: uint16 [P].
    path_counts: uint32 [P].
    router_quantiles: float32 [L, Q].
    """

    popularity: np.ndarray
    transitions: np.ndarray
    path_keys: np.ndarray
    path_offsets: np.ndarray
    path_experts: np.ndarray
    path_counts: np.ndarray
    router_quantiles: np.ndarray

    @property
    def has_path_sets(self) -> bool:
        """True if the keys of the paths are exact sets of experts."""
        return bool(self.path_keys.shape[1] != PAIR_COLUMNS)

    @classmethod
    def empty(cls, model: ModelSpec) -> Tables:
        """Return tables with zero counts and no paths, for a compile without data."""
        layers, experts = model.num_layers, max(layer.experts.count for layer in model.layers)
        return cls(
            np.zeros((layers, experts), np.uint32),
            np.zeros((layers - 1, experts, experts), np.uint32),
            np.zeros((0, PAIR_COLUMNS), np.int32),
            np.zeros(1, np.int64),
            np.zeros(0, np.uint16),
            np.zeros(0, np.uint32),
            np.zeros((layers, 0), np.float32),
        )

    @classmethod
    def of(cls, statistics: ActivationStatistics) -> Tables:
        """Return the tables of activation statistics."""
        return cls(**{attribute: getattr(statistics, attribute) for attribute, _, _ in _TENSORS.values()})

    def check(self, model: ModelSpec) -> None:
        """Raise ValueError if types or shapes contradict the model or each other."""
        layers, experts = model.num_layers, max(layer.experts.count for layer in model.layers)
        paths, successors = len(self.path_keys), len(self.path_experts)
        shapes: dict[str, tuple[int, ...]] = {
            "popularity": (layers, experts),
            "transitions": (layers - 1, experts, experts),
            "path_keys": (paths, set_columns(model) if self.has_path_sets else PAIR_COLUMNS),
            "path_offsets": (paths + 1,),
            "path_experts": (successors,),
            "path_counts": (successors,),
            "router_quantiles": (layers, self.router_quantiles.shape[-1]),
        }
        for attribute, _, dtype in _TENSORS.values():
            array = getattr(self, attribute)
            if array.dtype != np.dtype(dtype) or array.shape != shapes[attribute]:
                raise ValueError(
                    f"{attribute}: expected {np.dtype(dtype).name} {shapes[attribute]}, "
                    f"found {array.dtype.name} {array.shape}"
                )
        if self.path_offsets[0] != 0 or self.path_offsets[-1] != successors or np.any(np.diff(self.path_offsets) < 0):
            raise ValueError("path_offsets: expected a rising sequence from 0 to the number of successors")


def encode_tables(tables: Tables) -> bytes:
    """Return the bytes of `tables.safetensors`. Data starts at a multiple of 4096.

    Source: docs/format.md, Tables.
    """
    arrays = {name: getattr(tables, attribute) for name, (attribute, _, _) in _TENSORS.items()}
    header = build_header({name: (_TENSORS[name][1], array.shape) for name, array in arrays.items()})
    return header + b"".join(
        np.ascontiguousarray(array, dtype=_TENSORS[name][2]).tobytes() for name, array in arrays.items()
    )
