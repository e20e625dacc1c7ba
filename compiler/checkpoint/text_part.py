"""The text part of a checkpoint that also reads pictures or speech: its settings and its tensors.

Such a config.json holds the settings of the text model in `text_config`, and the names of its tensors have one more
part. The other tensors are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .weight_files import TensorRef

TEXT_CONFIG = "text_config"
_OF_ALL = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""Keys that may stand next to `text_config` and concern the text model too."""
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Beginnings of the names of tensors in the whole model, and in the text model."""
_OWN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")


def has_text_part(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json holds the settings of a text model of a known kind inside."""
    text = config.get(TEXT_CONFIG)
    return isinstance(text, dict) and isinstance(text.get("model_type"), str)


def text_part(
    config: Mapping[str, Any], tensors: Mapping[str, TensorRef]
) -> tuple[dict[str, Any], dict[str, TensorRef], tuple[str, ...]]:
    """Return the settings and the tensors of the text model, by its own names, and a note of what is left out."""
    settings = {**config[TEXT_CONFIG], **{key: config[key] for key in _OF_ALL if key in config}}
    found, others = dict[str, TensorRef](), Counter[str]()
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        if prefix or name.startswith(_OWN):
            found[_PREFIXES.get(prefix, "") + name.removeprefix(prefix)] = tensor
        else:
            others[".".join(name.split(".")[:2])] += 1
    left_out = ", ".join(f"{count} of `{part}`" for part, count in sorted(others.items()))
    notes = (f"only the text part is compiled; tensors that are left out: {left_out}",) if others else ()
    return settings, found, notes
