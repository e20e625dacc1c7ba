"""Upper bounds for untrusted files. Each is checked before memory is allocated.

The table in docs/format.md, Limits, lists them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """Bounds of one JSON file or line, counted in its bytes before it is parsed.

    size_bytes: bytes of the whole file or line.
    containers: lists and objects. An empty one takes 64 bytes of memory for 3 bytes of the file.
    values: all other values in addition; at least one for each comma.
    texts: texts, names of fields included.
    depth: nesting of lists and objects.
    """

    size_bytes: int
    containers: int
    values: int
    texts: int
    depth: int = 32


MAX_MANIFEST_BYTES = 64 << 20
"""Size of `moec.json`, bytes.

Measured: 3.6 MB for 60 layers of 256 experts, and 7.3 MB if all have low versions.
Measured: 31.2 MB for 65,535 experts with low versions.
Static routing takes 12 bytes per number: 28 MB for 3 layers, 129,280 tokens x 6.
"""

MAX_MANIFEST_CONTAINERS = 1 << 18
"""Lists and objects in `moec.json`.

Measured for 65,535 experts with low versions: 131,117 in one layer, 136,472 in 256 layers.
"""

MAX_MANIFEST_VALUES = 1 << 22
"""Values in `moec.json`.

Measured: 1,192,504 for 65,535 experts with low versions, 2,327,040 for static routing.
"""

MAX_MANIFEST_TEXTS = 1 << 22
"""Texts in `moec.json`, names of fields included: 15 for each expert."""

MANIFEST_JSON = JsonLimits(MAX_MANIFEST_BYTES, MAX_MANIFEST_CONTAINERS, MAX_MANIFEST_VALUES, MAX_MANIFEST_TEXTS)
"""`moec.json`."""

MAX_QUALITY_BYTES = 16 << 20
"""Size of `quality.json`, bytes. The example's has 4 kB, that of a search over thousands of trials some hundred kB."""

QUALITY_JSON = JsonLimits(MAX_QUALITY_BYTES, containers=1 << 17, values=1 << 20, texts=1 << 20)
"""`quality.json`, and `NAME.modes.json` next to a bundle."""

MAX_DEVICE_BYTES = 256 << 10
"""Size of `device.json`, bytes: a profile of 64 KiB as TOML takes at most four times that. Shipped ones have 3 kB."""

DEVICE_JSON = JsonLimits(MAX_DEVICE_BYTES, containers=1 << 6, values=1 << 13, texts=1 << 12)
"""`device.json`. A list of little cores has up to 4,096 numbers."""

MAX_TOML_BYTES = 64 << 10
"""Size of a device profile or a task file, bytes. Shipped ones have 4 kB."""

MAX_TOML_TOKENS = 1 << 15
"""Keys, values and signs of a TOML file: 4,096 numbers with fractions have four each."""

MAX_TOML_DEPTH = 8
"""Nesting of tables and lists in a TOML file, and parts of a dotted key. Device profiles have 2."""

MAX_TOML_WORD_CHARACTERS = 1024
"""Length of a number or of a name without quotes in a TOML file. Python writes no number of 4,301 digits."""

MAX_SELF_TEST_BYTES = 64 << 10
"""Size of `self-test.json`, bytes: up to 16 lists of 64 tokens."""

SELF_TEST_JSON = JsonLimits(MAX_SELF_TEST_BYTES, containers=1 << 6, values=1 << 11, texts=1 << 6)
"""`self-test.json`."""

MAX_EVICTION_BYTES = 4 << 10
"""Size of `eviction.json`, bytes. A compile writes about 60."""

EVICTION_JSON = JsonLimits(MAX_EVICTION_BYTES, containers=1 << 4, values=1 << 6, texts=1 << 6)
"""`eviction.json`: four numbers."""

MAX_LOG_BYTES = 64 << 20
"""Size of `NAME.log.json` next to a bundle, bytes."""

LOG_JSON = JsonLimits(MAX_LOG_BYTES, containers=1 << 18, values=1 << 21, texts=1 << 21)
"""`NAME.log.json`."""

MAX_TUNE_BYTES = 1 << 20
"""Size of `NAME.tune.json`, bytes."""

TUNE_JSON = JsonLimits(MAX_TUNE_BYTES, containers=1 << 14, values=1 << 16, texts=1 << 17)
"""`NAME.tune.json`."""

