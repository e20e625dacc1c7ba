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

MAX_TOKENIZER_BYTES = 64 << 20
"""Size of `tokenizer.json`, bytes. Published ones have up to 34 MB (262,144 tokens)."""

MAX_TOKENIZER_PARSED_BYTES = 32 << 20
"""Size of a `tokenizer.json` that is parsed here, because its form is not that of the tokenizers library, bytes."""

MAX_TOKENIZER_CONTAINERS = 1 << 20
"""Lists and objects in a `tokenizer.json` that is parsed here."""

MAX_TOKENIZER_STEPS = 64
"""Steps in each section of `tokenizer.json`: normalizers, pre-tokenizers, post-processors, decoders."""

MAX_TOKENIZER_GROWTH = 1024
"""How many times longer the steps of a section may make a text, bytes for each byte."""

MAX_TEMPLATE_TOKENS = 256
"""Special tokens that a post-processor puts around a text."""

MAX_WORD_CHARACTERS = 1000
"""Longest word that WordPiece takes apart, characters. Published models say 100."""

MAX_PIECE_BYTES = 1024
"""Longest piece of a Unigram vocabulary, bytes. Published ones have up to 64."""

MAX_PATTERN_CHARACTERS = 4096
"""Length of a regular expression of a tokenizer, characters. Published ones have up to 900."""

MAX_PATTERN_STEPS = 64
"""Steps of a regular expression at one position of a text, for each character of the text."""

ENCODING_BYTES_PER_BYTE = 512
"""Memory of turning a text into tokens, bytes for each byte of the text. At most 470 measured, 150 to 270 usual."""

ENCODING_CPU_S = 5.0
"""Processor time of turning any text into tokens, seconds; what follows comes on top."""

ENCODING_CPU_S_PER_BYTE = 20e-6
"""Processor time of turning a text into tokens, seconds for each byte. 1 us is usual."""
