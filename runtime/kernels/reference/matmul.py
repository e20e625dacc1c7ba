"""The product of two arrays of numpy, without warnings that are wrong."""

from __future__ import annotations

import numpy as np

from ..packed_matrix import Floats


def matmul(a: Floats, b: Floats) -> Floats:
    """Return a @ b.

    numpy may warn of invalid values in a small product of finite ones, because its BLAS reads more than the operands.
    Source: numpy issues 13173 and 24067.
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(a @ b)
