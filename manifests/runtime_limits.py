"""Limits and defaults of the runtime that a compile or a device profile states too."""

from __future__ import annotations

DEFAULT_CONTEXT = 4096
"""Positions that a run reserves memory for, if the model has as many."""
ANSWER_SLOTS = 64
"""Sequences for which a compile opens the runtime, or fewer that fit."""
MOST_ANSWER_SLOTS = 256
"""Most sequences that answer at once, with slots as long as the answers.

On the yardstick of four layers, 256 decode 1.2 times (4 bits) and 1.6 times (16 bits) as fast as 64.
"""
FEW_ANSWER_SLOTS = 16
"""Sequences for which the expert cache gives up experts: with fewer, a pass serves too few tokens for what it reads."""
MAX_PASS_TOKENS = 1024
"""Most tokens that a layer computes at once. A prompt up to this length reads each expert once."""
IO_MODES = ("auto", "direct", "buffered", "mmap")
"""Values of `--io`."""
MAX_READERS = 32
"""Most expert reads under way at once."""
