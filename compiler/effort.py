"""The work that a compile spends on its result: `--effort`.

* quick: small texts, and five formats for a large model. The plan of a loss target has the KL that usually loses as
  much, so no validation items are answered. Of the held-out items a sample is answered.
* default: by the size of the model, see `walker/memory.py is_large`.
* thorough: large texts, all formats, swaps, comparisons and all held-out items, whatever they take.
"""

from __future__ import annotations

from typing import Literal

Effort = Literal["quick", "default", "thorough"]
QUICK_ITEMS = 300
"""Held-out items of a quick certificate: 20 minutes of a model of 7 B parameters on two cores."""
