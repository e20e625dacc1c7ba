"""What the runtime does where nobody asks for something else, which a compile plans with."""

from __future__ import annotations

DEFAULT_CONTEXT = 4096
"""Positions that a run keeps room for, if the model has as many."""
MAX_PASS_TOKENS = 1024
"""Tokens that go through a layer at once; a prompt up to this long reads each expert once."""
