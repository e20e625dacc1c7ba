"""Limits and defaults of the runtime that a compile or a device profile states too."""

from __future__ import annotations

DEFAULT_CONTEXT = 4096
"""Positions that a run reserves memory for, if the model has as many."""
ANSWER_SLOTS = 64
"""Sequences that a compile lets the runtime decode at once, or fewer that fit."""
MAX_PASS_TOKENS = 1024
"""Most tokens that a layer computes at once. A prompt up to this length reads each expert once."""
IO_MODES = ("auto", "direct", "buffered", "mmap")
"""Values of `--io`."""
MAX_READERS = 32
"""Most expert reads under way at once."""
