"""Answers under the weights of a plan, one layer at a time: how far they are from those of the unquantized model.

Shapes: A scored tokens of all texts, a of some of them, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moec.evaluation.statistics import DistributionSummary, distribution_summary
from moec.manifests.model import UnitKey
from moec.manifests.progress import Progress

from ..quantization.unit_store import UnitStore
from ..request.plan import CompilePlan
from ..walker.loaded_layer import LoadedLayer, Replaced, WeightName, embedded
from ..walker.output_head import OutputHead, divergence, head_workers, tokens_at_once
from ..walker.texts import AnswerTexts, TextStates, text_batches
from ..workspace.parallel import Workers, workers

KEPT_LOG_PROBS = 1 << 25
"""Log-probabilities of the unquantized model that are kept between plans. If there are more, they are made again."""


@dataclass(frozen=True, slots=True)
class AnswerMeasures:
    """Scored tokens under the weights of a plan, text after text.

    kl: to the unquantized model in nats, float64 [A].
    agrees: whether the most likely token is the unquantized model's, bool [A].
    nll: -log p of the answer's own token in nats, float64 [A].
    """

    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    nll: NDArray[np.float64]

    def summary(self, counts: list[int], tasks: Sequence[int] = ()) -> DistributionSummary:
        """Return mean KL and agreement.

        counts: scored tokens of each text.
        tasks: number of texts of each task. Of several, each has a mean of its own, too.
        """
        texts = np.repeat(np.arange(len(counts)), counts)
        whole = distribution_summary(self.kl, self.agrees, texts)
        if len(tasks) < 2:
            return whole
        of_task = np.repeat(np.repeat(np.arange(len(tasks)), tasks), counts)
        of_one = [of_task == task for task in range(len(tasks))]
        summaries = [distribution_summary(self.kl[at], self.agrees[at], texts[at]) for at in of_one]
        return replace(whole, by_task=tuple((summary.mean, summary.standard_error) for summary in summaries))


def planned_weights(plan: CompilePlan, store: UnitStore) -> Replaced:
    """Return the weights that a plan stores below 16 bits. One is made at a time."""

    def weight(name: WeightName) -> Tensor | None:
        if isinstance(name, UnitKey):
            spec = plan.units[name]
            return None if spec.bitwidth == 16 else store.weight(name, spec)
        spec = plan.dense[name]
        return None if spec.bitwidth == 16 else store.dense_weight(name, spec)

    return weight


class AnswerMeter(Protocol):
    """Measures answers under the weights of plans, on this machine or on others.

    answers: the texts.
    """

    answers: AnswerTexts

    def measure_each(
        self, plans: Iterable[tuple[CompilePlan, UnitStore]], items: int | None = None
    ) -> Iterator[AnswerMeasures]:
        """Yield the measures of each plan, in order.

        items: number of texts, from the first. None: all.
        """
        ...

    def release(self) -> None:
        """Give back memory that a runtime needs now."""
        ...


class AnswerWalk:
    """Passes answers through the layers of one model.

    make_slot: opens the slot of the layers.
    answers: the texts.
    progress: called with (layers done, layers in all) of each plan.
    own_states: normed states of the unquantized model at the scored tokens, [A, D]; None: they are computed when first
        needed.
    keeps_slot: the loaded layers stay in memory after `release`.
    """

    def __init__(
        self,
        make_slot: Callable[[], LoadedLayer],
        answers: AnswerTexts,
        threads: int,
        progress: Progress,
        own_states: Tensor | None = None,
        keeps_slot: bool = True,
    ) -> None:
        self._make_slot, self.answers, self._threads, self._progress = make_slot, answers, threads, progress
        self._own_states, self._keeps_slot = own_states, keeps_slot
        self._slot: LoadedLayer | None = None
        self._own_log_probs: list[Tensor] = []
        self._first: dict[int, AnswerWalk] = {}

    def release(self) -> None:
        """Give back the memory of the layers, unless they stay."""
        if not self._keeps_slot:
            self._slot = None
        for walk in self._first.values():
            walk.release()

    def measure_each(
        self, plans: Iterable[tuple[CompilePlan, UnitStore]], items: int | None = None
    ) -> Iterator[AnswerMeasures]:
        """See AnswerMeter."""
        walk = self if items is None or items >= len(self.answers.counts) else self._of_first(items)
        for plan, store in plans:
            yield walk.measure(planned_weights(plan, store))

    def _of_first(self, items: int) -> AnswerWalk:
        """Return the same for the first texts. Their batches, and so their bits, are those of no other texts."""
        if items not in self._first:
            answers, keeps = self.answers.first(items), self._keeps_slot
            self._first[items] = AnswerWalk(self._opened, answers, self._threads, self._progress, None, keeps)
        return self._first[items]

    def _opened(self) -> LoadedLayer:
        self._slot = self._slot or self._make_slot()
        return self._slot

    def measure(self, weights: Replaced) -> AnswerMeasures:
        """Return the measures under these weights."""
        slot = self._opened()
        layers, chunks = slot.model.num_layers, scored_chunks(self.answers, slot.model.vocab_size)
        steps = layers + len(chunks)
        if self._own_states is None:
            self._own_states = self._states(slot, lambda name: None, steps)
        states, own_head = self._states(slot, weights, steps), slot.head()
        matrix = weights(slot.model.head_name)
        head = own_head if matrix is None else own_head.with_matrix(matrix)
        targets = torch.tensor([token for row in self.answers.targets for token in row])
        kl, agrees, nll = np.empty(len(states)), np.empty(len(states), np.bool_), np.empty(len(states))

        def compare(chunk: int) -> None:
            tokens, log_p = chunks[chunk], log_probs_of(chunk)
            log_q = head.logits(states[tokens]).log_softmax(-1)
            token_kl, token_agrees = divergence(log_p, log_q)
            token_nll = -log_q.gather(1, targets[tokens].to(log_q.device).unsqueeze(1)).squeeze(1)
            at = tokens.numpy()  # numpy takes a tensor of one element for a number
            kl[at], agrees[at] = token_kl.double().cpu().numpy(), token_agrees.cpu().numpy()
            nll[at] = token_nll.double().cpu().numpy()

        with head_workers(self._threads) as pool:
            log_probs_of = self._own(own_head, self._own_states, chunks, pool)
            for done, _ in enumerate(pool.in_order(compare, range(len(chunks))), layers + 1):
                self._progress(done, steps)
        return AnswerMeasures(kl, agrees, nll)

    def _states(self, slot: LoadedLayer, weights: Replaced, steps: int) -> Tensor:
        """Return the normed states at the scored tokens under these weights, [A, D].

        steps: steps of the whole measurement, for the progress.
        """
        texts, layers = self._begin(slot, weights("embedding")), slot.model.num_layers
        with workers(self._threads) as pool:
            for layer in range(layers):
                slot.load(layer, weights)
                slot.run([texts], pool)
                self._progress(layer + 1, steps)
        return slot.normed(texts.scored_states(self.answers.counts))

    def _begin(self, slot: LoadedLayer, table: Tensor | None) -> TextStates:
        """Return the texts before the first layer. They alone keep the table, [V, D], as long as they need it.

        table: the embedding under a plan; None for the checkpoint's own.
        """
        scale = slot.model.embedding_scale
        return TextStates.begin(
            self.answers.texts, lambda ids: embedded(ids, slot.own("embedding") if table is None else table, scale)
        )

    def _own(
        self, head: OutputHead, states: Tensor, chunks: Sequence[Tensor], pool: Workers
    ) -> Callable[[int], Tensor]:
        """Return a function that gives the unquantized model's log-probabilities of the tokens of a chunk."""

        def computed(chunk: int) -> Tensor:
            return head.logits(states[chunks[chunk]]).log_softmax(-1)

        if len(states) * len(head) > KEPT_LOG_PROBS:
            return computed
        if not self._own_log_probs:
            self._own_log_probs = list(pool.in_order(computed, range(len(chunks))))
        return self._own_log_probs.__getitem__


def scored_chunks(answers: AnswerTexts, vocabulary: int) -> list[Tensor]:
    """Return the scored tokens whose logits are computed at once, as indices, int64 [a].

    They belong to one batch of texts. Another machine that has some of the batches computes the same products.
    """
    ends = np.cumsum(answers.counts).tolist()
    spans = [torch.arange(end - count, end) for end, count in zip(ends, answers.counts, strict=True)]
    batches = (torch.cat([spans[text] for text in batch]) for batch in text_batches(answers.texts))
    return [chunk for tokens in batches if len(tokens) for chunk in torch.split(tokens, tokens_at_once(vocabulary))]
