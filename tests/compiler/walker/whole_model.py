"""The whole model as transformers computes it, in one piece: what the walker is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moec.compiler.reference.expert_module import intermediate
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.reference.weights import WeightName
from moec.compiler.walker.texts import AnswerTexts, TokenTexts
from moec.evaluation.divergence import divergence, log_softmax


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


def recorded(reference: ReferenceModel, texts: TokenTexts) -> dict[int, LayerRecord]:
    """Run the texts one by one, and record what the experts of every layer are handed."""
    handed: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in reference.network.experts}
    handles = [
        module.register_forward_pre_hook(lambda _, arguments, layer=layer: handed[layer].append(arguments[:3]))
        for layer, module in reference.network.experts.items()
    ]
    try:
        for at, row in enumerate(texts.rows):
            with torch.inference_mode():
                reference.network.hidden([row], prompts=texts.prompts[at : at + 1])
    finally:
        for handle in handles:
            handle.remove()
    return {layer: _record(reference, layer, parts) for layer, parts in handed.items()}


def _record(reference: ReferenceModel, layer: int, parts: list[tuple[Tensor, ...]]) -> LayerRecord:
    experts, module = reference.model.layers[layer].experts, reference.network.experts[layer]
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


def scored_logits(reference: ReferenceModel, answers: AnswerTexts) -> list[np.ndarray]:
    """Logits at the scored tokens of each text, text by text."""
    found = []
    for at, (row, count) in enumerate(zip(answers.texts.rows, answers.counts, strict=True)):
        with torch.inference_mode():
            hidden = reference.network.hidden([row], prompts=answers.texts.prompts[at : at + 1])
            found.append(reference.network.logits(hidden[0, len(row) - count :]).numpy())
    return found


def measured_kl(reference: ReferenceModel, answers: AnswerTexts, weights: Mapping[WeightName, Tensor]) -> float:
    """Mean KL at the scored tokens with these weights in place of the checkpoint's own."""
    own = scored_logits(reference, answers)
    with reference.weights(weights):
        others = scored_logits(reference, answers)
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
