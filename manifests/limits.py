"""Upper bounds of what a file made by a stranger can ask for. Each is checked before the memory for it is taken."""

from __future__ import annotations

MAX_MANIFEST_BYTES = 16 << 20
"""Size of `moec.json`, bytes."""

MAX_TEMPLATE_FILE_BYTES = 4 << 20
"""Size of `chat_template.jinja` and of `tokenizer_config.json`, bytes each. Published ones have up to 1.2 MB."""

MAX_TEMPLATE_CPU_S = 2
"""Processor time of rendering a chat template, seconds. Published ones take milliseconds."""

MAX_TEMPLATE_MEMORY_BYTES = 64 << 20
"""Address space that rendering a chat template may take beyond interpreter, jinja2 and messages, bytes."""

MAX_TEMPLATE_TEXT_CHARACTERS = 1 << 20
"""Length of what a chat template writes besides the messages, characters."""

MAX_PROMPT_BYTES = 16 << 20
"""Size of a prompt that is read from standard input or a file, bytes."""

MAX_PROMPT_BYTES_PER_TOKEN = 256
"""Bytes of a prompt that are read for each token of the context. The longest tokens of published models have 128."""
