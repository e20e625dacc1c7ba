"""Path dictionaries of the bundle of `one_call.py`."""

from __future__ import annotations

import numpy as np

from moec.runtime.bundle.tables import PathTables, Tables

from .one_call import EXPERTS, LAYERS


def random_paths(seed: int, keys: int, transitions: float) -> Tables:
    """Return tables with some pairs of experts, and some single ones, that were seen.

    keys: pairs of each layer that were seen, some of them too rarely to count.
    transitions: share of the single experts that were seen.
    """
    drawn = np.random.default_rng(seed)
    rows = np.sort(drawn.choice(LAYERS * EXPERTS * EXPERTS, keys, replace=False)).astype(np.int64)
    lengths = drawn.integers(1, 5, keys)
    experts = np.concatenate([drawn.choice(EXPERTS, length, replace=False) for length in lengths] or [np.empty(0)])
    seen = drawn.random((LAYERS - 1, EXPERTS, 1)) < transitions
    paths = PathTables(
        transitions=(drawn.integers(0, 9, (LAYERS - 1, EXPERTS, EXPERTS)) * seen).astype(np.uint32),
        keys=rows,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        experts=experts.astype(np.uint16),
        counts=drawn.integers(1, 12, len(experts)).astype(np.uint32),
    )
    return Tables(drawn.integers(1, 99, (LAYERS, EXPERTS)).astype(np.uint32), paths)
