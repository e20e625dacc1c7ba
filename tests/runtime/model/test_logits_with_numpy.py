"""Logits of a hidden state that overflows, with the kernels of numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moec.runtime import kernels, load


def test_overflow_in_the_head_gives_no_warning_and_reaches_the_logits(tiny_bundle: Path) -> None:
    """Sampling refuses such logits. A warning of numpy would be an error of the suite."""
    before = kernels.active()
    kernels.select(kernels.NUMPY)
    try:
        with load(tiny_bundle, expert_cache="50%", context=32) as engine:
            width = engine.model.spec.hidden_size
            hidden = np.full((1, width), 1e30, np.float32)
            hidden[0, 0] = np.inf
            assert np.isnan(engine.model.logits(hidden)).any()
    finally:
        kernels.select(before)
