"""The settings of a model whose weights may not be here: of a folder, a URL, a model on the hub, or a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import CheckpointError
from moec.manifests.files.limits import MAX_CONFIG_BYTES, MAX_INDEX_BYTES

from ..checkpoint.gguf.header import SUFFIX, is_gguf, read_head
from ..checkpoint.gguf.settings import config_of
from ..checkpoint.locate import locate
from ..checkpoint.model_files import CONFIG_NAME, GENERATION_CONFIG_NAME
from ..checkpoint.text_part import has_text_part, text_part
from ..checkpoint.weight_files import INDEX_NAME, TensorRef, read_json

CACHE = Path(".cache") / "moec" / "configs"
"""Below the home folder: small files of URLs."""
_SMALL = (CONFIG_NAME, GENERATION_CONFIG_NAME, INDEX_NAME)
_REMEDY = "name a model folder, a URL, or a model on the hub like `Qwen/Qwen3-30B-A3B`"
_EXPERT_KEYS = ("expert", "moe")
"""A config.json without a key that has one of these is of a dense model."""


@dataclass(frozen=True)
class ConfigFile:
    """A model as config.json describes it: `ModelFiles` without weights.

    stored_bytes: size of the weights on disk; None: not known.
    tokenizer_bytes: size of tokenizer.json; None: not known.
    has_codes: True for a GGUF file whose weights are quantized.
    stored_in: the GGUF file, or None.
    """

    root: Path
    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    stored_bytes: int | None
    tokenizer_bytes: int | None
    tensors: Mapping[str, TensorRef]
    has_numbers: bool = False
    has_codes: bool = False
    stored_in: Path | None = None

    @property
    def settings_file(self) -> Path:
        """The file with the settings, for people."""
        return self.stored_in or self.root / CONFIG_NAME

    def numbers(self, name: str, count: int) -> Sequence[float]:
        """Return ones: no weights are here."""
        return (1.0,) * count

    def differ(self, name: str, other: str) -> bool:
        """Return False: no weights are here."""
        return False


def open_config(model: str) -> ConfigFile:
    """Open the config.json of a model, or the head of a GGUF file.

    Raises CheckpointError if there is none, or if the model has no experts.
    """
    if is_gguf(model):
        head = read_head(Path(model).expanduser())
        stored_bytes = sum(tensor.size_bytes for tensor in head.tensors.values())
        name = head.path.name.removesuffix(SUFFIX)
        has_codes = any(tensor.kind not in ("F32", "F16", "BF16") for tensor in head.tensors.values())
        config, root = config_of(head), head.path.parent
        return ConfigFile(root, name, config, {}, stored_bytes, None, {}, has_codes=has_codes, stored_in=head.path)
    root, name = locate(model, _SMALL, Path.home() / CACHE)
    config = read_json(root / CONFIG_NAME, MAX_CONFIG_BYTES, _REMEDY)
    if has_text_part(config):
        config = text_part(config, {})[0]
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(
            f"`{root / CONFIG_NAME}` has no `model_type`, expected the name of a model family",
            "use the config.json that came with the weights",
        )
    if not any(part in key.lower() for key in config for part in _EXPERT_KEYS):
        raise CheckpointError(
            f"`{name}` (`{config['model_type']}`) is a dense model: it has no experts, and moec brings it nothing",
            "use llama.cpp for it",
        )
    generation = root / GENERATION_CONFIG_NAME
    settings = read_json(generation, MAX_CONFIG_BYTES, _REMEDY) if generation.is_file() else {}
    tokenizer = root / TOKENIZER_NAME
    size = tokenizer.stat().st_size if tokenizer.is_file() else None
    return ConfigFile(root, name, config, settings, _stored_bytes(root), size, {})


def _stored_bytes(root: Path) -> int | None:
    """Return the size of the weights: as an index states it, or of the files that are here."""
    if (root / INDEX_NAME).is_file():
        total = read_json(root / INDEX_NAME, MAX_INDEX_BYTES, _REMEDY).get("metadata", {})
        stated: Any = total.get("total_size") if isinstance(total, dict) else None
        if type(stated) in (int, float) and math.isfinite(stated) and stated > 0:
            return int(stated)
    return sum(path.stat().st_size for path in root.glob("*.safetensors")) or None
