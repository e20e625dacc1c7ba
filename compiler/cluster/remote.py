"""The reference model and the runtime, computed by workers, behind the protocols that trials and certificate ask for.

Batches are cut here as the reference model cuts them on one machine: a run of consecutive batches, longest first, is
cut into the same batches again (reference_network.length_batches), so every product has the same operands anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from moec.evaluation.engine import AnswerScore, Generation, GenerationRequest, no_progress
from moec.evaluation.statistics import DistributionSummary, distribution_summary
from moec.evaluation.text_pairs import TokenPair, forced_rows
from moec.manifests.model import PROJECTIONS, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import QuantizedBatch, UnitBatch, UnitStore
from ..reference.decode import ROWS_PER_STEP, Continuation
from ..reference.model import ReferenceModel
from ..reference.network import TOKENS_PER_FORWARD, length_batches
from ..walker.gradients import PriceElsewhere
from ..walker.store import StreamedStore
from ..walker.unit_prices import HandedTexts
from ..walker.units import Elsewhere, ExpertQuantizer, LayerInputs, Matrices
from ..workspace.parallel import in_parts
from .jobs import (
    BundleGenerations,
    Decode,
    Divergences,
    KeepLogProbs,
    Logits,
    PriceExperts,
    QuantizeBatches,
    QuantizeExperts,
    Scores,
    Verify,
    Weights,
)
from .ray_pool import Answer, Job, Pool
from .wire import BundleFiles, Handle, from_plain

T = TypeVar("T")
Divergence = tuple[np.ndarray, np.ndarray]
"""KL [A] in nats of each answer token of an item, and whether the top-1 tokens agree [A]."""
_ITEMS_PER_BUNDLE_JOB = 64
_PIECE_BYTES = 64 << 20


def summarise(found: Sequence[Divergence]) -> DistributionSummary:
    """What `trials.summarise_divergence` gives, from divergences that were computed elsewhere."""
    items = np.concatenate([np.full(len(kl), at) for at, (kl, _) in enumerate(found)])
    return distribution_summary(np.concatenate([kl for kl, _ in found]), np.concatenate([s for _, s in found]), items)


def quantized_by(pool: Pool) -> Callable[[UnitStore, Sequence[UnitBatch]], Iterator[QuantizedBatch]]:
    """How `UnitStore.prepare` hands its batches to workers."""

    def quantize(store: UnitStore, batches: Sequence[UnitBatch]) -> Iterator[QuantizedBatch]:
        for answer in pool.in_order(_quantizing(pool, store, batches)):
            for batch in answer.result:
                yield [(from_plain(plain), error) for plain, error in batch]

    return quantize


def _quantizing(pool: Pool, store: UnitStore, batches: Sequence[UnitBatch]) -> Iterator[Job]:
    """Jobs in the order of the batches; second moments of a projection are put where a job first needs them."""
    moments, held = store.second_moments, dict[tuple[int, str], Handle]()
    for part in in_parts(batches, min(pool.per_job(len(batches)), pool.threads)):
        wanted = dict.fromkeys((layer, projection) for layer, projection, _ in part)
        if moments is None:
            yield QuantizeBatches(store.quantizer, tuple(part), {}, {})
            continue
        # Gate and up share their moments. What no job needs any more is let go.
        keys = {key: (key[0], "down" if key[1] == "down" else "gate") for key in wanted}
        held = {
            key: held[key] if key in held else pool.put(moments.of(*key).numpy())
            for key in dict.fromkeys(keys.values())
        }
        yield QuantizeBatches(
            store.quantizer,
            tuple(part),
            {key: held[keys[key]] for key in wanted},
            {layer: moments.tokens(layer).numpy() for layer, _ in wanted},
        )


def experts_quantized_by(pool: Pool) -> Elsewhere:
    """How a sweep over the layers hands a layer's experts to workers: with their moments, which only the driver has."""

    def quantize(quantizer: ExpertQuantizer, inputs: LayerInputs, experts: Sequence[int]) -> Iterator[Matrices]:
        def jobs() -> Iterator[Job]:
            for part in in_parts(experts, min(pool.per_job(len(experts)), pool.threads)):
                handed = [inputs.of(expert) for expert in part]
                moments = [tuple(moment.numpy() for moment in moments) for moments, _ in handed]
                tokens = tuple(count for _, count in handed)
                yield QuantizeExperts(quantizer, tuple(part), pool.put(moments), tokens)

        for answer in pool.in_order(jobs()):
            for found in answer.result:
                yield {(unit, spec): from_plain(plain) for unit, spec, plain in found}

    return quantize


