"""The importance of experts by their router weights, and routers that foresee the experts of later layers."""

from __future__ import annotations

from math import comb

import numpy as np
import torch

from ...prefetch.learned_routers import MOST_AHEAD, PASS_TOKENS, Routing
from ..figure import Figure, Measured, Panel, Verdict, judged, of_all, over_layers, percent
from ..inputs import Inputs, mean
from ..models import MODELS, NATURAL, Model

OUTPUT_TOKENS = FORESEEN_TOKENS = 2048
SEQUENCE_LAYER, SEQUENCES = 2, 8
HIGH, LOW = 0.67, 0.30
"""Shares of experts that HOBBIT reads in high and in low precision."""
PUBLISHED_THRESHOLDS = 0.6, 0.9
"""Thresholds that give these shares in Mixtral."""


def importance(inputs: Inputs) -> Measured:
    """Measure the correlation of an expert's weight and the size of its weighted output."""
    points, told, verdicts = {}, [], dict[Model, Verdict]()
    for model in MODELS:
        weights, sizes = list[np.ndarray](), list[np.ndarray]()
        for routing in inputs.routed(model, "test", OUTPUT_TOKENS):
            of_layers = [_weighted_outputs(routing, layer) for layer in range(routing.count)]
            weights.append(np.stack([each[0] for each in of_layers]))
            sizes.append(np.stack([each[1] for each in of_layers]))
        weight, size = np.concatenate(weights, 1), np.concatenate(sizes, 1)
        found = [_correlation(*of_layer) for of_layer in zip(weight, size, strict=True)]
        points[model.label] = over_layers(found)
        verdicts[model] = judged([mean(found)], 0.95, 0.5)
        told.append(f"{model.label}: {mean(found):.2f} on average over the layers, {min(found):.2f} at least")
    panel = Panel("lines", "Weight and size of the weighted output", "layer", "correlation", points=points)
    return Measured([panel], told, of_all(verdicts.values()), verdicts[NATURAL])


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
    points, told, verdicts = {}, [], dict[Model, Verdict]()
    for model in MODELS:
        weights = inputs.routes(model, "test").weights
        unimportance = (np.cumsum(weights, 2) - weights).ravel()
        levels = np.linspace(0, 1, 41)
        points[model.label] = [(float(level), float((unimportance <= level).mean())) for level in levels]
        found = np.quantile(unimportance, (HIGH, HIGH + LOW))
        told.append(f"{model.label}: thresholds of {found[0]:.2f} and {found[1]:.2f} give these shares")
        verdicts[model] = judged([-float(np.abs(found - PUBLISHED_THRESHOLDS).max())], -0.05, -0.15)
    panel = Panel("lines", "Unimportance of the chosen experts", "score", "share of experts up to it", points=points)
    return Measured([panel], told, of_all(verdicts.values()), verdicts[NATURAL])


def lookahead(inputs: Inputs) -> Measured:
    """Measure the similarity of router inputs of later layers, and whether a later router foresees its first expert."""
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model in MODELS:
        cosines: dict[tuple[int, int], list[float]] = {}
        hits: dict[tuple[int, int], list[float]] = {}
        for routing in inputs.routed(model, "test", FORESEEN_TOKENS):
            for layer in range(routing.count):
                for ahead in range(1, min(MOST_AHEAD, routing.count - 1 - layer) + 1):
                    now, later = routing.inputs(layer), routing.inputs(layer + ahead)
                    cosines.setdefault((ahead, layer), []).append(float(torch.cosine_similarity(now, later).mean()))
                    foreseen = routing.logits(layer, ahead).argmax(1)
                    hit = (foreseen == routing.logits(layer + ahead).argmax(1)).float().mean()
                    hits.setdefault((ahead, layer), []).append(float(hit))
        points: dict[str, list[tuple[float, float]]] = {}
        for kind, found in (("cosine", cosines), ("foreseen", hits)):
            for (ahead, layer), values in sorted(found.items()):
                points.setdefault(f"{kind}, {ahead} ahead", []).append((float(layer), mean(values)))
        panels.append(Panel("lines", model.label, "layer", "cosine, or share of the tokens", points=points))
        means = {name: mean([y for _, y in line]) for name, line in points.items()}
        accuracies = ", ".join(percent(means[f"foreseen, {ahead} ahead"]) for ahead in range(1, MOST_AHEAD + 1))
        near = f"cosine {means['cosine, 1 ahead']:.2f} for the next layer"
        told.append(f"{model.label}: {near}; right for {accuracies}, 1 to 3 layers ahead")
        verdicts[model] = judged([means["foreseen, 1 ahead"]], 0.9, 0.5)
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


