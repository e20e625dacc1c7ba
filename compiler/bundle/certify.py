"""Certify a bundle: KL on held-out answers, then the tasks if they are measured (`measures_tasks`).

The runtime runs the written bundle on items that no other stage uses. Its results are compared with those of the
unquantized model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moec.evaluation.data import ItemSet, SplitData
from moec.evaluation.engine import TextEngine
from moec.evaluation.results import EvaluationResult, finite
from moec.evaluation.run import compare, evaluate, joined
from moec.evaluation.statistics import ERROR, DistributionSummary, LossEstimate, Verdict, distribution_summary, judge
from moec.evaluation.statistics import divergence as token_divergences
from moec.evaluation.tasks import Item

from ..families import Lowering
from ..request.options import Talk
from ..request.plan import plain_plan
from ..request.ports import LocalEngine
from ..request.targets import Target
from ..request.task_data import Shots
from ..walker.output_head import output_head
from ..walker.texts import LOGITS_AT_ONCE, AnswerTexts
from ..walker.torch_device import CPU
from ..workspace.parallel import one_torch_thread
from .looks import look_errors, look_positions
from .plan_bundles import UNQUANTIZED, PlanBundles, answers_name

MODES_ITEMS = 500
"""Held-out items for the measurement of lossy modes, one sequence at a time."""
LogProbs = Callable[[int, int], np.ndarray]
"""Gives log probabilities [n, V] of the reference, from one scored token of all answers to another."""


@dataclass(frozen=True, slots=True)
class TaskCertificate:
    """One task on held-out items.

    baseline: result of the checkpoint.
    value: result of the bundle.
    loss: relative loss, or None if the baseline scores 0.
    verdict: verdict on the loss, or None if the target is not a loss.
    divergence: KL and agreement.
    settings: what differs from the task's own definition, such as the digest of a chat template.
    """

    baseline: EvaluationResult
    value: EvaluationResult
    loss: LossEstimate | None
    verdict: Verdict | None
    divergence: DistributionSummary
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the entry of the task in quality.json. Without times, equal bundles have equal reports."""
        return {
            "metric": self.value.metric,
            "n": self.value.n,
            "baseline": self.baseline.value,
            "baseline_interval95": [finite(bound) for bound in self.baseline.interval95],
            "value": finite(self.value.value),
            "value_interval95": [finite(bound) for bound in self.value.interval95],
            "other_metrics": {
                name: {"baseline": self.baseline.other_metrics[name], "value": value}
                for name, value in self.value.other_metrics.items()
            },
            "loss": None if self.loss is None else self.loss.to_json(),
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            "kl": self.divergence.to_json(),
            "data_sha256": self.value.data_sha256,
            **self._answers(),
            **({"settings": dict(self.settings)} if self.settings else {}),
        }

    def _answers(self) -> dict[str, object]:
        """Return the limit of generated answers, and how many it cut."""
        limit, cut = self.value.max_new_tokens, {"baseline": self.baseline.cut, "value": self.value.cut}
        return {"max_new_tokens": limit, "cut": cut} if limit else {}


@dataclass(frozen=True, slots=True)
class DivergenceCertificate:
    """KL on one task's held-out answers, for a reference that scores answers and generates none.

    divergence: KL and agreement.
    items: number of answers.
    """

    divergence: DistributionSummary
    items: int


