"""Upper bounds of what a file made by a stranger can ask for. Each is checked before the memory for it is taken."""

from __future__ import annotations

MAX_MANIFEST_BYTES = 16 << 20
"""Size of `moec.json`, bytes."""

MAX_QUALITY_BYTES = 64 << 20
"""Size of `quality.json`, bytes."""
MAX_CONFIG_BYTES = 16 << 20
"""Size of one of the JSON files with settings in a model folder (`config.json`, `generation_config.json`), bytes."""
MAX_INDEX_BYTES = 64 << 20
"""Size of `model.safetensors.index.json` in a model folder, bytes."""
MAX_COMPANION_BYTES = 256 << 20
"""Size of a tokenizer or template file that a bundle copies from a model folder, bytes."""
