"""Defaults of the runtime that a compile plans with."""

from __future__ import annotations

DEFAULT_CONTEXT = 4096
"""Positions that a run reserves memory for, if the model has as many."""
MAX_PASS_TOKENS = 1024
"""Most tokens that a layer computes at once. A prompt up to this length reads each expert once."""
