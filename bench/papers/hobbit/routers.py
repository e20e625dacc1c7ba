"""The importance of experts by their router weights, and routers that foresee the experts of later layers."""

from __future__ import annotations

from math import comb

import numpy as np
import torch

from ...prefetch.learned_routers import MOST_AHEAD, PASS_TOKENS, Routing
from ..figure import PLAIN, PLANTED, Figure, Measured, Panel, percent
from ..inputs import Inputs, mean

MODELS = {"planted": "planted, 2 of 8", "plain": "plain, 4 of 16"}
OUTPUT_TOKENS = 2048
SEQUENCE_LAYER, SEQUENCES = 2, 8
HIGH, LOW = 0.67, 0.30
"""Shares of experts that HOBBIT reads in high and in low precision."""
BOTH_MODELS = f"{PLANTED} and {PLAIN}"


def importance(inputs: Inputs) -> Measured:
    """Measure the correlation of an expert's weight and the size of its weighted output."""
    bars, told, least = {}, [], 1.0
    for model, name in MODELS.items():
        weights, sizes = list[np.ndarray](), list[np.ndarray]()
        for routing in inputs.routed(model, "test", "gsm8k", OUTPUT_TOKENS):
            of_layers = [_weighted_outputs(routing, layer) for layer in range(routing.count)]
            weights.append(np.stack([each[0] for each in of_layers]))
            sizes.append(np.stack([each[1] for each in of_layers]))
        weight, size = np.concatenate(weights, 1), np.concatenate(sizes, 1)
        bars[name] = [_correlation(*of_layer) for of_layer in zip(weight, size, strict=True)]
        told.append(f"{name}: {mean(bars[name]):.2f} on average over the layers, {min(bars[name]):.2f} at least")
        least = min(least, mean(bars[name]))
    groups = [str(layer) for layer in range(len(next(iter(bars.values()))))]
    panel = Panel("bars", "Weight and size of the weighted output", "layer", "correlation", groups=groups, bars=bars)
    verdict = "same" if least >= 0.95 else "partly" if least >= 0.5 else "different"
    return Measured([panel], told, verdict)


