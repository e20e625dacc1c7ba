"""Quantizers: from a weight matrix and a format to codes with scales. Modules are imported on first use."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from moec.manifests.errors import CheckpointError, OptionError
from moec.manifests.quant import QuantSpec

from ...checkpoint import mxfp4
from ...checkpoint.weight_files import MXFP4_BLOCK_VALUES
from ..quantized import QuantizedMatrix, left_out

QUANTIZERS = ("gptq", "rtn", "quanto", "auto-gptq")
WITH_MOMENTS = ("gptq", "auto-gptq")
"""Quantizers that use the second moments of the inputs."""
PACKAGES = ("quanto", "auto-gptq")
"""Quantizers of other packages, which cannot express every format."""


class Quantizer(Protocol):
    """A function that quantizes one matrix.

    weight: [N, K] floats.
    second_moment: [K, K], sum of x x^T over the inputs x, or None.
    tokens: number of inputs in `second_moment`.
    """

    def __call__(
        self, weight: torch.Tensor, spec: QuantSpec, second_moment: torch.Tensor | None, tokens: int
    ) -> QuantizedMatrix: ...


def quantizer(name: str) -> Quantizer:
    """Return the quantizer of that name.

    `rtn` and `quanto` use the weights alone, the others also the second moment. All keep mxfp4 weights as they are.
    Raises OptionError for an unknown name.
    The quantizer raises CheckpointError if mxfp4 cannot hold the weights exactly.
    """
    if name not in QUANTIZERS:
        raise OptionError(f"unknown quantizer `{name[:40]}`, expected one of {', '.join(QUANTIZERS)}")
    module = name.replace("-", "_")
    function: Any = getattr(importlib.import_module(f".{module}", __package__), f"quantize_{module}")

    def quantize(
        weight: torch.Tensor, spec: QuantSpec, second_moment: torch.Tensor | None, tokens: int
    ) -> QuantizedMatrix:
        if spec.is_mxfp4:
            return _repack_mxfp4(weight, spec)
        if spec.is_pruned:
            return left_out(len(weight))
        arguments = (second_moment, tokens) if name in WITH_MOMENTS else ()
        return function(weight, spec, *arguments)  # type: ignore[no-any-return]

    return quantize


def check_format(name: str, spec: QuantSpec) -> None:
    """Raise OptionError if this quantizer cannot make a format. All quantizers keep 16 bits and mxfp4."""
    if name in PACKAGES and spec.bitwidth != 16 and not (spec.is_mxfp4 or spec.is_pruned):
        importlib.import_module(f".{name.replace('-', '_')}", __package__).check_format(spec)


def can_make(name: str, spec: QuantSpec) -> bool:
    """Return whether this quantizer can make a format."""
    try:
        check_format(name, spec)
    except OptionError:
        return False
    return True


def _repack_mxfp4(weight: torch.Tensor, spec: QuantSpec) -> QuantizedMatrix:
    """Convert a matrix of 4-bit floats without loss.

    weight: [N, K] floats from `mxfp4.decode`.
    Raises CheckpointError if mxfp4 cannot hold the weights exactly.
    """
    encoded = mxfp4.encode(weight)
    if encoded is None:
        raise CheckpointError(
            f"a matrix of {weight.shape[0]} x {weight.shape[1]} is not made of 4-bit floats in blocks of "
            f"{MXFP4_BLOCK_VALUES} whose scales lie between 2**-125 and 2**127",
            "offer other formats with `--bits` below 16",
        )
    return QuantizedMatrix(spec, *encoded, None)