def experts_priced_by(pool: Pool) -> PriceElsewhere:
    """How gradients hand a layer's experts to workers: with what its tokens brought, which only the driver has."""

    def price(
        store: StreamedStore, layer: int, handed: HandedTexts, specs: Sequence[QuantSpec]
    ) -> Iterator[np.ndarray]:
        shapes = {name: store.model.unit_shape(layer, name) for name in PROJECTIONS}
        arrays, experts = pool.put(handed.to_arrays()), range(store.model.layers[layer].experts.count)

        def packed(part: Sequence[int]) -> dict[tuple[UnitKey, QuantSpec], np.ndarray]:
            units = [UnitKey(layer, expert, name) for expert in part for name in PROJECTIONS]
            return {
                (unit, spec): store.for_bundle(unit, spec)
                for unit in units
                for spec in specs
                if not spec.is_pruned and spec.fits(shapes[unit.projection][1])
            }

        def jobs() -> Iterator[Job]:
            for part in in_parts(experts, min(pool.per_job(len(experts)), pool.threads)):
                known = (arrays, handed.num_texts, pool.put(packed(part)))
                yield PriceExperts(layer, tuple(part), tuple(specs), *known)

        for answer in pool.in_order(jobs()):
            yield from answer.result

    return price


class RemoteModel:
    """The reference model on workers. local: the same on this machine, for tokens and calibration."""

    def __init__(self, pool: Pool, local: ReferenceModel) -> None:
        self.pool, self.local = pool, local
        self._weights: Handle = None
        self._log_probs: dict[int, tuple[Sequence[TokenPair], list[Handle]]] = {}

    def encode_pair(self, prompt: str, answer: str) -> TokenPair:
        """Tokens of a prompt and of the answer behind it."""
        return self.local.encode_pair(prompt, answer)

    @contextmanager
    def weights(self, mapping: Mapping[UnitKey | str, Handle]) -> Iterator[None]:
        """Compute with these matrices, handles of a PlainMatrix, inside a `with` block."""
        before, self._weights = self._weights, self.pool.put(Weights(mapping))
        try:
            yield
        finally:
            self._weights = before

    # -- text -------------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[GenerationRequest], progress: Progress = no_progress) -> list[Generation]:
        """As ReferenceModel.generate: first all drafts are verified, then what goes on is decoded, in its groups."""
        items = self.local.continuations(requests)
        started = [item for item in items if item.limit > 0]
        lengths = [len(item.prompt) + len(item.draft) for item in started]
        batches = [[started[at] for at in batch] for batch in length_batches(lengths, TOKENS_PER_FORWARD)]
        parts = list(in_parts(batches, self.pool.per_job(len(batches))))
        waiting: list[tuple[Continuation, tuple[Handle, int]]] = []
        done = len(items) - len(started)
        jobs = (Verify(self._weights, part) for part in parts)
        for part, answer in zip(parts, self.pool.in_order(jobs), strict=True):
            verified = [item for batch in part for item in batch]
            for at, (item, (tokens, is_done)) in enumerate(zip(verified, answer.result, strict=True)):
                item.tokens, item.done = tokens, is_done
                if not is_done:
                    waiting.append((item, (answer.kept, at)))
            done += sum(item.done for item in verified)
            progress(done, len(items))
        self._decode(waiting, lambda count: progress(done + count, len(items)))
        return self.local.generations(items)

    def _decode(
        self, waiting: Sequence[tuple[Continuation, tuple[Handle, int]]], progress: Callable[[int], None]
    ) -> None:
        groups = list(in_parts(waiting, ROWS_PER_STEP))
        parts = list(in_parts(groups, min(self.pool.per_job(len(groups)), self.pool.threads)))
        jobs = (
            Decode(self._weights, [[item for item, _ in g] for g in part], [[place for _, place in g] for g in part])
            for part in parts
        )
        count = 0
        for part, answer in zip(parts, self.pool.in_order(jobs), strict=True):
            for group, found in zip(part, answer.result, strict=True):
                for (item, _), tokens in zip(group, found, strict=True):
                    item.tokens, item.done = tokens, True
                count += len(group)
            progress(count)

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], progress: Progress = no_progress) -> list[AnswerScore]:
        """As ReferenceModel.answer_log_probs."""
        (scores,) = self.score_each([self._weights], pairs, progress)
        return scores

    def score_each(
        self, weights: Iterable[Handle], pairs: Sequence[tuple[str, str]], progress: Progress = no_progress
    ) -> Iterator[list[AnswerScore]]:
        """The scores of all answers under each of several weights, all at work at once."""
        runs = self._runs(self.local.encode_pairs(pairs), with_end=False)
        empty = AnswerScore(0.0, 0)
        return self._each(
            weights, runs, len(pairs), empty, progress, lambda w, at, run: Scores(w, [pairs[i] for i in run])
        )

    # -- tokens -----------------------------------------------------------------------------------------------------

    def forced_logits(self, pairs: Sequence[TokenPair]) -> list[np.ndarray]:
        """As ReferenceModel.forced_logits."""
        runs, empty = self._runs(pairs), np.empty((0, self.local.model.vocab_size), np.float32)
        (logits,) = self._each(
            [self._weights], runs, len(pairs), empty, no_progress, lambda w, at, run: Logits(w, [pairs[i] for i in run])
        )
        return logits

    def divergence_each(self, weights: Iterable[Handle], pairs: Sequence[TokenPair]) -> Iterator[DistributionSummary]:
        """KL to the checkpoint on answer tokens under each of several weights, all at work at once."""
        return self.summaries(weights, pairs, None)

    def summaries(
        self, weights: Iterable[Handle], pairs: Sequence[TokenPair], bundle: BundleFiles | None
    ) -> Iterator[DistributionSummary]:
        """As divergence_each; bundle: of the runtime on it."""
        runs, kept = self._runs(pairs), self._kept_log_probs(pairs)
        empty = np.empty(0), np.empty(0, bool)

        def job(handle: Handle, at: int, run: Sequence[int]) -> Job:
            return Divergences(handle, [pairs[i] for i in run], kept[at], bundle)

        return map(summarise, self._each(weights, runs, len(pairs), empty, no_progress, job))

    def _kept_log_probs(self, pairs: Sequence[TokenPair]) -> list[Handle]:
        """Handles of the checkpoint's log probabilities, one for each run of batches; computed once."""
        if id(pairs) not in self._log_probs:
            jobs = (KeepLogProbs([pairs[i] for i in run]) for run in self._runs(pairs))
            self._log_probs = {id(pairs): (pairs, [answer.kept for answer in self.pool.in_order(jobs)])}
        return self._log_probs[id(pairs)][1]

    def _runs(self, pairs: Sequence[TokenPair], with_end: bool = True) -> list[list[int]]:
        """Indices of the pairs that have tokens to score: consecutive batches of the reference model, run by run."""
        rows, _, scored = forced_rows(pairs, self.local.model.eos_token_ids[:1] if with_end else ())
        usable = [index for index, count in enumerate(scored) if count]
        batches = length_batches([len(rows[index]) for index in usable], TOKENS_PER_FORWARD)
        parts = in_parts(batches, self.pool.per_job(len(batches)))
        return [[usable[at] for batch in part for at in batch] for part in parts]

    def _each(
        self,
        weights: Iterable[Handle],
        runs: Sequence[Sequence[int]],
        count: int,
        empty: T,
        progress: Progress,
        job: Callable[[Handle, int, Sequence[int]], Job],
    ) -> Iterator[list[T]]:
        """For each of the weights, what the jobs over all runs say of `count` items, `empty` of those in no run."""
        if not runs:
            yield from ([empty] * count for _ in weights)
            return
        answers = self.pool.in_order(job(handle, at, run) for handle in weights for at, run in enumerate(runs))
        while True:
            results, done = [empty] * count, 0
            for run in runs:
                answer = next(answers, None)
                if answer is None:
                    return
                for index, result in zip(run, answer.result, strict=True):
                    results[index] = result
                done += len(run)
                progress(done, count)
            yield results


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

    def generate(self, requests: Sequence[GenerationRequest], progress: Progress) -> list[Generation]:
        """As the runtime's own engine."""
        return self._collect(requests, progress, lambda part: BundleGenerations(self.bundle, part))

    def answer_log_probs(self, pairs: Sequence[tuple[str, str]], progress: Progress) -> list[AnswerScore]:
        """As the runtime's own engine."""
        return self._collect(pairs, progress, lambda part: Scores(None, part, self.bundle))

    def forced_logits(self, pairs: Sequence[TokenPair]) -> list[np.ndarray]:
        """As the runtime's own engine."""
        return self._collect(pairs, no_progress, lambda part: Logits(None, part, self.bundle))

    def _collect(self, items: Sequence[Any], progress: Progress, job: Callable[[Sequence[Any]], Job]) -> list[Any]:
        parts = list(in_parts(items, min(_ITEMS_PER_BUNDLE_JOB, -(-len(items) // self._pool.count))))
        answers: Iterator[Answer] = self._pool.in_order(job(part) for part in parts)
        found: list[Any] = []
        for answer in answers:
            found += answer.result
            progress(len(found), len(items))
        return found


class RemoteBundle(RemoteEngine):
    """The same beside a reference model on the same workers, to which it is compared there: no logits travel."""

    def __init__(self, model: RemoteModel, folder: Path) -> None:
        super().__init__(model.pool, folder)
        self._model = model

    def divergence(self, pairs: Sequence[TokenPair]) -> DistributionSummary:
        """KL and agreement over the answer tokens of the pairs."""
        (summary,) = self._model.summaries([None], pairs, self.bundle)
        return summary
