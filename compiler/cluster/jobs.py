"""The jobs of workers: small values that can be pickled, with handles in place of weights.

Shapes: E experts, N rows, K columns, A answer tokens, V vocabulary, P projections of an expert, S formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, in_order
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..quantization.layer_quantizer import ExpertQuantizer
from ..quantization.own_codes import exact_matrices
from ..quantization.packing import unpack
from ..workspace.parallel import workers
from .site import BundleFiles, Handle, PlainMatrix, to_plain

if TYPE_CHECKING:
    from ..sensitivity.answer_walk import AnswerMeasures
    from .site import Site


@dataclass(frozen=True, slots=True)
class QuantizeExperts:
    """Quantize whole experts of a layer. Gives [(unit, format, matrix)] of each.

    moments: handle of [(gate's [1, D, D], down's [1, F, F])] of each expert, float32; None without texts.
    tokens: number of tokens of each expert.
    """

    quantizer: ExpertQuantizer
    experts: tuple[int, ...]
    moments: Handle | None
    tokens: tuple[int, ...]

    def run(self, site: Site) -> list[list[tuple[UnitKey, QuantSpec, PlainMatrix]]]:
        """On as many threads as the site has; weights come from the site's own checkpoint."""
        moments = [None] * len(self.experts) if self.moments is None else site.fetch([self.moments])[0]
        lowering, layer = site.lowering, self.quantizer.layer  # opened by one thread
        projections = lowering.model.layers[layer].experts.projections

        def one(
            job: tuple[int, tuple[np.ndarray, np.ndarray] | None, int],
        ) -> list[tuple[UnitKey, QuantSpec, PlainMatrix]]:
            expert, handed, tokens = job
            weights = {name: lowering.unit(UnitKey(layer, expert, name)).float() for name in projections}
            expert_moments = None if handed is None else (torch.tensor(handed[0]), torch.tensor(handed[1]))
            with torch.inference_mode():
                matrices = self.quantizer.run(
                    expert, weights, expert_moments, tokens, partial(exact_matrices, lowering)
                )
            return [(unit, spec, to_plain(matrix)) for (unit, spec), matrix in matrices.items()]

        with workers(site.threads) as pool:
            return list(pool.in_order(one, zip(self.experts, moments, self.tokens, strict=True)))


@dataclass(frozen=True, slots=True)
class PriceExperts:
    """Price some experts of a layer, see sensitivity/unit_prices.py. Gives squares [P, S] of each.

    handed: handle of HandedTexts.to_arrays.
    packed: handle of (unit, format) -> bytes, without pruned formats and those that do not hold the unit.
    """

    layer: int
    experts: tuple[int, ...]
    specs: tuple[QuantSpec, ...]
    handed: Handle
    num_texts: int
    packed: Handle

    def run(self, site: Site) -> list[np.ndarray]:
        """On as many threads as the site has; weights come from the site's own checkpoint."""
        from ..sensitivity.unit_prices import HandedTexts, expert_squares  # loads transformers, like `site.layer`

        arrays, packed = site.fetch([self.handed, self.packed])
        handed, module = HandedTexts.from_arrays(arrays, self.num_texts), site.layer(self.layer).experts
        model = site.lowering.model
        shapes = {name: model.unit_shape(self.layer, name) for name in model.layers[self.layer].experts.projections}

        def restored(unit: UnitKey, spec: QuantSpec) -> torch.Tensor | None:
            data = packed.get((unit, spec))
            return None if data is None else unpack(data, *shapes[unit.projection], spec).dequantize()

        def one(expert: int) -> np.ndarray:
            return expert_squares(module, partial(UnitKey, self.layer, expert), handed, self.specs, restored)

        with workers(site.threads) as pool:
            return list(pool.in_order(one, self.experts))


@dataclass(frozen=True, slots=True)
class ForgetLayer:
    """Gives the memory of a layer back."""

    def run(self, site: Site) -> None:
        site.forget_layer()


@dataclass(frozen=True, slots=True)
class MeasureTexts:
    """Measure some answers under the weights of a plan. Gives AnswerMeasures.

    answers: handle of AnswerTexts.
    weights: handle of a mapping: name -> handle of a PlainMatrix, for everything that the plan stores below 16 bits.
    """

    answers: Handle
    weights: Handle

    def run(self, site: Site) -> AnswerMeasures:
        """Pass the layers on as many threads as the site has."""
        return site.answer_walk(self.answers).measure(site.weights(self.weights))


@dataclass(frozen=True, slots=True)
class BundleScores:
    """The score of each answer after its prompt, by the runtime on a bundle."""

    bundle: BundleFiles
    pairs: Sequence[tuple[str, str]]

    def run(self, site: Site) -> list[AnswerScore]:
        return in_order(site.engine(self.bundle).answer_log_probs, self.pairs)


@dataclass(frozen=True, slots=True)
class BundleGenerations:
    """Continuations of prompts by the runtime on a bundle."""

    bundle: BundleFiles
    requests: Sequence[GenerationRequest]

    def run(self, site: Site) -> list[Generation]:
        return in_order(site.engine(self.bundle).generate, self.requests)


@dataclass(frozen=True, slots=True)
class CloseBundle:
    """Give up the runtime on a bundle, by its digest, where a worker has it open."""

    digest: str

    def run(self, site: Site) -> None:
        """Its memory and files are free again."""
        site.close_engine(self.digest)
