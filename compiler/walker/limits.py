"""Limits of the passes over the layers that bound their memory. `memory.py` computes bytes from them."""

from __future__ import annotations

SCORED_TOKENS = 512
"""Maximum number of scored tokens of one text: its last."""
SKETCHES = 2
"""Gaussian vectors per text. Each needs one more backward pass. A quarter less variance would double the time."""
TOKENS_PER_BACKWARD = 512
"""Tokens of one pass with gradients. They bound its graph."""
LOGITS_AT_ONCE = 1 << 25
"""Logits of the checkpoint that a certificate holds at once (128 MiB)."""
LOGITS_PER_CHUNK = 1 << 22
"""Number of logits that a thread holds at once (16 MiB), where only sums over each row are needed."""
