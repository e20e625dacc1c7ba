"""Norms of rows in numpy.

Shape letters: T tokens, D hidden.
"""

from __future__ import annotations

import numpy as np

from ..packed_matrix import Floats, check_array, check_shape


def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Apply an RMS norm: out = weight * (x / sqrt(mean(x^2) + eps)).

    x, out: [T, D]; out may be x.
    weight: [D].
    Raises ValueError.
    """
    check_array(x, "x", np.float32, 2)
    check_array(weight, "weight", np.float32, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(weight, "weight", x.shape[1:])
    check_shape(out, "out", x.shape)
    inverse = np.float32(1) / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(eps))
    out[:] = weight * (x * inverse)


def layer_norm(x: Floats, weight: Floats, bias: Floats, eps: float, out: Floats) -> None:
    """Apply a layer norm: out = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, with the variance over all D.

    x, out: [T, D]; out may be x.
    weight, bias: [D].
    Raises ValueError.
    Source: Layer Normalization, section 3.
    """
    check_array(x, "x", np.float32, 2)
    check_array(weight, "weight", np.float32, 1)
    check_array(bias, "bias", np.float32, 1)
    check_array(out, "out", np.float32, 2)
    check_shape(weight, "weight", x.shape[1:])
    check_shape(bias, "bias", x.shape[1:])
    check_shape(out, "out", x.shape)
    centred = x - np.mean(x, axis=1, keepdims=True)
    inverse = np.float32(1) / np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + np.float32(eps))
    out[:] = weight * (centred * inverse) + bias
