"""Quantizers: a weight matrix and a format in, codes with scales out. Modules load when they are asked for."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch

from moec.manifests.errors import OptionError
from moec.manifests.quant import QuantSpec

from ..quantized import QuantizedMatrix, left_out
from .exact import repack_mxfp4

QUANTIZERS = ("gptq", "rtn", "quanto")


class Quantizer(Protocol):
    """weight: [N, K] floats. second_moment: [K, K] sum of x x^T over the inputs x seen, or None. tokens: how many."""

    def __call__(
        self, weight: torch.Tensor, spec: QuantSpec, second_moment: torch.Tensor | None, tokens: int
    ) -> QuantizedMatrix: ...


def quantizer(name: str) -> Quantizer:
    """The quantizer of that name. Raises OptionError for an unknown name.

    `rtn` and `quanto` look at the weights alone; `gptq` uses the second moment. All take mxfp4 as it is, or raise
    CheckpointError.
    """
    if name not in QUANTIZERS:
        raise OptionError(f"unknown quantizer `{name[:40]}`, expected one of {', '.join(QUANTIZERS)}")
    function: Any = getattr(importlib.import_module(f".{name}", __package__), f"quantize_{name}")

    def quantize(
        weight: torch.Tensor, spec: QuantSpec, second_moment: torch.Tensor | None, tokens: int
    ) -> QuantizedMatrix:
        if spec.is_mxfp4:
            return repack_mxfp4(weight, spec)
        if spec.is_pruned:
            return left_out(len(weight))
        arguments = (second_moment, tokens) if name == "gptq" else ()
        return function(weight, spec, *arguments)  # type: ignore[no-any-return]

    return quantize


def check_format(name: str, spec: QuantSpec) -> None:
    """Raise OptionError for a format that this quantizer cannot make. All of them keep 16 bits and mxfp4."""
    if name == "quanto" and spec.bitwidth != 16 and not (spec.is_mxfp4 or spec.is_pruned):
        importlib.import_module(".quanto", __package__).check_format(spec)


def quantize_batch(
    name: str,
    weights: torch.Tensor,
    spec: QuantSpec,
    second_moments: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
) -> list[QuantizedMatrix]:
    """Quantize one projection of several experts.

    weights: [E, N, K] floats. second_moments: [E, K, K] or None. tokens: [E] or None. Raises as the quantizer does.
    """
    if name == "gptq" and not (spec.is_mxfp4 or spec.is_pruned):
        from .gptq import quantize_gptq_batch

        return quantize_gptq_batch(weights, spec, second_moments, tokens)
    function = quantizer(name)
    return [function(weight, spec, None, 0) for weight in weights]
