"""The largest values and their indices: the extension compared with numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.runtime import kernels
from moec.runtime.kernels import lookahead

pytestmark = pytest.mark.skipif(kernels.compiled() is None, reason="no extension")

values = st.one_of(st.sampled_from([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")]), st.floats(width=32))


@given(st.lists(values, max_size=40), st.integers(0, 50))
def test_as_numpy_has_it(found: list[float], count: int) -> None:
    array = np.array(found, np.float32)
    order, largest = kernels.largest(array, count)
    expected, their = lookahead.largest(array, count)
    assert order == expected and np.array_equal(largest, their, equal_nan=True)
    assert kernels.largest(array.astype(np.float64), count)[0] == expected


def test_only_a_list_is_ranked() -> None:
    with pytest.raises(ValueError, match="1 dimensions"):
        kernels.largest(np.zeros((2, 2), np.float32), 1)