def certify(
    partial: Path,
    bundles: PlanBundles,
    held_out: Mapping[str, AnswerTexts],
    states: Mapping[str, Tensor],
    splits: Sequence[SplitData],
    shots: Shots,
    share: float = 1.0,
    is_early: bool = False,
    device: torch.device = CPU,
    refuses: Callable[[Mapping[str, DivergenceCertificate]], bool] = lambda divergences: False,
) -> tuple[dict[str, TaskCertificate], dict[str, DivergenceCertificate]]:
    """Measure the KL of the bundle on each task's held-out answers, then the tasks, unless the KL refuses the bundle.

    For the tasks the checkpoint answers as well, once, from a temporary bundle of its own weights. One runtime is open
    at a time, and has all memory that is left.
    Other machines of a cluster may generate answers. The KL always comes from this machine.
    held_out: held-out answers by task.
    states: normed residual stream of the unquantized model at their scored tokens, [A, D], by task.
    splits: the tasks to measure, or none. The KL then stands alone.
    share, is_early: of a verdict, see `certify_task`.
    device: where torch computes the logits of the checkpoint.
    refuses: called with the KL of each task.
    """
    request, lowering = bundles.request, bundles.lowering
    with request.open_runtime(partial, bundles.room_bytes) as engine:
        divergences = {
            task: _certify_answers(lowering, task, answers, states[task], engine, request.talk, device)
            for task, answers in held_out.items()
        }
    if not splits or refuses(divergences):
        return {}, divergences
    certificates = {}
    with (
        Turns(bundles, partial) as turns,
        bundles.recorded(UNQUANTIZED, turns.checkpoint) as checkpoint,
        bundles.recorded(answers_name(partial), turns.bundle) as bundle,
    ):
        for split in splits:
            name = split.task.name
            certificates[name] = certify_task(
                split.test,
                shots[name],
                checkpoint,
                bundle,
                request.options.target,
                request.talk,
                divergences[name].divergence,
                request.options.confidence,
                share,
                is_early,
            )
    return certificates, {}


class Turns:
    """The runtime on the checkpoint or on the bundle. Opening one closes the other."""

    def __init__(self, bundles: PlanBundles, partial: Path) -> None:
        self._bundles, self._partial = bundles, partial
        self._written, self._opened = ExitStack(), ExitStack()
        self._checkpoint: Path | None = None
        self._path = Path()
        self._engine: TextEngine | None = None

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *raised: object) -> None:
        try:
            self._opened.close()
        finally:
            self._written.close()

    def bundle(self) -> TextEngine:
        """Return the runtime on the bundle."""
        return self._open(self._partial)

    def checkpoint(self) -> TextEngine:
        """Return the runtime on the checkpoint's own weights. They are written once."""
        if self._checkpoint is None:
            lowering, quantizer = self._bundles.lowering, self._bundles.request.options.quantizer
            self._opened.close()
            self._engine = None
            plain = plain_plan(lowering.model, lowering.spec_16bit, quantizer)
            self._checkpoint = self._written.enter_context(self._bundles.written(plain, None, UNQUANTIZED))
        return self._open(self._checkpoint)

    def _open(self, path: Path) -> TextEngine:
        bundles = self._bundles
        if self._engine is None or path != self._path:
            self._opened.close()
            self._engine = None
            self._engine = self._opened.enter_context(bundles.open_runtime(path, bundles.room_bytes))
            self._path = path
        return self._engine


def _certify_answers(
    lowering: Lowering,
    task: str,
    answers: AnswerTexts,
    states: Tensor,
    engine: LocalEngine,
    talk: Talk,
    device: torch.device,
) -> DivergenceCertificate:
    """Measure the KL of the bundle, run by the shipped runtime, on one task's held-out answers."""
    head = output_head(lowering, device)

    def reference(start: int, end: int) -> np.ndarray:
        with one_torch_thread():  # the same bits for any number of processors
            return np.asarray(head.log_probs(states[start:end]).cpu().numpy())

    return certify_divergence(task, answers, reference, lowering.model.vocab_size, engine, talk)