def reuse(inputs: Inputs) -> Measured:
    """Measure how often the next token uses an expert of this one."""
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model in MODELS:
        chosen = inputs.routes(model, "test").chosen
        experts, top_k = int(chosen.max()) + 1, chosen.shape[2]
        passes = chosen.reshape(-1, PASS_TOKENS, *chosen.shape[1:])
        now, after = passes[:, :-1], passes[:, 1:]
        first = (now[..., :1] == after).any(-1).mean((0, 1))
        any_of = (now[..., :, None] == after[..., None, :]).any((-1, -2)).mean((0, 1))
        chance = top_k / experts, 1 - comb(experts - top_k, top_k) / comb(experts, top_k)
        points = {
            "first expert again": over_layers(first),
            "first expert, by chance": over_layers([chance[0]] * len(first)),
            "any expert again": over_layers(any_of),
            "any expert, by chance": over_layers([chance[1]] * len(first)),
        }
        panels.append(Panel("lines", model.label, "layer", "share of the tokens", points=points))
        told.append(
            f"{model.label}: the first expert again for {percent(first.mean())} (by chance {percent(chance[0])}), any "
            f"of them for {percent(any_of.mean())} ({percent(chance[1])})"
        )
        is_more = [bool(first.mean() > chance[0]), bool(any_of.mean() > chance[1])]
        verdicts[model] = "same" if all(is_more) else "partly" if any(is_more) else "different"
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


def sequences(inputs: Inputs) -> Measured:
    """Measure the use of the experts of one layer in single sequences."""
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model in MODELS:
        chosen = inputs.routes(model, "test").chosen[:, SEQUENCE_LAYER]
        passes = chosen.reshape(-1, PASS_TOKENS, chosen.shape[1])[:SEQUENCES]
        experts = int(chosen.max()) + 1
        shares = np.stack([np.bincount(each.ravel(), minlength=experts) / PASS_TOKENS for each in passes])
        title = f"{model.label}, layer {SEQUENCE_LAYER}"
        panels.append(Panel("map", title, "expert", "sequence", rows=shares.tolist()))
        spread = shares.std(0).mean()
        chance = np.sqrt(shares.mean(0) * (1 - shares.mean(0)) / PASS_TOKENS).mean()
        verdicts[model] = judged([float(spread / chance)], 1.5, 1.1)
        told.append(
            f"{model.label}: shares differ by {percent(spread, 1)} among sequences, by chance {percent(chance, 1)}"
        )
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


FIGURES = (
    Figure(
        name="hobbit-importance",
        paper="hobbit",
        source="Figure 5a",
        title="Router weight and weighted output of an expert",
        reported="The two correlate at 0.99 in Mixtral-8x7B.",
        models=MODELS,
        how=f"Pearson correlation over the chosen experts of {OUTPUT_TOKENS:,} held-out tokens, layer by layer.",
        why="Outputs of experts differ more in length in small models, but the weight still ranks experts.",
        measure=importance,
        on_natural="The weights of a token's experts are nearly equal, so the correlation is about half of the "
        "published one.",
    ),
    Figure(
        name="hobbit-scores",
        paper="hobbit",
        source="Figure 5b",
        title="Distribution of the unimportance score",
        reported="Thresholds of 0.6 and 0.9 leave 67 % of Mixtral's chosen experts in high precision, and 30 % in low "
        "precision. 3 % are skipped.",
        models=MODELS,
        how="The score of an expert is the weight of the experts that its token ranks before it.",
        why="With two experts per token half of the scores are 0, and none is under 0.5 otherwise. With four they "
        "spread.",
        measure=scores,
        on_natural="The six experts of a token have nearly equal weights, so the score rises in even steps.",
    ),
    Figure(
        name="hobbit-lookahead",
        paper="hobbit",
        source="Figure 7",
        title="Routers of later layers on the input of this layer",
        reported="Router inputs of consecutive layers are similar. The first expert of the next layer is foreseen for "
        "96 % of the tokens, and for about 90 % two and three layers ahead.",
        models=MODELS,
        how=f"{FORESEEN_TOKENS:,} held-out tokens. A later router, with the norm of its own layer, reads the stream "
        "of this layer.",
        why="Six layers change the stream more per layer than the 32 of Mixtral. `moec compile` learns routers that "
        "foresee more ([learned routers](../experiments/2026-11.md)).",
        measure=lookahead,
        on_natural="Router inputs of consecutive layers are similar, except after layer 0. The published accuracy is "
        "not confirmed, but 86 % of the six experts of the next layer are foreseen as a set.",
    ),
    Figure(
        name="hobbit-reuse",
        paper="hobbit",
        source="Figure 10a",
        title="Experts that the next token uses again",
        reported="In Mixtral, the next token uses the first expert of a token more often than by chance (0.25), and "
        "one of both more often than 0.46.",
        models=MODELS,
        how="Consecutive held-out tokens.",
        why="A digit or a name often follows tokens of another kind, so reuse depends on the text and the layer.",
        measure=reuse,
        on_natural="The first expert is used again nearly twice as often as by chance.",
    ),
    Figure(
        name="hobbit-sequences",
        paper="hobbit",
        source="Figure 10b",
        title="Use of experts in single sequences",
        reported="Each sequence prefers some experts, and not the same ones.",
        models=MODELS,
        how=f"{SEQUENCES} sequences of {PASS_TOKENS} tokens. The deviation by chance is that of independent tokens.",
        why="The problems are of one kind. Their sequences still differ by twice what chance gives.",
        measure=sequences,
        on_natural="Texts of other subjects prefer other experts, by twice what chance gives. Some experts are "
        "preferred in all texts.",
    ),
)