MAX_TRACE_BYTES = 1 << 30
"""Size of a routing trace, bytes."""

MAX_TRACE_LINE_BYTES = 64 << 20
"""Size of one line of a routing trace, bytes."""

TRACE_LINE_JSON = JsonLimits(MAX_TRACE_LINE_BYTES, containers=1 << 14, values=1 << 24, texts=1 << 16)
"""One line of a routing trace: three lists for each of at most 4,096 layers, and four layers ahead of each."""

MERGED_LINE_JSON = JsonLimits(16 << 20, containers=1 << 14, values=1 << 21, texts=1 << 16)
"""One line of a trace that `moec merge-traces` reads.

A pass of 1,024 tokens with top-8 in 61 layers has 500,000 values.
Python takes about 100 MiB for as many values as a line may have.
"""

MAX_POPULARITY_BYTES = 64 << 20
"""Size of a popularity file, bytes: 24 MiB of routes as base64, and two counts for each expert."""

POPULARITY_JSON = JsonLimits(MAX_POPULARITY_BYTES, containers=1 << 12, values=1 << 19, texts=1 << 6)
"""A popularity file: two counts for each of 65,535 experts, and four numbers for each layer."""

MAX_HEADER_BYTES = 32 << 20
"""Size of the header of a safetensors file of unknown tensors, bytes: 250,000 tensors with names of 70 characters.

The largest models have some hundred tensors per file, or 92,160 if one file has 60 layers of 256 experts.
"""

HEADER_BYTES_PER_TENSOR = 512
"""Bytes of a header for each expected tensor: a name of 200 characters, and numbers of 15 digits."""

HEADER_BYTES_BESIDES = 16 << 10
"""Bytes of a header in addition to those of its tensors: padding to 4096, and metadata of other programs."""

_HEADER_CONTAINERS_PER_TENSOR = 3
_HEADER_VALUES_PER_TENSOR = 4 + 16  # the fields of an entry, and 16 dimensions
_HEADER_TEXTS_PER_TENSOR = 5
_METADATA_ENTRIES = 1 << 10
_SHORTEST_TENSOR_BYTES = 49  # {"a":{"dtype":"U8","shape":[],"data_offsets":[0,0]}}


def header_json(tensors: int | None = None) -> JsonLimits:
    """Return the bounds of a safetensors header.

    tensors: number of tensors in the file; None if unknown.
    """
    size_bytes = MAX_HEADER_BYTES
    most = MAX_HEADER_BYTES // _SHORTEST_TENSOR_BYTES
    if tensors is not None:
        size_bytes = min(MAX_HEADER_BYTES, HEADER_BYTES_BESIDES + HEADER_BYTES_PER_TENSOR * tensors)
        most = tensors
    return JsonLimits(
        size_bytes,
        containers=2 + _HEADER_CONTAINERS_PER_TENSOR * most,
        values=_METADATA_ENTRIES + _HEADER_VALUES_PER_TENSOR * most,
        texts=2 * _METADATA_ENTRIES + _HEADER_TEXTS_PER_TENSOR * most,
    )


MAX_COMPANION_BYTES = 256 << 20
"""Size of a tokenizer or template file that a bundle copies from a model folder, bytes."""

MAX_CONFIG_BYTES = 16 << 20
"""Size of a JSON file with settings in a model folder (`config.json`, `generation_config.json`), bytes."""

MAX_INDEX_BYTES = 64 << 20
"""Size of `model.safetensors.index.json` in a model folder, bytes: an index of 400,000 tensors."""

COMPANION_JSON = JsonLimits(MAX_INDEX_BYTES, containers=1 << 16, values=1 << 21, texts=1 << 22, depth=64)
"""`config.json`, an index of weights, and other JSON files of a checkpoint."""

MAX_WORK_BYTES = 1 << 30
"""Size of a JSON value in a work folder, bytes. This user's own compile wrote it, and its digest is checked."""

WORK_JSON = JsonLimits(MAX_WORK_BYTES, containers=1 << 24, values=1 << 27, texts=1 << 26, depth=64)
"""Values in a work folder."""

MAX_PATH_KEYS = 1 << 24
"""Rows of three columns of `path.keys` in `tables.safetensors`: 512 MiB of memory for `prefetch=path`.

Wider rows are fewer in proportion.

60 layers of 256 experts have 3,801,088 pairs of experts. A calibration of 100,000 tokens sees a part of them.
"""

