"""The result of translating a checkpoint's names: a ModelSpec, and where each of its weights lies on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moec.manifests.errors import CheckpointError
from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.quant import FloatType, QuantSpec

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.mxfp4 import decode

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Of a matrix whose rows belong to heads [H R, C]: rows start to stop of each head, or these turned into columns.

    of_rows: R.
    """

    heads: int
    of_rows: int
    start: int
    stop: int
    is_transposed: bool = False

    def view(self, matrix: torch.Tensor) -> torch.Tensor:
        """[H R, C] -> a view [H, r, C], or [H, C, r]."""
        part = matrix.view(self.heads, self.of_rows, matrix.shape[1])[:, self.start : self.stop]
        return part.transpose(1, 2) if self.is_transposed else part


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Where one weight lies.

    name: the tensor on disk. shape: what that tensor must have on disk. index: which matrix of a stack [E, ., .], or
    None. rows: start and stop within that matrix, or None for all. heads: of a whole matrix, a part of each head.
    every: first and step of the columns that belong to the weight. is_transposed: what is left is [columns, rows].
    is_flat: the weight is a vector, matrices after one another. scales: of an MXFP4 tensor, the one with its scales;
    what is decoded from both is turned round first, so that it lies as an unpacked tensor would.
    """

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    rows: tuple[int, int] | None = None
    heads: HeadPart | None = None
    every: tuple[int, int] | None = None
    is_transposed: bool = False
    is_flat: bool = False
    scales: str = ""

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The weight in what has been read of its tensor, in its place: [N, K], [H, r, C] of heads, [.., K] if flat."""
        if self.every is not None:
            tensor = tensor[..., self.every[0] :: self.every[1]]
        if self.is_transposed:
            tensor = tensor.transpose(-1, -2)
        return tensor if self.heads is None else self.heads.view(tensor)

    def matrix(self, view: torch.Tensor) -> torch.Tensor:
        """A view as the weight that it is, [N, K] or a vector."""
        if self.is_flat:
            return view.flatten()
        return view if self.heads is None else view.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Lowering:
    """One checkpoint, seen as a ModelSpec.

    dense: canonical name (ModelSpec.dense_shapes) -> source. units: every routed projection -> source.
    loaded: canonical name of a dense weight -> the parameter of transformers' model that holds it.
    ignored: tensors on disk that play no part; beside: those that are no weights of their own but are read.
    float_type: what 16-bit weights are stored as; float32 tensors are rounded to it. notes: what the user should know.
    """

    checkpoint: Checkpoint
    model: ModelSpec
    dense: Mapping[str, TensorSource]
    units: Mapping[UnitKey, TensorSource]
    loaded: Mapping[str, str]
    ignored: frozenset[str]
    beside: frozenset[str]
    float_type: FloatType
    notes: tuple[str, ...] = ()

    @property
    def spec_16bit(self) -> QuantSpec:
        """The format of weights that keep their floats."""
        return QuantSpec(16, float_type=self.float_type)

    @property
    def own_unit_spec(self) -> QuantSpec:
        """The format of routed projections that keep what the checkpoint has: mxfp4 where that is what it holds."""
        is_mxfp4 = bool(self.units) and all(source.scales for source in self.units.values())
        return QuantSpec.parse("mxfp4") if is_mxfp4 else self.spec_16bit

    def unit(self, key: UnitKey) -> torch.Tensor:
        """One projection of one expert, [N, K] bfloat16 or float16. Raises CheckpointError."""
        return self.read(self.units[key])

    def dense_weight(self, name: str) -> torch.Tensor:
        """One dense weight, [N, K] or a norm [D], bfloat16 or float16. Raises CheckpointError."""
        return self.read(self.dense[name])

    def read(self, source: TensorSource) -> torch.Tensor:
        """Read exactly this weight in the 16-bit type. Raises CheckpointError where a value is not finite."""
        weight = self.checkpoint.tensor(source.name, source.index, source.rows)
        if source.scales:
            weight = decode(weight, self.checkpoint.tensor(source.scales, source.index)).T
        weight = weight.to(_TORCH_DTYPES[self.float_type])
        # A sum is one pass, and not finite if a weight is not; it may also be too large for float32.
        if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
            raise CheckpointError(
                f"tensor `{source.name}` in `{self.checkpoint.root}` holds NaN or infinite values in "
                f"{self.float_type}, expected finite weights",
                "copy the checkpoint again, or train it without overflow",
            )
        return source.matrix(source.view(weight)).contiguous()


def common_float_type(checkpoint: Checkpoint, names: list[str]) -> tuple[FloatType, tuple[str, ...]]:
    """The 16-bit type of the named tensors that exist, and notes. float32 goes to the other type, alone to bfloat16.

    Raises CheckpointError if bfloat16 and float16 are mixed.
    """
    by_dtype: dict[str, str] = {}
    for name in names:
        if name in checkpoint.tensors:
            by_dtype.setdefault(checkpoint.tensors[name].dtype, name)
    if "BF16" in by_dtype and "F16" in by_dtype:
        raise CheckpointError(
            f"`{checkpoint.root}` mixes bfloat16 (`{by_dtype['BF16']}`) and float16 (`{by_dtype['F16']}`)",
            "save the model in one 16-bit type",
        )
    float_type: FloatType = "float16" if "F16" in by_dtype else "bfloat16"
    if "F32" not in by_dtype:
        return float_type, ()
    return float_type, (f"float32 weights (first `{by_dtype['F32']}`) are rounded to {float_type}",)
