"""The whole model as transformers computes it, in one piece: what the walker is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.compiler.reference.expert_module import intermediate
from moec.compiler.walker.loaded_layer import WeightName
from moec.compiler.walker.texts import AnswerTexts, TokenTexts
from moec.evaluation.statistics import divergence, log_softmax
from tests.transformers_oracle import TransformersOracle


@dataclass
class LayerRecord:
    """One layer over all texts, text after text.

    routes: [T, K].
    weights: [T, K].
    input_moments, middle_moments: sums of g^2 x x^T, [E, D, D] and [E, F, F].
    tokens: of each expert, [E].
    """

    routes: np.ndarray
    weights: np.ndarray
    input_moments: Tensor
    middle_moments: Tensor
    tokens: np.ndarray


def recorded(reference: TransformersOracle, texts: TokenTexts) -> dict[int, LayerRecord]:
    """Run the texts one by one, and record what the experts of every layer are handed."""
    handed: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in reference.experts}
    handles = [
        module.register_forward_pre_hook(lambda _, arguments, layer=layer: handed[layer].append(arguments[:3]))
        for layer, module in reference.experts.items()
    ]
    try:
        for at, row in enumerate(texts.rows):
            with torch.no_grad():
                reference.logits(row, texts.prompts[at] if texts.prompts else ())
    finally:
        for handle in handles:
            handle.remove()
    return {layer: _record(reference, layer, parts) for layer, parts in handed.items()}


def _record(reference: TransformersOracle, layer: int, parts: list[tuple[Tensor, ...]]) -> LayerRecord:
    experts, module = reference.model.layers[layer].experts, reference.experts[layer]
    inputs, chosen, weights = (torch.cat([part[at] for part in parts]) for at in range(3))
    input_moments = torch.zeros(experts.count, inputs.shape[1], inputs.shape[1])
    middle_moments, tokens = torch.zeros(experts.count, experts.width, experts.width), np.zeros(experts.count, int)
    for expert in range(experts.count):
        token, rank = torch.where((chosen == expert) & (weights > 0) if experts.router.capacity else chosen == expert)
        rows, share = inputs[token], weights[token, rank].unsqueeze(1)
        middle = intermediate(module, expert, rows) * share
        tokens[expert] = len(token)
        input_moments[expert] = (rows * share).T @ (rows * share)
        middle_moments[expert] = middle.T @ middle
    return LayerRecord(chosen.numpy(), weights.numpy(), input_moments, middle_moments, tokens)


def scored_logits(reference: TransformersOracle, answers: AnswerTexts, at_once: int = 1) -> list[np.ndarray]:
    """Logits at the scored tokens of each text, text by text.

    at_once: texts of a batch. Padding changes last bits of logits.
    """
    rows, prompts, found = answers.texts.rows, answers.texts.prompts, list[np.ndarray]()
    for start in range(0, len(rows), at_once):
        some = slice(start, start + at_once)
        batch = reference.batch_logits(rows[some], prompts[some] if prompts else [])
        for logits, row, count in zip(batch, rows[some], answers.counts[some], strict=True):
            found.append(logits[len(row) - count : len(row)].numpy())
    return found


def measured_kl(reference: TransformersOracle, answers: AnswerTexts, weights: Mapping[WeightName, Tensor]) -> float:
    """Mean KL at the scored tokens with these weights in place of the checkpoint's own."""
    own = scored_logits(reference, answers)
    with reference.weights(weights):
        return kl_from(own, scored_logits(reference, answers))


def kl_from(own: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Mean KL at the scored tokens of two models, from their logits."""
    parts = [divergence(log_softmax(before), after)[0] for before, after in zip(own, others, strict=True)]
    return float(np.concatenate(parts).mean())


def texts_of(rows: list[list[int]], has_encoder: bool) -> TokenTexts:
    """The rows as texts; with an encoder each is a prompt, too, and the decoder's text ends earlier."""
    if not has_encoder:
        return TokenTexts(rows)
    return TokenTexts([[0, *row[: max(1, len(row) // 2)]] for row in rows], rows)


def answers_of(texts: TokenTexts, counts: list[int]) -> AnswerTexts:
    """The last tokens of each row as answers, with made-up tokens to predict."""
    pairs: list[Any] = [(row[:-1], row[-1:]) for row in texts.rows]
    return AnswerTexts(texts, counts, [[7] * count for count in counts], pairs, [len(counts)])