MAX_PATH_SUCCESSORS = 1 << 26
"""Rows of `path.experts` in `tables.safetensors`: 384 MiB of memory for `prefetch=path`."""

MAX_CHUNK_BYTES = 64 << 20
"""Raw size of one chunk of an archive, bytes; also the window of a compressed chunk."""

MAX_CHUNKS = 1 << 20
"""Chunks of an archive: 8 TiB in chunks of 8 MiB. The index takes 40 bytes for each."""

MAX_TEMPLATE_FILE_BYTES = 4 << 20
"""Size of `chat_template.jinja` and of `tokenizer_config.json`, bytes each. Published ones have up to 1.2 MB."""

MAX_TEMPLATE_CPU_S = 2
"""Processor time of rendering a chat template, seconds. Published ones take milliseconds."""

MAX_TEMPLATE_MEMORY_BYTES = 64 << 20
"""Address space for rendering a chat template, in addition to interpreter, jinja2 and messages, bytes."""

MAX_TEMPLATE_TEXT_CHARACTERS = 1 << 20
"""Length of a chat template's output, in addition to the messages, characters."""

MAX_PROMPT_BYTES = 16 << 20
"""Size of a prompt from standard input or a file, bytes."""

MAX_PROMPT_BYTES_PER_TOKEN = 256
"""Bytes of a prompt that are read for each token of the context. The longest tokens of published models have 128."""

MAX_TOKENIZER_BYTES = 64 << 20
"""Size of `tokenizer.json`, bytes. Published ones have up to 34 MB (262,144 tokens)."""

MAX_TOKENIZER_PARSED_BYTES = 32 << 20
"""Size of a `tokenizer.json` that is parsed here because the tokenizers library would write another form, bytes."""

MAX_TOKENIZER_CONTAINERS = 1 << 20
"""Lists and objects in a `tokenizer.json` that is parsed here."""

MAX_TOKENIZER_STEPS = 64
"""Steps in each section of `tokenizer.json`: normalizers, pre-tokenizers, post-processors, decoders."""

MAX_TOKENIZER_GROWTH = 1024
"""Largest growth of a text by the steps of a section, bytes for each byte."""

DECODED_BYTES_PER_BYTE = 16
"""Text that the decoder may make of a token, bytes for each byte of `tokenizer.json`.

Published decoders make at most 12 bytes of one.
"""

MAX_DECODED_BYTES = 16 << 20
"""Text that the decoder may make of a token in any case, bytes."""

MAX_ADDED_TOKEN_BYTES = 4 << 20
"""Size of the texts of all added tokens, bytes. 131,072 tokens of 24 bytes have 3 MB."""

ADDED_TOKEN_MEMORY_PER_BYTE = 78
"""Memory of the automaton that finds added tokens, bytes for each byte of their texts. Measured: 61 to 78."""

MAX_ADDED_TOKEN_MEMORY_PER_FILE_BYTE = 13
"""Memory of added tokens that a memory plan includes, bytes for each byte of `tokenizer.json`."""

ADDED_TOKEN_SLACK_BYTES = 8 << 20
"""Memory of added tokens in addition to that, bytes: half of the slack of a memory plan."""

MAX_TEMPLATE_TOKENS = 256
"""Special tokens that a post-processor adds around a text."""

MAX_WORD_CHARACTERS = 1000
"""Longest word that WordPiece splits, characters. Published models have 100."""

MAX_PIECE_BYTES = 1024
"""Longest piece of a Unigram vocabulary, bytes. Published ones have up to 64."""

MAX_PATTERN_CHARACTERS = 4096
"""Length of a regular expression of a tokenizer, characters. Published ones have up to 900."""

MAX_PATTERN_STEPS = 64
"""Steps of a regular expression at one position of a text, for each character of the text."""

ENCODING_BYTES_PER_BYTE = 512
"""Memory of encoding a text, bytes for each byte of the text. At most 470 measured, 150 to 270 usual."""

ENCODING_CPU_S = 5.0
"""Processor time of encoding any text, seconds, in addition to the time for each byte."""

ENCODING_CPU_S_PER_BYTE = 20e-6
"""Processor time of encoding a text, seconds for each byte. 1 us is usual."""
