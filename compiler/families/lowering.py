"""The result of a translation: a ModelSpec, and the place of each weight on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moec.manifests.errors import CheckpointError
from moec.manifests.model import ModelSpec, UnitKey
from moec.manifests.quant import FloatType, QuantSpec

if TYPE_CHECKING:  # torch is imported where weights are read, so that `moec fit` does without
    import torch

    from ..checkpoint.checkpoint import Checkpoint
    from ..checkpoint.integer_codes import CodeNeed, IntegerCodes


@dataclass(frozen=True, slots=True)
class HeadPart:
    """A part of each head of a matrix [H R, C].

    heads: H.
    of_rows: R, rows of one head.
    start, stop: the rows of each head that belong to the part.
    is_transposed: the part of each head is transposed.
    """

    heads: int
    of_rows: int
    start: int
    stop: int
    is_transposed: bool = False

    def view(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the part as a view: [H R, C] -> [H, r, C], or [H, C, r] if transposed."""
        rows = matrix.view(self.heads, self.of_rows, matrix.shape[1])[:, self.start : self.stop]
        return rows.transpose(1, 2) if self.is_transposed else rows


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The place of one weight on disk.

    shape: the shape that the tensor must have on disk.
    index: the matrix in a stack [E, ., .], or None without a stack.
    rows: start and stop in that matrix, or None for all rows.
    heads: the part of each head of a whole matrix, or None.
    every: first column and column step of the weight, or None for all columns.
    is_transposed: after the selection, the matrix is [columns, rows].
    is_flat: the weight is a vector, and its parts follow each other.
    scales: the tensor with the scales of an MXFP4 tensor, or empty. The decoded matrix is transposed first, so that
        it lies as an unpacked tensor does.
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

    @property
    def is_whole(self) -> bool:
        """True if the weight is all of its tensor, as it lies there."""
        parts = (self.index, self.rows, self.heads, self.every)
        return not (self.is_transposed or self.is_flat or self.scales) and all(selection is None for selection in parts)

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the weight in the tensor that was read: [N, K], [H, r, C] of heads, [.., K] if flat."""
        if self.every is not None:
            tensor = tensor[..., self.every[0] :: self.every[1]]
        if self.is_transposed:
            tensor = tensor.transpose(-1, -2)
        return tensor if self.heads is None else self.heads.view(tensor)

    def matrix(self, view: torch.Tensor) -> torch.Tensor:
        """Return a view as the final weight, [N, K] or a vector."""
        if self.is_flat:
            return view.flatten()
        return view if self.heads is None else view.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Lowering:
    """One checkpoint as a ModelSpec.

    dense: canonical name (ModelSpec.dense_shapes) -> source.
    units: each routed projection -> source.
    loaded: canonical name of a dense weight -> its parameter in transformers' model.
    ignored: tensors on disk that are not used.
    auxiliary: tensors that are read but are not weights: score corrections and MXFP4 scales.
    float_type: storage type of 16-bit weights. float32 tensors are rounded to it.
    notes: remarks for the user.
    """

    checkpoint: Checkpoint
    model: ModelSpec
    dense: Mapping[str, TensorSource]
    units: Mapping[UnitKey, TensorSource]
    loaded: Mapping[str, str]
    ignored: frozenset[str]
    auxiliary: frozenset[str]
    float_type: FloatType
    notes: tuple[str, ...] = ()

    @property
    def spec_16bit(self) -> QuantSpec:
        """Format of weights that keep their floats."""
        return QuantSpec(16, float_type=self.float_type)

    @property
    def own_unit_spec(self) -> QuantSpec:
        """Format of unquantized routed projections: mxfp4 if the checkpoint holds it, else 16 bits."""
        is_mxfp4 = bool(self.units) and all(map(self.is_mxfp4, self.units.values()))
        return QuantSpec.parse("mxfp4") if is_mxfp4 else self.spec_16bit

    def is_mxfp4(self, source: TensorSource) -> bool:
        """Return whether a weight is stored in MXFP4, and its 16-bit type holds all such values."""
        packed = self.checkpoint.packed.get(source.name) if source.is_whole else None
        has_rows = packed is not None and packed.is_mxfp4 and self.float_type == "bfloat16"
        return bool(source.scales) or has_rows

    def code_needs(self) -> Mapping[UnitKey, CodeNeed]:
        """Return what a format needs to hold the codes of each unit that is stored as integers. Reads no codes.

        Raises CheckpointError.
        """
        if not self.checkpoint.packed:
            return {}
        needs = {unit: self.code_need(unit) for unit in self.units}
        return {unit: need for unit, need in needs.items() if need is not None}

    def code_need(self, unit: UnitKey) -> CodeNeed | None:
        """Return what a format needs to hold the codes of a unit, None without codes. Raises CheckpointError."""
        return self._need(self.units[unit])

    def dense_code_need(self, name: str) -> CodeNeed | None:
        """Return what a format needs to hold a dense matrix, None without codes. Raises CheckpointError."""
        return self._need(self.dense[name])

    def _need(self, source: TensorSource) -> CodeNeed | None:
        return self.checkpoint.code_need(source.name) if source.is_whole else None

    def dense_codes(self, name: str, rows: tuple[int, int] | None = None) -> IntegerCodes | None:
        """Return the codes of a dense matrix or of some rows, None if it has none. Raises CheckpointError."""
        source = self.dense[name]
        return self.checkpoint.integer_codes(source.name, rows) if source.is_whole else None

    def unit_codes(self, unit: UnitKey) -> IntegerCodes | None:
        """Return the codes of a unit, None if it is not stored as integers. Raises CheckpointError."""
        source = self.units[unit]
        return self.checkpoint.integer_codes(source.name) if source.is_whole else None

    def unit(self, key: UnitKey) -> torch.Tensor:
        """Return one projection of one expert, [N, K] bfloat16 or float16. Raises CheckpointError."""
        return self.read(self.units[key])

    def dense_weight(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Return one dense weight, [N, K] or a norm [D], bfloat16 or float16. Raises CheckpointError.

        rows: start and stop, of a matrix whose rows can be read alone (`reads_rows`).
        """
        return self.read(self.dense[name], rows)

    def reads_rows(self, name: str) -> bool:
        """Return whether some rows of a dense matrix can be read alone."""
        source = self.dense[name]
        packed = self.checkpoint.packed.get(source.name)
        return source.is_whole and (packed is None or packed.by_rows)

    def read(self, source: TensorSource, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Read only this weight, in the 16-bit type.

        rows: start and stop of a whole tensor, or None for all.
        Raises CheckpointError if a value is not finite.
        """
        import torch

        from ..checkpoint.mxfp4 import decode

        weight = self.checkpoint.tensor(source.name, source.index, rows or source.rows)
        if source.scales:
            weight = decode(weight, self.checkpoint.tensor(source.scales, source.index)).T
        weight = weight.to(getattr(torch, self.float_type))
        # The sum takes one pass. It is not finite if a weight is not, or if it exceeds float32.
        if not torch.isfinite(weight.sum(dtype=torch.float32)) and not torch.isfinite(weight).all():
            raise CheckpointError(
                f"tensor `{source.name}` in `{self.checkpoint.place}` holds NaN or infinite values in "
                f"{self.float_type}, expected finite weights",
                "copy the checkpoint again, or train it without overflow",
            )
        return (source.matrix(source.view(weight)) if rows is None else weight).contiguous()


def common_float_type(checkpoint: Checkpoint, names: list[str]) -> tuple[FloatType, tuple[str, ...]]:
    """Return the 16-bit type of the named tensors that exist, and notes.

    float32 tensors take the type of the 16-bit tensors. Without any of these the type is bfloat16.
    Raises CheckpointError if bfloat16 and float16 are mixed.
    """
    by_dtype: dict[str, str] = {}
    for name in names:
        if name in checkpoint.tensors:
            by_dtype.setdefault(checkpoint.tensors[name].dtype, name)
    if "BF16" in by_dtype and "F16" in by_dtype:
        raise CheckpointError(
            f"`{checkpoint.place}` mixes bfloat16 (`{by_dtype['BF16']}`) and float16 (`{by_dtype['F16']}`)",
            "save the model in one 16-bit type",
        )
    float_type: FloatType = "float16" if "F16" in by_dtype else "bfloat16"
    if "F32" not in by_dtype:
        return float_type, ()
    return float_type, (f"float32 weights (first `{by_dtype['F32']}`) are rounded to {float_type}",)
