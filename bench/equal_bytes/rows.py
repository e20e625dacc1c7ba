"""Measured rows of a comparison: bytes of the routed experts, KL and -log p of every held-out text. Each is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moec.compiler.sensitivity.answer_walk import AnswerWalk
from moec.compiler.walker.loaded_layer import Replaced

from ..example import Example

RESAMPLES = 2_000
Quantized = tuple[Replaced, int]
"""Quantized weights, and the bytes of the routed experts."""
Row = Mapping[str, Any]
"""Bytes of a row, and sums over each text: `kl` in nats, `nll` of -log p in nats."""


class Rows:
    """Rows of one model, measured on held-out items.

    folder: one file for each row. items: number of test items.
    """

    def __init__(self, example: Example, folder: Path, items: int) -> None:
        self.folder = folder
        self.walk: AnswerWalk = example.walk(example.splits.test.items[:items])
        self._counts = np.array(self.walk.answers.counts)
        shapes = (example.model.unit_shape(unit.layer, unit.projection) for unit in example.plain.units)
        self._weights = sum(int(np.prod(shape)) for shape in shapes)

    def row(self, name: str, make: Callable[[], Quantized]) -> Row:
        """Return a row. make: makes its weights, if it is not measured yet."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            weights, size = make()
            measured = self.walk.measure(weights)
            starts = np.cumsum([0, *self._counts[:-1]])
            sums = {key: np.add.reduceat(getattr(measured, key), starts).tolist() for key in ("kl", "nll")}
            new = path.with_suffix(".new")
            new.write_text(json.dumps({"bytes": size, **sums}) + "\n", encoding="utf-8")
            new.rename(path)
        return self.kept(name)

    def kept(self, name: str) -> Row:
        """Return a row that was measured before."""
        row: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        return row

    def bits(self, row: Row) -> float:
        """Return the bits per weight of the routed experts."""
        return 8 * float(row["bytes"]) / self._weights

    def kl(self, row: Row) -> float:
        """Return the mean KL, nats per token."""
        return float(np.sum(row["kl"]) / self._counts.sum())

    def figures(self, row: Row) -> tuple[str, str, str]:
        """Return bits per weight, KL and perplexity as text."""
        nll = np.sum(row["nll"]) / self._counts.sum()
        return f"{self.bits(row):.3f}", f"{self.kl(row):.5f}", f"{np.exp(nll):.3f}"


def ratio_text(ours: Row, theirs: Row) -> str:
    """Return the ratio of mean KL with its 95 % interval, by a bootstrap that draws texts in pairs."""
    ours_kl, other = np.array(ours["kl"]), np.array(theirs["kl"])
    draws = np.random.default_rng(0).integers(0, len(ours_kl), (RESAMPLES, len(ours_kl)))
    low, high = np.quantile(ours_kl[draws].sum(1) / other[draws].sum(1), (0.025, 0.975))
    return f"{ours_kl.sum() / other.sum():.3f} ({low:.3f} to {high:.3f})"
