"""The tokenizer and the chat template of a GGUF file, as the files of a Hugging Face folder.

transformers builds the tokenizer. A `tokenizer.json` next to the GGUF file takes precedence.
"""

from __future__ import annotations

import json
from typing import Any

from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import CheckpointError
from moec.manifests.files.limits import MAX_TOKENIZER_BYTES
from moec.manifests.tokenizer.special_tokens import TOKENIZER_CONFIG_NAME

from ..weight_files import read_file
from .header import GgufHead

TEMPLATE_NAME = "chat_template.jinja"
_BYTE_LEVEL = "gpt2"
_GPT2_SPLITS = ("default", "gpt-2", "olmo", "phi-2", "mpt", "jais", "trillion", "granite-docling")
"""Vocabularies whose text is split as that of GPT-2. Source: llama.cpp, llama-vocab.cpp; of the next two as well."""
_ALIASES = {"glm4": "llama-bpe", "solar-open": "qwen2"}
_SEQUENCES = {
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "refact": (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
}
"""Vocabularies whose text is split several times: what each expression finds stands alone."""
_REMEDY = f"put the model's `{TOKENIZER_NAME}` next to the GGUF file"


def tokenizer_files(head: GgufHead) -> dict[str, bytes]:
    """Return name -> content of the files of the tokenizer. Raises CheckpointError."""
    metadata, beside = head.metadata, head.path.with_name(TOKENIZER_NAME)
    settings: dict[str, Any] = {}
    tokens = metadata.get("tokenizer.ggml.tokens")
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and type(number) is int and 0 <= number < len(tokens):
            settings[name] = tokens[number]
    for name in ("add_bos_token", "add_eos_token"):
        if isinstance(flag := metadata.get(f"tokenizer.ggml.{name}"), bool):
            settings[name] = flag
    files = {TOKENIZER_CONFIG_NAME: json.dumps(settings, indent=1).encode() + b"\n"}
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        files[TEMPLATE_NAME] = template.encode()
    if beside.is_file():
        return {TOKENIZER_NAME: read_file(beside, MAX_TOKENIZER_BYTES, "copy it again"), **files}
    return {TOKENIZER_NAME: _built(head), **files}


def _built(head: GgufHead) -> bytes:
    """Return the content of tokenizer.json. Raises CheckpointError."""
    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError as error:
        raise CheckpointError(
            f"`{head.path}`: this transformers builds no tokenizer from GGUF files, 5.24 does", _REMEDY
        ) from error
    kind, split = (head.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    known = (*GGUF_PRE_TOKENIZER_SPLITS, *_GPT2_SPLITS, *_ALIASES, *_SEQUENCES)
    if kind == _BYTE_LEVEL and split not in known:
        raise CheckpointError(f"`{head.path}` splits text as `{str(split)[:80]}`, which is not known", _REMEDY)
    try:
        architecture, parts, _ = get_gguf_tokenizer(str(head.path))
        if kind == _BYTE_LEVEL:
            parts.setdefault("merges", [])
            parts["pre_tokenizer_type"] = _ALIASES.get(str(split), split)
        tokenizer, _ = convert_gguf_tokenizer(architecture, parts)
        # transformers' class of this tokenizer brings tokens of its own, after those of the file.
        plain = json.loads(tokenizer.to_str())
        plain["added_tokens"] = [token for token in plain["added_tokens"] if token["id"] < len(parts["tokens"])]
        if kind == _BYTE_LEVEL and split in _SEQUENCES:
            plain["pre_tokenizer"] = _in_sequence(_SEQUENCES[split])
        return json.dumps(plain, ensure_ascii=False).encode()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of an untrusted vocabulary in a library; it panics by a BaseException
        reason = str(error).strip().splitlines()
        text = reason[0][:200] if reason else type(error).__name__
        raise CheckpointError(f"`{head.path}` gives no tokenizer: {text}", _REMEDY) from error


def _in_sequence(expressions: tuple[str, ...]) -> dict[str, Any]:
    """Return the splits of a byte-level vocabulary as tokenizer.json has them."""
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in expressions
    ]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}
