"""The part of a model that a family reads: settings, names of tensors, and the numbers that decide its layers.

A `Checkpoint` has them, and so has a config.json alone. This module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .weight_files import TensorRef

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"


class ModelFiles(Protocol):
    """A model whose weights may be absent."""

    @property
    def root(self) -> Path:
        """The folder of config.json."""

    @property
    def settings_file(self) -> Path:
        """The file with the settings, for people: config.json, or a GGUF file."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings."""

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Settings of generation; empty if there are none."""

    @property
    def tensors(self) -> Mapping[str, TensorRef]:
        """The weights by name."""

    @property
    def has_numbers(self) -> bool:
        """False without weights. Numbers that only computing needs may then be those of a plain model."""

    def numbers(self, name: str, count: int) -> Sequence[float]:
        """Return the numbers of a tensor, exactly as on disk. Raises CheckpointError if there are not `count`."""

    def differ(self, name: str, other: str) -> bool:
        """Return whether both tensors exist and differ. Raises CheckpointError."""
