"""The metadata of a GGUF file, checked as it is read. Keys are those of llama.cpp (gguf, constants.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

from moec.manifests.errors import CheckpointError

from .header import GgufHead


class Metadata:
    """Typed access to the metadata of a file. Raises CheckpointError, which names the key."""

    def __init__(self, head: GgufHead) -> None:
        self._head = head
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._head.metadata

    def text(self, key: str) -> str:
        """Return a text by its whole key."""
        return str(self._typed(key, self._head.metadata.get(key), str))

    def get(self, key: str, absent: Any = None) -> Any:
        """Return a value of the architecture, or `absent`."""
        return self._head.metadata.get(f"{self.architecture}.{key}", absent)

    def integer(self, key: str, absent: int | None = None) -> int:
        """Return a whole number that is not negative."""
        value = self._typed(f"{self.architecture}.{key}", self.get(key, absent), int)
        if value < 0:
            self._fail(f"{self.architecture}.{key}", "a number of 0 or more", value)
        return int(value)

    def positive(self, key: str, absent: int | None = None, most: int = 1 << 32) -> int:
        """Return a whole number of 1 to `most`."""
        value = self.integer(key, absent)
        if not 0 < value <= most:
            self._fail(f"{self.architecture}.{key}", f"a number of 1 to {most}", value)
        return value

    def number(self, key: str, absent: float | None = None) -> float:
        """Return a number. Files hold single precision, so that its shortest decimal form is the one meant."""
        value = self.get(key, absent)
        if type(value) is int:
            return float(value)
        return shortest(self._typed(f"{self.architecture}.{key}", value, float))

    def of_layers(self, key: str, layers: int) -> list[int]:
        """Return a whole number for each layer, also if one stands for all."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value] * layers
        if len(values) < layers or not all(type(each) is int and each >= 0 for each in values):
            self._fail(f"{self.architecture}.{key}", f"a whole number, or {layers} of them", value)
        return values[:layers]

    def flags_of_layers(self, key: str, layers: int) -> list[bool]:
        """Return a truth value for each layer."""
        value = self.get(key)
        if not isinstance(value, list) or len(value) < layers or not all(type(each) is bool for each in value):
            self._fail(f"{self.architecture}.{key}", f"{layers} truth values", value)
        return list(value[:layers])

    def _typed(self, key: str, value: Any, kind: type) -> Any:
        if type(value) is not kind:
            self._fail(key, f"a value of type {kind.__name__}", value)
        return value

    def _fail(self, key: str, expected: str, value: Any) -> None:
        found = "nothing" if value is None else f"`{str(value)[:80]}`"
        raise CheckpointError(
            f"`{self._head.path}`: key `{key}`: expected {expected}, found {found}",
            "convert the model again with a current llama.cpp",
        )


def shortest(value: float) -> float:
    """Return the number of fewest digits that single precision rounds to the same value, 9.99999974e-06 -> 1e-05."""
    return float(str(np.float32(value)))
