"""Weights that a checkpoint holds in a packed format of moec: the same numbers in moec's order."""

from __future__ import annotations

import torch

from moec.manifests.errors import CheckpointError
from moec.manifests.quant import QuantSpec

from ...checkpoint import mxfp4
from ..quantized import QuantizedMatrix


def repack_mxfp4(weight: torch.Tensor, spec: QuantSpec) -> QuantizedMatrix:
    """Convert a matrix of 4-bit floats without loss.

    weight: [N, K] floats from `mxfp4.decode`.
    Raises CheckpointError if mxfp4 cannot hold the weights exactly.
    """
    found = mxfp4.encode(weight)
    if found is None:
        raise CheckpointError(
            f"a matrix of {weight.shape[0]} x {weight.shape[1]} is not made of 4-bit floats in blocks of "
            f"{mxfp4.BLOCK_VALUES} whose scales lie between 2**-125 and 2**127",
            "offer other formats with `--bits` below 16",
        )
    return QuantizedMatrix(spec, *found, None)