def certify_divergence(
    task: str,
    answers: AnswerTexts,
    reference_log_probs: LogProbs,
    vocab_size: int,
    engine: LocalEngine,
    talk: Talk,
) -> DivergenceCertificate:
    """Compare the bundle with the reference on answers.

    Logits of the bundle are compared as they are computed. Of the reference, LOGITS_AT_ONCE are held.
    """
    progress, pairs = talk.progress(f"KL on {task}"), answers.pairs
    compared = _ComparedTokens(answers.counts, reference_log_probs, max(1, LOGITS_AT_ONCE // vocab_size))
    for first, last in compared.groups():

        def report(done: int, _: int, before: int = first) -> None:
            progress(before + done, len(pairs))

        engine.force_answers(pairs[first:last], compared.add, report)
    items = np.repeat(np.arange(len(pairs)), answers.counts)
    return DivergenceCertificate(distribution_summary(compared.kl, compared.agrees, items), len(pairs))


class _ComparedTokens:
    """KL and agreement of the scored tokens of answers, filled as logits come.

    counts: number of scored tokens of each answer.
    at_once: maximum number of tokens for which log probabilities of the reference are held.
    kl: nats of each scored token.
    agrees: whether the most likely token is the same.
    """

    def __init__(self, counts: Sequence[int], log_probs: LogProbs, at_once: int) -> None:
        self._counts, self._log_probs, self._at_once = counts, log_probs, at_once
        self._next = [0, *itertools.accumulate(counts)]  # of each answer, the first token that is not filled
        self.kl, self.agrees = np.full(self._next[-1], np.nan), np.zeros(self._next[-1], bool)
        self._held, self._rows = range(0), np.empty((0, 0), np.float32)
        self._first, self._tokens = 0, range(0)  # of the present group: its first answer, and all tokens

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield consecutive answers whose tokens can be held at once, and longer answers alone, before they are filled.

        Yields the first answer and the one after the last.
        """
        first = 0
        while first < len(self._counts):
            last, tokens = first + 1, self._counts[first]
            while last < len(self._counts) and tokens + self._counts[last] <= self._at_once:
                tokens += self._counts[last]
                last += 1
            self._first, self._tokens = first, range(self._next[first], self._next[first] + tokens)
            yield first, last
            first = last

    def add(self, index: int, logits: np.ndarray) -> None:
        """Fill the next tokens of an answer.

        index: of the answer in the present group.
        logits: of the bundle, [n, V].
        """
        answer = self._first + index
        while len(logits):
            start = self._next[answer]
            log_p = self._reference(start)[: len(logits)]
            end = start + len(log_p)
            self.kl[start:end], self.agrees[start:end] = token_divergences(log_p, logits[: len(log_p)])
            self._next[answer], logits = end, logits[len(log_p) :]

    def _reference(self, token: int) -> np.ndarray:
        """Return log probabilities of the reference from a token on, as many as are held."""
        if token not in self._held:
            self._rows = np.empty((0, 0), np.float32)  # freed before the next ones are made
            start = token - (token - self._tokens.start) % self._at_once
            self._held = range(start, min(start + self._at_once, self._tokens.stop))
            self._rows = self._log_probs(self._held.start, self._held.stop)
        return self._rows[token - self._held.start :]


def certify_task(
    items: ItemSet,
    shots: tuple[Item, ...],
    reference: TextEngine,
    engine: TextEngine,
    target: Target,
    talk: Talk,
    divergence: DistributionSummary,
    confidence: float | None = None,
    share: float = 1.0,
    is_early: bool = False,
) -> TaskCertificate:
    """Evaluate both engines, compare item by item, and judge the loss against the target.

    items: items that only the certificate uses.
    shots: solved examples before each item.
    reference: the checkpoint.
    divergence: KL and agreement on held-out answers.
    confidence: of the verdict; None: 95 %.
    share: of the error, for one of several bundles of which any may be supported.
    is_early: a verdict on a loss may come before the last item, see looks.py.
    """
    task, looks = items.task, look_positions(items, is_early and target.kind == "loss")
    error = round(share * (ERROR if confidence is None else 1 - confidence), 12)
    errors = look_errors(list(itertools.accumulate(map(len, looks))), error)
    baselines, values = list[EvaluationResult](), list[EvaluationResult]()
    placed: list[int] = []
    for positions, look_error in zip(looks, errors, strict=True):
        chosen = [items.items[at] for at in positions]
        title = f"{task.name}, items {len(placed) + 1} to {len(placed) + len(chosen)}"
        answered = evaluate(task, chosen, reference, shots=shots, progress=talk.progress(f"baseline on {title}"))
        baselines.append(answered)
        drafts = [task.continuation(item.prediction) for item in answered.items]
        progress = talk.progress(f"bundle on {title}")
        values.append(evaluate(task, chosen, engine, shots=shots, drafts=drafts, progress=progress))
        placed += positions
        looked = [items.items[at] for at in sorted(placed)]
        baseline, value = (joined(task, looked, results, shots, placed) for results in (baselines, values))
        # A checkpoint that solves no item has no relative loss, and needs another target. The first items may be hard.
        is_stated = baseline.value > 0 or (target.kind == "loss" and len(placed) == len(items))
        loss = compare(task, baseline, value, error=look_error) if is_stated else None
        verdict = judge(loss, target.value) if loss is not None and target.kind == "loss" else None
        if verdict is not None and (verdict.supported or verdict.refuted):
            break
    return TaskCertificate(baseline, value, loss, verdict, divergence, task.settings)
