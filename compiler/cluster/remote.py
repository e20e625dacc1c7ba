"""Workers in place of this machine: they quantize and price experts, measure answers, and run bundles.

Batches of answers are the same as on one machine: consecutive batches, longest texts first, are divided into the same
batches again (`text_batches`). So every product has the same operands on any machine.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, Take
from moec.manifests.model import UnitKey
from moec.manifests.quant import QuantSpec

from ..calibration.layer_inputs import LayerInputs
from ..quantization.layer_quantizer import ExpertQuantizer, Matrices, QuantizeElsewhere
from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..sensitivity.answer_walk import AnswerMeasures
from ..sensitivity.gradients import PriceElsewhere
from ..sensitivity.unit_prices import HandedTexts
from ..walker.texts import AnswerTexts, text_batches
from ..workspace.parallel import in_parts
from .jobs import BundleGenerations, BundleScores, MeasureTexts, PriceExperts, QuantizeExperts
from .ray_pool import Job, Pool
from .site import BundleFiles, Handle, from_plain, to_plain

_ITEMS_PER_BUNDLE_JOB = 64
_PIECE_BYTES = 64 << 20


def experts_quantized_by(pool: Pool) -> QuantizeElsewhere:
    """Return what quantizes the experts of a layer on workers. Their moments come from the driver."""

    def quantize(quantizer: ExpertQuantizer, inputs: LayerInputs | None, experts: Sequence[int]) -> Iterator[Matrices]:
        def jobs() -> Iterator[Job]:
            for chunk in in_parts(experts, min(pool.per_job(len(experts)), pool.threads)):
                if inputs is None:
                    yield QuantizeExperts(quantizer, tuple(chunk), None, (0,) * len(chunk))
                    continue
                handed = [inputs.moments_of(expert) for expert in chunk]
                moments = [tuple(moment.numpy() for moment in moments) for moments, _ in handed]
                tokens = tuple(count for _, count in handed)
                yield QuantizeExperts(quantizer, tuple(chunk), pool.put(moments), tokens)

        for quantized in pool.in_order(jobs()):
            for matrices in quantized:
                yield {(unit, spec): from_plain(plain) for unit, spec, plain in matrices}

    return quantize


def experts_priced_by(pool: Pool) -> PriceElsewhere:
    """Return what prices the experts of a layer on workers. What its tokens handed to them comes from the driver."""

    def price(store: UnitStore, layer: int, handed: HandedTexts, specs: Sequence[QuantSpec]) -> Iterator[np.ndarray]:
        projections = store.model.layers[layer].experts.projections
        shapes = {name: store.model.unit_shape(layer, name) for name in projections}
        arrays, experts = pool.put(handed.to_arrays()), range(store.model.layers[layer].experts.count)

        def packed(chunk: Sequence[int]) -> dict[tuple[UnitKey, QuantSpec], np.ndarray]:
            units = [UnitKey(layer, expert, name) for expert in chunk for name in projections]
            return {
                (unit, spec): store.for_bundle(unit, spec)
                for unit in units
                for spec in specs
                if not spec.is_pruned and spec.fits(shapes[unit.projection][1]) and store.holds(unit, spec)
            }

        def jobs() -> Iterator[Job]:
            for chunk in in_parts(experts, min(pool.per_job(len(experts)), pool.threads)):
                known = (arrays, handed.num_texts, pool.put(packed(chunk)))
                yield PriceExperts(layer, tuple(chunk), tuple(specs), *known)

        for priced in pool.in_order(jobs()):
            yield from priced

    return price


class RemoteAnswers:
    """Answers whose measures come from workers. Each job passes consecutive batches through the layers.

    pool: the workers.
    answers: the texts.
    """

    def __init__(self, pool: Pool, answers: AnswerTexts) -> None:
        self._pool, self.answers = pool, answers
        self._parts: dict[int | None, list[tuple[list[int], Handle]]] = {}
        self._held: dict[tuple[int, UnitKey | str, QuantSpec], Handle] = {}
        self._stores: list[UnitStore] = []

    def release(self) -> None:
        """Workers have memory of their own."""

    def measure_each(
        self, plans: Iterable[tuple[CompilePlan, UnitStore]], items: int | None = None
    ) -> Iterator[AnswerMeasures]:
        """Yield the measures of each plan, in order. Plans run at the same time. See AnswerMeter."""
        if items not in self._parts:
            self._parts[items] = self._divided(items)
        parts = self._parts[items]

        def jobs() -> Iterator[Job]:
            for plan, store in plans:
                weights = self._pool.put(self._weights(plan, store))
                yield from (MeasureTexts(answers, weights) for _, answers in parts)

        results = self._pool.in_order(jobs())
        for first in results:
            measures = [first, *(next(results) for _ in parts[1:])]
            yield _in_text_order(self.answers.counts, [texts for texts, _ in parts], measures)

    def _divided(self, items: int | None) -> list[tuple[list[int], Handle]]:
        """Return runs of consecutive batches: the indices of their texts, and a handle of the texts."""
        answers = self.answers if items is None else self.answers.first(items)
        batches = text_batches(answers.texts)
        runs = in_parts(batches, self._pool.per_job(len(batches)))
        indices = [[text for batch in run for text in batch] for run in runs]
        return [(texts, self._pool.put(answers.select(texts))) for texts in indices]

    def _weights(self, plan: CompilePlan, store: UnitStore) -> dict[UnitKey | str, Handle]:
        """Return handles of everything that the plan stores below 16 bits. Each is put into the cluster once."""
        if not any(known is store for known in self._stores):
            self._stores.append(store)
        number = next(at for at, known in enumerate(self._stores) if known is store)
        handles: dict[UnitKey | str, Handle] = {}
        for name, spec in itertools.chain[tuple[UnitKey | str, QuantSpec]](plan.units.items(), plan.dense.items()):
            if spec.bitwidth == 16:
                continue
            key = number, name, spec
            if key not in self._held:
                matrix = store.matrix(name, spec) if isinstance(name, UnitKey) else store.dense_matrix(name, spec)
                self._held[key] = self._pool.put(to_plain(matrix))
            handles[name] = self._held[key]
        return handles


def _in_text_order(
    counts: Sequence[int], parts: Sequence[Sequence[int]], measures: Sequence[AnswerMeasures]
) -> AnswerMeasures:
    """Return the measures of all texts, text after text.

    counts: scored tokens of each text.
    parts: the texts of each part.
    """
    spans: dict[int, tuple[np.ndarray, ...]] = {}
    for texts, measured in zip(parts, measures, strict=True):
        start = 0
        for text in texts:
            end = start + counts[text]
            spans[text] = measured.kl[start:end], measured.agrees[start:end], measured.nll[start:end]
            start = end
    kl, agrees, nll = (np.concatenate([spans[text][measure] for text in sorted(spans)]) for measure in range(3))
    return AnswerMeasures(kl, agrees, nll)


class RemoteEngine:
    """The runtime on an unpublished bundle, on workers. It computes the same bits however items are divided."""

    def __init__(self, pool: Pool, folder: Path, share: float = 0.0) -> None:
        """Sends the bundle, which may be gone afterwards. share: see BundleFiles."""
        self._pool = pool
        digest, files = hashlib.sha256(), {}
        for path in sorted(folder.iterdir()):  # a bundle has no folders in it
            pieces = []
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    digest.update(piece)
                    pieces.append(self._pool.put(np.frombuffer(piece, np.uint8)))
            files[path.name] = pieces
        self.bundle = BundleFiles(digest.hexdigest(), files, share)

    def generate(self, requests: Sequence[GenerationRequest], take: Take[Generation]) -> None:
        """See TextEngine."""
        self._compute(requests, take, lambda chunk: BundleGenerations(self.bundle, chunk))

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], take: Take[AnswerScore]) -> None:
        """See TextEngine."""
        self._compute(pairs, take, lambda chunk: BundleScores(self.bundle, chunk))

    def _compute(self, items: Sequence[Any], take: Take[Any], job: Callable[[Sequence[Any]], Job]) -> None:
        parts = list(in_parts(items, min(_ITEMS_PER_BUNDLE_JOB, -(-len(items) // self._pool.count))))
        answers = self._pool.in_order(job(chunk) for chunk in parts)
        for index, result in enumerate(itertools.chain.from_iterable(answers)):
            take(index, result)
