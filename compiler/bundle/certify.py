"""Certify a bundle: KL on held-out answers, then the tasks if they are measured (`measures_tasks`).

Its results are compared with those of the unquantized model. `certificates.py` measures one task, or the KL on one
task's answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from torch import Tensor

from moec.evaluation.data import SplitData
from moec.evaluation.engine import TextEngine
from moec.profiles.probe import resident_set_bytes

from ..families import Lowering
from ..request.options import Talk
from ..request.plan import plain_plan
from ..request.ports import LocalEngine
from ..request.task_data import Shots
from ..walker.output_head import output_head
from ..walker.texts import AnswerTexts
from ..workspace.parallel import one_torch_thread
from .certificates import DivergenceCertificate, TaskCertificate, certify_divergence, certify_task
from .plan_bundles import UNQUANTIZED, PlanBundles

Certificates = tuple[dict[str, TaskCertificate], dict[str, DivergenceCertificate]]


def certify(
    partial: Path,
    bundles: PlanBundles,
    held_out: Mapping[str, AnswerTexts],
    states: Mapping[str, Tensor],
    splits: Sequence[SplitData],
    shots: Shots,
) -> Certificates:
    """Measure the KL of the bundle on each task's held-out answers, then the tasks.

    For the tasks the checkpoint answers as well, from a temporary bundle of its own weights. Each of the two runtimes
    has half of the memory that is left. A runtime counts all memory of its process, and the second that of the first.
    Other machines of a cluster may generate answers. The KL always comes from this machine.
    held_out: held-out answers by task.
    states: normed residual stream of the unquantized model at their scored tokens, [A, D], by task.
    splits: the tasks to measure, or none. The KL then stands alone.
    """
    request, lowering = bundles.request, bundles.lowering
    with request.open_runtime(partial, bundles.room_bytes) as engine:
        divergences = {
            task: _certify_answers(lowering, task, answers, states[task], engine, request.talk)
            for task, answers in held_out.items()
        }
    if not splits:
        return {}, divergences
    certificates = {}
    plain = plain_plan(lowering.model, lowering.spec_16bit, request.options.quantizer)
    with ExitStack() as opened:
        half = (bundles.room_bytes - resident_set_bytes()) // 2
        reference = opened.enter_context(bundles.opened(plain, None, UNQUANTIZED, bundles.room_bytes - half))
        certified: TextEngine = opened.enter_context(bundles.open_runtime(partial, bundles.room_bytes))
        for split in splits:
            name = split.task.name
            certificates[name] = certify_task(
                split.test,
                shots[name],
                reference,
                certified,
                request.options.target,
                request.talk,
                divergences[name].divergence,
                request.options.confidence,
            )
    return certificates, {}


def _certify_answers(
    lowering: Lowering, task: str, answers: AnswerTexts, states: Tensor, engine: LocalEngine, talk: Talk
) -> DivergenceCertificate:
    """Measure the KL of the bundle, run by the shipped runtime, on one task's held-out answers."""
    head = output_head(lowering)

    def reference(start: int, end: int) -> np.ndarray:
        with one_torch_thread():  # the same bits for any number of processors
            return np.asarray(head.log_probs(states[start:end]).numpy())

    return certify_divergence(task, answers, reference, lowering.model.vocab_size, engine, talk)
