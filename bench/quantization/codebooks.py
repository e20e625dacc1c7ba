"""Formats below 4 bits per weight, compared.

    python -m bench.quantization.codebooks

Takes two minutes on two cores.

* `steps`: levels at equal distance with 16-bit scales and minima, as bundles have them.
* `steps8`: the same with scales and minima of 8 bits, as multiples of a 16-bit number per row.
* `matrix`: levels at any distance, from one codebook per matrix, with a scale per group.
* `row`: levels at any distance, from one codebook per row.

GPTQ rounds all of them, in turns with a fit to the outputs, so that nothing but the format differs. The figure is the
relative output error sqrt(tr(D H D^T) / tr(W H W^T)) of the shipped example's experts, on problems that calibration did
not see. It is the median of every third expert. Prints one JSON object per line. Bits per weight are those of 2,048
columns.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import numpy as np
import torch
from torch import Tensor

from moec.compiler.quantization.quantizers.gptq import DAMPING, PreparedInputs, prepare_inputs
from moec.compiler.quantization.unit_store import output_error, row_errors
from moec.manifests.model import PROJECTIONS, UnitKey

from ..example import SEED, Example, moments_of

EXAMPLES = Path(__file__).parents[2] / "examples"
CALIBRATION_ITEMS, HELD_OUT_ITEMS = 700, 300
EVERY = 3
COLUMNS = 2048
TURNS = 4
_RIDGE = 1e-4
_LLOYD_STEPS = 12


@dataclass(frozen=True)
class Format:
    """A format.

    kind: `steps`, `steps8`, `matrix` or `row` (see above).
    bits: of a code.
    group: columns that share a scale.
    """

    kind: str
    bits: int
    group: int

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight in a matrix of COLUMNS columns. A codebook of a whole matrix counts as free."""
        header = {
            "steps": 32 / max(self.group, 1),
            "steps8": 16 / max(self.group, 1) + 32 / COLUMNS,
            "matrix": 16 / max(self.group, 1),
            "row": 16 * (1 << self.bits) / COLUMNS,
        }
        return self.bits + header[self.kind]


