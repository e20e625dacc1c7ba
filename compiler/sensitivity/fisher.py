"""Cost of rounding a unit, to second order: KL from the Fisher information, with one backward pass per text.

Let z be the logits at the answer tokens, p their softmax, and dz the change of z from a change D of one projection. Up
to higher orders of D, the mean KL is

    1/2 sum over tokens of dz^T (diag p - p p^T) dz / tokens.

Let e be Gaussian. The vector v = (diag sqrt p - p sqrt p^T) e has that matrix as its covariance. Let d be the gradient
of v . z at the outputs of the projection. The sum over tokens is then the mean of

    (sum over the text's tokens of d . D x)^2.

One backward pass gives d for every projection of every expert. D x costs one forward pass per format. No plan is
applied, and no unit is measured.
The prediction ignores tokens that later routers send to other experts. In early layers of the example, that effect
doubles the KL.
Source: Optimal Brain Surgeon (second-order cost of a change of weights). The curvature is the Fisher information, as in
New Insights and Perspectives on the Natural Gradient Method, section 9. Gaussian vectors sketch it.
Shapes: B texts of a batch, T tokens of a text, A answer tokens, U units, S formats, V vocabulary.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moec.evaluation.text_pairs import TokenPair, forced_rows
from moec.manifests.errors import OptionError
from moec.manifests.model import PROJECTIONS, ModelSpec, UnitKey
from moec.manifests.progress import Progress
from moec.manifests.quant import QuantSpec

from ..quantization.unit_store import UnitStore
from ..reference.expert_module import gated, projection_of
from ..reference.model import ReferenceModel
from ..reference.network import length_batches
from ..workspace.journal import Journal
from ..workspace.parallel import workers

TEXTS = 384
"""Number of texts over all tasks. With two sketches each, ranks hardly change with more texts."""
SKETCHES = 2
"""Gaussian vectors per text. Each needs one more backward pass. A quarter less variance would double the time."""
TOKENS_PER_BACKWARD = 512
"""Tokens of one pass. They bound its graph."""
_RECORDED = "moec_recorded"
_FLOAT_BYTES = 4


@dataclass(slots=True)
class _Record:
    """One expert in one pass.

    tokens: indices of its tokens, flat over B x T.
    inputs: inputs of its projections.
    outputs: outputs of its projections.
    """

    layer: int
    expert: int
    tokens: Tensor
    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, ...]


class _Pass(threading.local):
    """The records of this thread's pass."""

    def __init__(self) -> None:
        self.records: list[_Record] = []


