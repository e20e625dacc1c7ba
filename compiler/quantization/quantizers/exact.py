"""Weights that a checkpoint holds in a packed format of ours: the same numbers, in our order."""

from __future__ import annotations

import torch

from moec.manifests.errors import CheckpointError
from moec.manifests.quant import QuantSpec

from ...checkpoint import mxfp4
from ..quantized import QuantizedMatrix


def repack_mxfp4(weight: torch.Tensor, spec: QuantSpec) -> QuantizedMatrix:
    """A matrix of 4-bit floats as it is. weight: [N, K] floats that `mxfp4.decode` made. Raises CheckpointError."""
    found = mxfp4.encode(weight)
    if found is None:
        raise CheckpointError(
            f"a matrix of {weight.shape[0]} x {weight.shape[1]} is not made of 4-bit floats in blocks of "
            f"{mxfp4.BLOCK_VALUES} whose scales lie between 2**-125 and 2**127",
            "offer other formats with `--bits` below 16",
        )
    return QuantizedMatrix(spec, *found, None)