class Fit:
    """The scales, minima and codebooks of one matrix [N, K] in one format."""

    def __init__(self, weight: Tensor, moment: Tensor, shape: Format) -> None:
        self.weight, self.moment, self.shape = weight, moment, shape
        rows, columns = weight.shape
        self.groups = 1 if shape.kind == "row" else columns // shape.group
        self.group_of = torch.arange(columns) // (columns // self.groups)
        self.grouped = weight.reshape(rows, self.groups, -1)
        self.entries = 2**shape.bits
        self.is_steps = shape.kind.startswith("steps")
        self._begin()

    def _begin(self) -> None:
        """Take steps from the range of each group, or a codebook from quantiles of weights relative to their scale."""
        if self.is_steps:
            low, high = self.grouped.amin(-1), self.grouped.amax(-1)
            self.scales, self.minima = self._clipped(low, high)
            return
        self.scales = torch.ones(len(self.weight), self.groups)
        if self.shape.kind == "matrix":
            self.scales = self.grouped.abs().amax(-1).clamp_min(1e-12)
        spread = self.weight / self.scales[:, self.group_of]
        importance = self.moment.diagonal().expand_as(spread)
        if self.shape.kind == "matrix":
            spread, importance = spread.reshape(1, -1), importance.reshape(1, -1)
        self.book = _lloyd(spread, importance, self.entries).expand(len(self.weight), -1).clone()

    def _clipped(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and minima of the shrunken range with the least error, weighted by the inputs."""
        best, scales, minima = torch.full_like(low, np.inf), low, low
        importance = self.moment.diagonal().reshape(1, self.groups, -1)
        for share in np.linspace(0.3, 1.0, 15).tolist():
            scale, minimum = ((high - low) * share / (self.entries - 1)).clamp_min(1e-12), low * share
            codes = ((self.grouped - minimum[..., None]) / scale[..., None]).round().clamp(0, self.entries - 1)
            left = self.grouped - minimum[..., None] - codes * scale[..., None]
            error = (left.square() * importance).sum(-1)
            is_less = error < best
            scales, minima = torch.where(is_less, scale, scales), torch.where(is_less, minimum, minima)
            best = torch.minimum(best, error)
        return scales, minima

    def round(self, column: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and values of one column, [N] each."""
        group = self.group_of[column]
        scale = self.scales[:, group]
        if self.is_steps:
            minimum = self.minima[:, group]
            codes = ((weights - minimum) / scale).round().clamp(0, self.entries - 1)
            return codes.long(), minimum + codes * scale
        known = self.book * scale[:, None]
        codes = (weights[:, None] - known).abs().argmin(1)
        return codes, known.gather(1, codes[:, None]).squeeze(1)

    def fit(self, codes: Tensor, moment: Tensor) -> None:
        """Fit scales, minima and entries again for fixed codes, by least squares on the outputs."""
        one = torch.nn.functional.one_hot(self.group_of, self.groups).T.float()  # [G, K]
        if self.is_steps:
            basis = torch.cat([codes.float()[:, None] * one, one.expand(len(codes), -1, -1)], 1)
            levels = _least_squares(self.weight, basis, moment)
            scales, minima = levels[:, : self.groups], levels[:, self.groups :]
            self.scales, self.minima = torch.where(scales > 0, scales, self.scales), minima
            if self.shape.kind == "steps8":
                self.scales, self.minima = _rounded(self.scales, 255), _rounded(self.minima, 127)
            return
        chosen = torch.nn.functional.one_hot(codes, self.entries).permute(0, 2, 1).float()  # [N, entries, K]
        basis = chosen * self.scales[:, self.group_of][:, None]
        self.book = _least_squares(self.weight, basis, moment, together=self.shape.kind == "matrix")
        if self.shape.kind == "matrix":
            values = self.book.gather(1, codes)
            self.scales = _least_squares(self.weight, values[:, None] * one, moment)

    def values(self, codes: Tensor) -> Tensor:
        """Return the weights that codes [N, K] stand for, [N, K]."""
        scales = self.scales[:, self.group_of]
        if self.is_steps:
            return self.minima[:, self.group_of] + codes * scales
        return self.book.gather(1, codes) * scales


def _lloyd(spread: Tensor, importance: Tensor, entries: int) -> Tensor:
    """Return entries of least weighted squared error for each row of [R, M], started at quantiles. [R, entries]."""
    places = (torch.arange(entries) + 0.5) / entries
    book = torch.quantile(spread[:, :: max(1, spread.shape[1] // 100_000)], places, dim=1).T.contiguous()
    for _ in range(_LLOYD_STEPS):
        codes = (spread[..., None] - book[:, None]).abs().argmin(-1)
        weights = torch.zeros_like(book).scatter_add_(1, codes, importance.contiguous())
        sums = torch.zeros_like(book).scatter_add_(1, codes, importance * spread)
        book = torch.where(weights > 0, sums / weights.clamp_min(1e-30), book)
    return book


def _least_squares(weight: Tensor, basis: Tensor, moment: Tensor, together: bool = False) -> Tensor:
    """Return the coefficients of basis [N, P, K] nearest to weight [N, K] under the moment.

    together: all rows get the same coefficients.
    """
    seen = basis @ moment
    system, wanted = (seen @ basis.transpose(1, 2)).double(), (seen @ weight[..., None]).double()
    if together:
        system, wanted = system.sum(0, keepdim=True), wanted.sum(0, keepdim=True)
    diagonal = system.diagonal(dim1=1, dim2=2)
    diagonal += (_RIDGE * diagonal.mean(1, keepdim=True)).clamp_min(1e-30)
    solution: Tensor = torch.linalg.solve(system, wanted)
    return solution.squeeze(2).float().expand(len(weight), -1).clone()


def _rounded(values: Tensor, most: int) -> Tensor:
    """Round to `steps` steps of the largest magnitude in each row."""
    step = values.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
    return torch.round(values / step) * step


def compensated(fit: Fit, prepared: PreparedInputs) -> Tensor:
    """Return the codes [N, K] of GPTQ for the present scales and entries of the fit."""
    order, factors = prepared.order, prepared.factor
    work, codes = fit.weight[:, order].clone(), torch.zeros(fit.weight.shape, dtype=torch.long)
    for at, column in enumerate(order.tolist()):
        code, value = fit.round(column, work[:, at])
        codes[:, column] = code
        error = (work[:, at] - value) / factors[at, at]
        work[:, at + 1 :] -= error[:, None] * factors[at, at + 1 :]
    return codes


def quantized(weight: Tensor, moment: Tensor, tokens: int, shape: Format) -> Tensor:
    """Return the weights in the format: for each row the best of all turns."""
    prepared = prepare_inputs(moment, tokens)
    damped = moment / moment.diagonal().mean() + DAMPING * torch.eye(len(moment))
    fit = Fit(weight, moment, shape)
    best, errors = torch.zeros_like(weight), torch.full((len(weight),), np.inf)
    for _ in range(TURNS):
        codes = compensated(fit, prepared)
        fit.fit(codes, damped)
        tried = fit.values(codes)
        found = row_errors(weight, tried, moment)
        takes = found < errors
        best, errors = torch.where(takes[:, None], tried, best), torch.where(takes, found, errors)
    return best


def formats(bits: int) -> Iterator[Format]:
    """Return the formats that are compared at a number of bits."""
    for group in (32, 64, 128):
        yield Format("steps", bits, group)
    for group in (16, 32, 64):
        yield Format("steps8", bits, group)
    for group in (16, 32, 64, 128):
        yield Format("matrix", bits, group)
    yield Format("row", bits, 0)


def main() -> None:
    """Read the command line and print one line per format."""
    parser = argparse.ArgumentParser(description="Output errors of formats below 4 bits on the example.")
    parser.add_argument("--bits", default="2,3")
    options = parser.parse_args()
    example = Example(str(EXAMPLES / "model"), str(EXAMPLES / "data"), "gsm8k")
    seen, _ = example.calibrated(example.texts(example.splits.train.limit(CALIBRATION_ITEMS, SEED).items))
    held_out, _ = example.calibrated(example.texts(example.splits.validation.items[:HELD_OUT_ITEMS]))
    for bits in map(int, options.bits.split(",")):
        for shape in sorted(formats(bits), key=lambda form: form.bits_per_weight):
            line: dict[str, object] = {"format": shape.kind, "bits": bits, "group": shape.group}
            line["bits_per_weight"] = round(shape.bits_per_weight, 3)
            for projection in PROJECTIONS:
                shares = []
                for layer, expert in list(example.model.expert_keys())[::EVERY]:
                    weight = example.lowering.unit(UnitKey(layer, expert, projection)).float()
                    moment = moments_of(seen[layer], projection)[expert]
                    weights = quantized(weight, moment, int(seen[layer].tokens[expert]), shape)
                    judged = moments_of(held_out[layer], projection)[expert]
                    whole = output_error(weight, torch.zeros_like(weight), judged)
                    shares.append(float((output_error(weight, weights, judged) / whole).sqrt()))
                line[projection] = round(float(np.median(shares)), 4)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