class FisherProxy:
    """Predicts the KL of every unit in every format; see the head of this file. Formats of 16 bits are left out."""

    def __init__(self, reference: ReferenceModel, store: UnitStore, specs: Sequence[QuantSpec]) -> None:
        self._reference, self._store = reference, store
        self._specs = [spec for spec in specs if spec.bitwidth < 16]
        self._units = [UnitKey(*key, p) for key in store.model.expert_keys() for p in PROJECTIONS]
        self._place = {unit: at for at, unit in enumerate(self._units)}
        self._pass = _Pass()

    def run(self, pairs: Sequence[TokenPair], seed: int, threads: int, progress: Progress) -> np.ndarray:
        """Return the predicted KL in nats per answer token, float64 [U, S]. Formats that do not fit are NaN.

        Units are ordered as `expert_keys` x PROJECTIONS. The result has the same bits for any number of threads.
        pairs: token ids of prompts and answers that neither search nor certificate measures. At most
            TOKENS_PER_BACKWARD
            tokens of a text are used.
        """
        model = self._reference.model
        longest = min(TOKENS_PER_BACKWARD, model.max_positions)
        rows, _, scored = forced_rows([shortened(pair, longest) for pair in pairs], model.eos_token_ids[:1])
        usable = [at for at, count in enumerate(scored) if count]
        batches = length_batches([len(rows[at]) for at in usable], TOKENS_PER_BACKWARD)
        jobs = [[usable[at] for at in batch] for batch in batches]
        squares = np.zeros((len(self._units), len(self._specs)))
        with self._recording(), workers(threads) as pool:
            results = pool.in_order(lambda job: self._squares(job, rows, scored, seed), jobs)
            for done, result in enumerate(results, 1):
                squares += result
                progress(done, len(jobs))
        tokens = sum(scored[at] for at in usable)
        for place, unit in enumerate(self._units):
            columns = model.unit_shape(unit.layer, unit.projection)[1]
            squares[place, [not is_asked(unit.projection, spec, columns) for spec in self._specs]] = np.nan
        return squares / (2 * SKETCHES * max(tokens, 1))

    def _squares(
        self, job: Sequence[int], rows: Sequence[Sequence[int]], scored: Sequence[int], seed: int
    ) -> np.ndarray:
        """Return the sum over texts and sketches of (sum over tokens of d . D x)^2, [U, S]."""
        network = self._reference.network
        self._pass.records = []
        hidden = network.hidden_with_graph([rows[at] for at in job])
        width = hidden.shape[1]
        spans = [states[len(rows[at]) - scored[at] : len(rows[at])] for states, at in zip(hidden, job, strict=True)]
        logits = network.logits(torch.cat(spans))
        records, self._pass.records = self._pass.records, []
        outputs = [output for record in records for output in record.outputs]
        totals = torch.zeros(SKETCHES, len(job), len(self._units), len(self._specs), dtype=torch.float64)
        for number in range(SKETCHES):
            vector = sketch(logits.detach(), [seed, job[0], number])
            graph = number + 1 < SKETCHES
            gradients = torch.autograd.grad((logits * vector).sum(), outputs, retain_graph=graph, allow_unused=True)
            for at, record in enumerate(records):
                own = gradients[len(PROJECTIONS) * at : len(PROJECTIONS) * (at + 1)]
                self._add(totals[number], record, own, width)
        return totals.square().sum((0, 1)).numpy()

    @torch.no_grad()
    def _add(self, totals: Tensor, record: _Record, gradients: Sequence[Tensor | None], width: int) -> None:
        """Add one expert's tokens to the sums of their texts.

        totals: [B, U, S].
        """
        text = record.tokens // width
        for projection, gradient in zip(PROJECTIONS, gradients, strict=True):
            unit = UnitKey(record.layer, record.expert, projection)
            original = self._store.original(record.layer, projection)[record.expert]
            for column, spec in enumerate(self._specs):
                if gradient is None or not is_asked(projection, spec, original.shape[1]):
                    continue
                change = -original if spec.is_pruned else self._store.weight(unit, spec) - original
                moved = record.inputs[projection] @ change.T
                sums = (moved * gradient).sum(1, dtype=torch.float64)
                totals[:, self._place[unit], column].index_add_(0, text, sums)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record inputs and outputs of experts inside the block."""
        network = self._reference.network
        before = network.model.get_experts_implementation()
        layers = {id(module): layer for layer, module in network.experts.items()}

        def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            layer = layers[id(module)]
            return recorded_experts(self._pass.records, layer, module, hidden_states, top_k_index, top_k_weights)

        ALL_EXPERTS_FUNCTIONS.register(_RECORDED, experts)
        network.model.set_experts_implementation(_RECORDED)
        try:
            yield
        finally:
            network.model.set_experts_implementation(before)


def is_asked(projection: str, spec: QuantSpec, columns: int) -> bool:
    """Return whether a format is predicted: it must fit. Pruning is predicted for the down projection alone."""
    return spec.fits(columns) and not (spec.is_pruned and projection != "down")


def shortened(pair: TokenPair, tokens: int) -> TokenPair:
    """Shorten a pair to `tokens` tokens: the start of the answer, and as much of the prompt's end as fits before it."""
    prompt, answer = pair[0], pair[1][:tokens]
    return prompt[max(0, len(prompt) + len(answer) - tokens) :], answer


