"""The certificate of a model that does not fit in memory: KL on held-out answers, and what a loss target asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from moec.evaluation.data import SplitData
from moec.evaluation.tasks import Item
from moec.profiles.probe import resident_set_bytes

from ..bundle.certify import DivergenceCertificate, HeldOutTask, TaskCertificate, certify_divergence, certify_task
from ..families import Lowering
from ..request.options import Talk
from ..request.ports import BundleEngine
from ..request.request import CompileRequest
from ..workspace.parallel import one_torch_thread
from .planning import runtime_bytes
from .slot import output_head
from .sweep import SweepInputs, SweepResult
from .trials import StreamedTrials

Certificates = tuple[dict[str, TaskCertificate], dict[str, DivergenceCertificate]]


def certify_layerwise(
    request: CompileRequest,
    partial: Path,
    trials: StreamedTrials,
    swept: tuple[SweepInputs, SweepResult],
    splits: Sequence[SplitData],
    shots: Mapping[str, tuple[Item, ...]],
) -> Certificates:
    """KL of the bundle on each task's held-out answers; where the target is a loss, inside that of the whole task.

    For a loss the checkpoint's own weights answer as well, in a bundle in passing: each of the two has half the memory.
    A runtime counts all that its process holds, so the second is told what the first has taken. Answers come from
    whoever answers for the trials, workers of a cluster perhaps; the KL always from this machine.
    """
    trials.close()
    room = runtime_bytes(trials.lowering.model, request.memory_limit_bytes)
    with request.open_runtime(partial, room) as engine:
        divergences = certify_swept(trials.lowering, *swept, engine, request.talk)
    options = request.options
    if options.target.kind != "loss":
        return {}, divergences
    found = {}
    with ExitStack() as opened:
        before = resident_set_bytes()
        reference = opened.enter_context(trials.unquantized(share=2))
        taken = max(resident_set_bytes() - before, 0)
        engine = opened.enter_context(trials.open_runtime(partial, room // 2 + taken))
        for split in splits:
            name = split.task.name
            found[name] = certify_task(
                HeldOutTask(split.task, split.test, shots[name]),
                reference,
                engine,
                options.target,
                request.talk,
                options.confidence,
                divergences[name].divergence,
            )
    return found, {}


def certify_swept(
    lowering: Lowering, inputs: SweepInputs, found: SweepResult, engine: BundleEngine, talk: Talk
) -> dict[str, DivergenceCertificate]:
    """KL of the bundle, run by the runtime that ships, on each task's held-out answers."""
    head = output_head(lowering)

    def of_task(task: str) -> DivergenceCertificate:
        texts, states = inputs.held_out[task], found.held_out[task]
        starts = [0, *np.cumsum(texts.counts).tolist()]

        def reference(first: int, last: int) -> list[np.ndarray]:
            with one_torch_thread():  # the same bits whatever the processors
                log_p = head.logits(states[starts[first] : starts[last]])
                log_p -= log_p.logsumexp(-1, keepdim=True)
            return [part.numpy() for part in torch.split(log_p, texts.counts[first:last])]

        return certify_divergence(task, texts.pairs, reference, lowering.model.vocab_size, engine, talk)

    return {task: of_task(task) for task in inputs.held_out}
