"""Upper bounds of what a file made by a stranger can ask for. Each is checked before the memory for it is taken."""

from __future__ import annotations

MAX_MANIFEST_BYTES = 16 << 20
"""Size of `moec.json`, bytes."""

MAX_TOKENIZER_BYTES = 64 << 20
"""Size of `tokenizer.json`, bytes. The largest of a known model has 34 MB."""