def recorded_experts(
    records: list[_Record], layer: int, module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Compute routed experts in parts whose gradients are needed.

    hidden: [B * T, D].
    chosen, weights: [B * T, K].
    """
    total = torch.zeros_like(hidden)
    for expert in range(int(module.num_experts)):
        tokens, rank = torch.where(chosen == expert)
        if not len(tokens):
            continue
        rows = hidden[tokens]
        gate, up = (rows @ projection_of(module, expert, name).T for name in ("gate", "up"))
        middle = gated(module, expert, gate, up)
        down = middle @ projection_of(module, expert, "down").T
        inputs = {"gate": rows.detach(), "up": rows.detach(), "down": middle.detach()}
        records.append(_Record(layer, expert, tokens, inputs, (gate, up, down)))
        output = down + module.down_proj_bias[expert] if module.has_bias else down
        total = total.index_add(0, tokens, output * weights[tokens, rank].unsqueeze(1))
    return total


def sketch(logits: Tensor, seeds: Sequence[int]) -> Tensor:
    """Return a vector per row with covariance diag p - p p^T.

    logits: [A, V].
    seeds: seeds of the random draw.
    """
    drawn = torch.from_numpy(np.random.default_rng(list(seeds)).standard_normal(logits.shape, np.float32))
    probabilities = logits.softmax(-1)
    weighted = probabilities.sqrt() * drawn
    return weighted - probabilities * weighted.sum(-1, keepdim=True)


def can_predict(model: ModelSpec) -> bool:
    """Return whether the model has stacked, gated experts and a decoder alone."""
    return model.encoder is None


def ranks_well(model: ModelSpec) -> bool:
    """Return whether gradients capture the effect of rounding.

    They do not if a small change of logits changes a router's weights abruptly (sparsemixer). Gradients then predict a
    sixth to a quarter of the measured KL (docs/experiments/2026-11-21-sensitivity-with-sparsemixer.md).
    """
    return can_predict(model) and all(layer.experts.router.scoring != "sparsemixer" for layer in model.layers)


def asks_gradients(kind: str, model: ModelSpec) -> bool:
    """Return whether gradients price the units.

    kind: value of `--sensitivity`. `exact` corrects the prices from gradients.
    """
    return kind == "fisher" or (kind != "proxy" and ranks_well(model))


def check_sensitivity(kind: str, model: ModelSpec) -> None:
    """Raise OptionError for a sensitivity that the model does not support."""
    if kind == "fisher" and not can_predict(model):
        raise OptionError(
            "`--sensitivity fisher` takes gradients of a decoder alone, and the model has an encoder",
            "take `--sensitivity proxy`",
        )


def gradient_bytes(model: ModelSpec, threads: int) -> int:
    """Return the maximum memory of the graphs of parallel passes, for texts of up to TOKENS_PER_BACKWARD tokens."""
    if not can_predict(model):
        return 0
    each = 0
    for layer in model.layers:
        experts = layer.experts
        each += 12 * model.hidden_size + experts.top_k * (2 * model.hidden_size + 4 * experts.width)
    logits = 4 * model.vocab_size
    return threads * _FLOAT_BYTES * TOKENS_PER_BACKWARD * (each + logits)


def predict_units(
    reference: ReferenceModel,
    store: UnitStore,
    specs: Sequence[QuantSpec],
    texts: Sequence[Sequence[TokenPair]],
    seed: int,
    journal: Journal,
    progress: Progress,
) -> dict[tuple[UnitKey, QuantSpec], float]:
    """Return the predicted KL of every unit in every format below 16 bits that fits it, nats per token.

    The result is taken from the journal if it is stored there.
    texts: texts of each task. TEXTS of them are used, an equal number per task.
    """
    low = [spec for spec in specs if spec.bitwidth < 16]

    def compute() -> dict[str, np.ndarray]:
        proxy = FisherProxy(reference, store, low)
        return {"kl": proxy.run(first_texts(texts), seed, torch.get_num_threads(), progress)}

    return predictions(journal.arrays(f"fisher-{len(low)}", compute)["kl"], store.model, low)


def first_texts(texts: Sequence[Sequence[TokenPair]]) -> list[TokenPair]:
    """Return TEXTS texts, an equal number per task, task after task."""
    return [pair for task in texts for pair in task[: -(-TEXTS // len(texts))]]


def in_turns(texts: Sequence[Sequence[TokenPair]]) -> list[TokenPair]:
    """Return the texts of `first_texts`, alternating between tasks. Any prefix then covers all tasks."""
    rows = itertools.zip_longest(*(task[: -(-TEXTS // len(texts))] for task in texts))
    return [pair for row in rows for pair in row if pair is not None]


def predictions(
    found: np.ndarray, model: ModelSpec, specs: Sequence[QuantSpec]
) -> dict[tuple[UnitKey, QuantSpec], float]:
    """Return the predictions by unit and format.

    found: [U, S] from FisherProxy.run, NaN without a prediction.
    """
    units = [UnitKey(*key, p) for key in model.expert_keys() for p in PROJECTIONS]
    return {
        (unit, spec): float(found[row, column])
        for row, unit in enumerate(units)
        for column, spec in enumerate(specs)
        if np.isfinite(found[row, column])
    }