def _weighted_outputs(routing: Routing, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights and lengths of the weighted outputs of all chosen experts, [T * K] each."""
    chosen, weights = routing.chosen(layer)
    outputs = routing.expert_outputs(layer)
    lengths = torch.linalg.vector_norm(outputs, dim=2).gather(1, chosen)
    return weights.flatten().numpy(), (weights * lengths).flatten().numpy()


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def scores(inputs: Inputs) -> Measured:
    """Measure the distribution of unimportance, and the thresholds that divide it as published."""
    points, told = {}, []
    for model, name in MODELS.items():
        weights = inputs.routes(model, "test", "gsm8k").weights
        unimportance = (np.cumsum(weights, 2) - weights).ravel()
        levels = np.linspace(0, 1, 41)
        points[name] = [(float(level), float((unimportance <= level).mean())) for level in levels]
        low, skip = np.quantile(unimportance, (HIGH, HIGH + LOW))
        told.append(f"{name}: thresholds of {low:.2f} and {skip:.2f} give these shares")
    panel = Panel("lines", "Unimportance of the chosen experts", "score", "share of experts up to it", points=points)
    return Measured([panel], told, "partly")


def lookahead(inputs: Inputs) -> Measured:
    """Measure the similarity of router inputs of later layers, and whether a later router foresees its first expert."""
    similar: dict[str, list[tuple[float, float]]] = {}
    right: dict[str, list[tuple[float, float]]] = {}
    told, next_accuracy = [], []
    for model, name in MODELS.items():
        cosines: dict[tuple[int, int], list[float]] = {}
        hits: dict[tuple[int, int], list[float]] = {}
        for routing in inputs.routed(model, "test", "gsm8k"):
            for layer in range(routing.count):
                for ahead in range(1, min(MOST_AHEAD, routing.count - 1 - layer) + 1):
                    now, later = routing.inputs(layer), routing.inputs(layer + ahead)
                    cosines.setdefault((ahead, layer), []).append(float(torch.cosine_similarity(now, later).mean()))
                    foreseen = routing.logits(layer, ahead).argmax(1)
                    hit = (foreseen == routing.logits(layer + ahead).argmax(1)).float().mean()
                    hits.setdefault((ahead, layer), []).append(float(hit))
        for into, found in ((similar, cosines), (right, hits)):
            for (ahead, layer), values in sorted(found.items()):
                into.setdefault(f"{name}, {ahead} ahead", []).append((float(layer), mean(values)))
        means = {ahead: mean([y for _, y in right[f"{name}, {ahead} ahead"]]) for ahead in range(1, MOST_AHEAD + 1)}
        near = mean([y for _, y in similar[f"{name}, 1 ahead"]])
        accuracies = ", ".join(percent(share) for share in means.values())
        told.append(f"{name}: cosine {near:.2f} for the next layer; right for {accuracies}, 1 to 3 layers ahead")
        next_accuracy.append(means[1])
    panels = [
        Panel("lines", "Router inputs of two layers", "layer", "cosine similarity", points=similar),
        Panel("lines", "First expert foreseen", "layer", "share of the tokens", points=right),
    ]
    return Measured(panels, told, "same" if min(next_accuracy) >= 0.9 else "partly")


def reuse(inputs: Inputs) -> Measured:
    """Measure how often the next token uses an expert of this one."""
    panels, told, is_more = [], [], []
    for model, name in MODELS.items():
        chosen = inputs.routes(model, "test", "gsm8k").chosen
        experts, top_k = int(chosen.max()) + 1, chosen.shape[2]
        passes = chosen.reshape(-1, PASS_TOKENS, *chosen.shape[1:])
        now, after = passes[:, :-1], passes[:, 1:]
        first = (now[..., :1] == after).any(-1).mean((0, 1))
        any_of = (now[..., :, None] == after[..., None, :]).any((-1, -2)).mean((0, 1))
        chance = top_k / experts, 1 - comb(experts - top_k, top_k) / comb(experts, top_k)
        layers = range(len(first))
        points = {
            "first expert again": [(float(at), float(first[at])) for at in layers],
            "first expert, by chance": [(float(at), chance[0]) for at in layers],
            "any expert again": [(float(at), float(any_of[at])) for at in layers],
            "any expert, by chance": [(float(at), chance[1]) for at in layers],
        }
        panels.append(Panel("lines", name, "layer", "share of the tokens", points=points))
        told.append(
            f"{name}: the first expert again for {percent(first.mean())} (by chance {percent(chance[0])}), any of them "
            f"for {percent(any_of.mean())} ({percent(chance[1])})"
        )
        is_more += [first.mean() > chance[0], any_of.mean() > chance[1]]
    return Measured(panels, told, "same" if all(is_more) else "partly" if any(is_more) else "different")


def sequences(inputs: Inputs) -> Measured:
    """Measure the use of the experts of one layer in single sequences."""
    panels, told, ratios = [], [], []
    for model, name in MODELS.items():
        chosen = inputs.routes(model, "test", "gsm8k").chosen[:, SEQUENCE_LAYER]
        passes = chosen.reshape(-1, PASS_TOKENS, chosen.shape[1])[:SEQUENCES]
        experts = int(chosen.max()) + 1
        shares = np.stack([np.bincount(each.ravel(), minlength=experts) / PASS_TOKENS for each in passes])
        panels.append(Panel("map", f"{name}, layer {SEQUENCE_LAYER}", "expert", "sequence", rows=shares.tolist()))
        spread = shares.std(0).mean()
        chance = np.sqrt(shares.mean(0) * (1 - shares.mean(0)) / PASS_TOKENS).mean()
        ratios.append(float(spread / chance))
        told.append(f"{name}: shares differ by {percent(spread, 1)} among sequences, by chance {percent(chance, 1)}")
    return Measured(panels, told, "same" if min(ratios) >= 1.5 else "partly" if max(ratios) >= 1.5 else "different")


FIGURES = (
    Figure(
        name="hobbit-importance",
        paper="hobbit",
        source="Figure 5a",
        title="Router weight and weighted output of an expert",
        reported="The two correlate at 0.99 in Mixtral-8x7B.",
        model=BOTH_MODELS,
        how="Pearson correlation over all chosen experts of held-out problems, layer by layer.",
        why="Outputs of experts differ more in length in these small models, above all in the planted one. The weight "
        "still ranks experts. The paper correlates its data after a normalisation that it does not describe.",
        measure=importance,
    ),
    Figure(
        name="hobbit-scores",
        paper="hobbit",
        source="Figure 5b",
        title="Distribution of the unimportance score",
        reported="In Mixtral, thresholds of 0.6 and 0.9 leave 67 % of the chosen experts in high precision and 30 % in "
        "low precision, and 3 % are skipped.",
        model=BOTH_MODELS,
        how="The score of an expert is the weight of the experts that its token ranks before it.",
        why="The shape depends on the number of experts per token. With two, half of the scores are 0 and none is "
        "under 0.5 otherwise. With four they spread, so other thresholds give the shares of the paper.",
        measure=scores,
    ),
    Figure(
        name="hobbit-lookahead",
        paper="hobbit",
        source="Figure 7",
        title="Routers of later layers on the input of this layer",
        reported="Router inputs of consecutive layers are similar. The first expert of the next layer is foreseen for "
        "96 % of the tokens, and for about 90 % two and three layers ahead.",
        model=BOTH_MODELS,
        how="Similarity of what two routers read. A later router, with the norm of its own layer, is applied to the "
        "stream of this layer.",
        why="Six layers change the stream more per layer than the 32 of Mixtral. So similarity and accuracy are lower, "
        "and they fall with the distance as published. `moec compile` learns routers that foresee more "
        "([learned routers](../experiments/2026-11-26-learned-routers.md)).",
        measure=lookahead,
    ),
    Figure(
        name="hobbit-reuse",
        paper="hobbit",
        source="Figure 10a",
        title="Experts that the next token uses again",
        reported="In Mixtral, the next token uses the first expert of a token more often than by chance (0.25), "
        "and one of both experts more often than 0.46.",
        model=BOTH_MODELS,
        how="Consecutive tokens of held-out problems.",
        why="A digit or a name often follows tokens of another kind in these texts, so reuse is a matter of the "
        "text and the layer.",
        measure=reuse,
    ),
    Figure(
        name="hobbit-sequences",
        paper="hobbit",
        source="Figure 10b",
        title="Use of experts in single sequences",
        reported="Each sequence prefers some experts, and not the same ones.",
        model=BOTH_MODELS,
        how=f"{SEQUENCES} sequences of {PASS_TOKENS} tokens: held-out problems one after the other. The deviation by "
        "chance is that of independent tokens.",
        why="The sequences are problems of one kind, and still differ by twice what chance gives.",
        measure=sequences,
    ),
)
