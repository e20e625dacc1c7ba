"""Paths of tokens through the experts: how skewed they are, and what earlier layers say about later ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from moec.compiler.calibration.paths import count_paths, count_popularity, frequent_share, report_paths
from moec.manifests.model import ModelSpec
from moec.runtime.bundle.tables import Tables
from moec.runtime.prefetch.pass_state import PassState
from moec.runtime.prefetch.predictors import PathPredictor, PopularityPredictor, Predictor

from ..figure import PLAIN, PLANTED, Figure, Measured, Panel, percent
from ..inputs import TASKS, Inputs, Routes

FREQUENT = 0.2
PUBLISHED_SHARE = 0.99
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WINDOW = 3
LEAST_SEEN = 200
"""Tokens on which a condition of the bar chart must have been seen."""
CONDITIONED_LAYER = 2


def skew_curve(chosen: np.ndarray) -> list[tuple[float, float]]:
    """Return (share of the observed paths, share of the tokens on them), most frequent paths first.

    chosen: experts of each token in some layers, [T, l, K].
    """
    rows = np.sort(chosen, axis=2).reshape(len(chosen), -1)
    counts = np.sort(np.unique(rows, axis=0, return_counts=True)[1])[::-1]
    tops = [max(1, round(share * len(counts))) for share in SHARES]
    return [(share, float(counts[:top].sum() / counts.sum())) for share, top in zip(SHARES, tops, strict=True)]


def path_skew(inputs: Inputs) -> Measured:
    """Measure the share of tokens on frequent paths."""
    points, told, reached = {}, [], []
    for model, name in (("planted", "planted, 2 of 8"), ("plain", "plain, 4 of 16")):
        chosen = inputs.routes(model, "train", "gsm8k").chosen
        for layers, part in (
            ("all 6 layers", chosen),
            ("first 3 layers", chosen[:, :WINDOW]),
            ("1 layer", chosen[:, :1]),
        ):
            points[f"{name}, {layers}"] = skew_curve(part)
            share, observed = frequent_share(part)
            reached.append(share)
            told.append(f"{name}, {layers}: {percent(share)} of {len(part):,} tokens on 20 % of {observed:,} paths")
    panel = Panel(
        "lines",
        "Tokens on the most frequent paths",
        "share of the observed paths",
        "share of the tokens",
        points=points,
    )
    return Measured([panel], told, "same" if min(reached) >= PUBLISHED_SHARE else "different")


def predictors(tables: Tables, model: ModelSpec) -> dict[str, Predictor]:
    """Return predictors of a layer that know no, one or two earlier layers."""
    if tables.paths is None:
        raise ValueError("the bundle has no path tables")
    paths = tables.paths
    no_pairs = replace(
        paths, keys=paths.keys[:0], offsets=paths.offsets[:1], experts=paths.experts[:0], counts=paths.counts[:0]
    )
    return {
        "no earlier layer": PopularityPredictor(tables, model),
        "1 earlier layer": PathPredictor(replace(tables, paths=no_pairs), model),
        "2 earlier layers": PathPredictor(tables, model),
    }


def found_in_top(routes: Routes, predictor: Predictor, layers: int, experts: int) -> list[float]:
    """Return, for n = 1 to E, the share of chosen experts that are among the n likeliest of their layer."""
    hits, count = np.zeros(experts), 0
    hidden = np.empty((1, 0), np.float32)
    for token in routes.chosen.astype(np.int32):
        for layer in range(CONDITIONED_LAYER - 1, layers - 1):
            scores = predictor.scores(PassState(layer, hidden, list(token[: layer + 1, None])))
            if scores is None:
                raise ValueError(f"layer {layer + 1} is not predicted")
            rank = np.empty(experts, int)
            rank[np.argsort(-scores, kind="stable")] = np.arange(experts)
            hits[np.sort(rank[token[layer + 1]])] += 1
            count += token.shape[1]
    return [float(share) for share in np.cumsum(hits) / count]


def frequency(inputs: Inputs) -> Measured:
    """Measure how well 0, 1 and 2 earlier layers foretell a layer."""
    bundle = inputs.opened("planted-16")
    model, tables = bundle.manifest.model, bundle.tables()
    routes, experts = inputs.routes("planted", "test", "gsm8k"), model.layers[0].experts.count
    points, best = {}, {}
    for name, predictor in predictors(tables, model).items():
        shares = found_in_top(routes, predictor, model.num_layers, experts)
        points[name] = [(float(count), share) for count, share in enumerate(shares, 1)]
        best[name] = shares[model.layers[0].experts.top_k - 1]
    bars, condition, likeliest = conditioned(inputs)
    left = Panel(
        "bars", f"Use of the experts of layer {CONDITIONED_LAYER}", "expert", "share of the tokens",
        groups=[str(expert) for expert in range(experts)], bars=bars,
    )  # fmt: skip
    right = Panel("lines", "Chosen experts among the n likeliest", "n", "share of the chosen experts", points=points)
    told = ", ".join(f"{percent(share)} with {name}" for name, share in best.items())
    found = [
        f"chosen experts among the two likeliest: {told}",
        f"after {condition}, {percent(likeliest)} of the tokens use the likeliest expert of layer {CONDITIONED_LAYER}",
        f"without the condition, {percent(max(bars['all tokens']))} use the most popular expert of that layer",
    ]
    is_rising = list(best.values()) == sorted(best.values())
    return Measured([left, right], found, "same" if is_rising and likeliest > max(bars["all tokens"]) else "different")


def conditioned(inputs: Inputs) -> tuple[dict[str, list[float]], str, float]:
    """Return the use of each expert of a layer, for all tokens and after the condition that says most about it.

    The condition is one expert in each of the two layers before. It is chosen on train texts and counted on test texts.
    """
    train, test = inputs.routes("planted", "train", "gsm8k").chosen, inputs.routes("planted", "test", "gsm8k").chosen
    experts = int(train.max()) + 1
    paths, layer = count_paths(train[:, : CONDITIONED_LAYER + 1], experts), CONDITIONED_LAYER
    shares = []
    for start, end in pairwise(paths.offsets.tolist()):
        tokens = paths.counts[start:end].sum() / train.shape[2]
        shares.append(paths.counts[start:end].max() / tokens if tokens >= LEAST_SEEN else 0.0)
    _, first, second = paths.keys[int(np.argmax(shares))].tolist()
    meets = (test[:, layer - 2] == first).any(1) & (test[:, layer - 1] == second).any(1)
    bars = {
        "all tokens": (count_popularity(test, experts)[layer] / len(test)).tolist(),
        f"after {first}, then {second}": (count_popularity(test[meets], experts)[layer] / meets.sum()).tolist(),
    }
    condition = f"expert {first} in layer {layer - 2} and expert {second} in layer {layer - 1}"
    return bars, condition, max(bars[f"after {first}, then {second}"])


def other_data(inputs: Inputs) -> Measured:
    """Measure predictions on one task with the counts of the other."""
    bars: dict[str, list[float]] = {f"counted on {task}": [] for task in TASKS}
    for tested in TASKS:
        held_out = inputs.routes("planted", "test", tested).chosen
        for counted in TASKS:
            routes = inputs.routes("planted", "train", counted).chosen
            report = report_paths(routes, held_out, int(routes.max()) + 1)
            bars[f"counted on {counted}"].append(report.accuracy_sets)
    panel = Panel(
        "bars", "The likeliest expert was chosen", "tested on", "share of the tokens", groups=TASKS, bars=bars
    )
    own = [bars[f"counted on {task}"][at] for at, task in enumerate(TASKS)]
    other = [bars[f"counted on {TASKS[1 - at]}"][at] for at in range(len(TASKS))]
    pairs = list(zip(TASKS, own, other, strict=True))
    told = [
        f"`{task}`: {percent(mine)} with its own counts, {percent(theirs)} with those of the other task"
        for task, mine, theirs in pairs
    ]
    return Measured([panel], told, "same" if max(mine - theirs for _, mine, theirs in pairs) <= 0.02 else "different")


FIGURES = (
    Figure(
        name="edgemoe-path-skew",
        paper="edgemoe",
        source="Figure 4",
        title="Tokens on frequent activation paths",
        reported="20 % of the paths carry more than 99 % of the tokens (Switch base, SAMSum and GLUE). The paper "
        "does not say whether the paths are the observed ones or all possible ones.",
        model=f"{PLANTED} and {PLAIN}",
        how="Paths are the observed ones. Tokens are those of train problems.",
        why="The share depends on the number of possible paths. Switch takes one expert per layer. With 2 of 8 "
        "experts in 6 layers there are 28 to the power of 6 paths, far more than tokens, and most observed paths "
        "occur once. Shorter paths are seen more often, and even they are less skewed: a training loss balances "
        "the experts.",
        measure=path_skew,
    ),
    Figure(
        name="edgemoe-frequency",
        paper="edgemoe",
        source="Figure 8",
        title="Use of experts, given the experts of earlier layers",
        reported="Experts of a layer are used about equally often. With two earlier layers known, one expert of "
        "layer 3 is chosen by 87.1 % of the tokens. More known layers raise the share of the top k experts.",
        model=PLANTED,
        how="The dictionary of the bundle (`--prefetch path`) predicts held-out problems.",
        why="Earlier layers foretell later ones here too. A token has two experts per layer, so one pair of "
        "experts says less than a single path of Switch.",
        measure=frequency,
    ),
    Figure(
        name="edgemoe-other-data",
        paper="edgemoe",
        source="Table IV",
        title="Statistics of one data set, tested on another",
        reported="The offline stage on another data set costs about 2 % of accuracy on average.",
        model=PLANTED,
        how="The paper measures accuracy of the compiled model. Here it is the prediction: the share of tokens whose "
        "likeliest next expert was chosen, by exact sets of two layers.",
        why="The two tasks of the example have different vocabularies and forms, so their paths differ more than "
        "those of two summary sets.",
        measure=other_data,
    ),
)
