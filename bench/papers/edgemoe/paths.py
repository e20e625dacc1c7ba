"""Paths of tokens through the experts: how skewed they are, and what earlier layers say about later ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from moec.compiler.calibration.activation_paths import frequent_share, report_paths
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import lower

from ..figure import Figure, Measured, Panel, Verdict, judged, of_all, percent
from ..inputs import Inputs
from ..models import MODELS, NATURAL, PLANTED, TASKS, Model
from .predictions import CONDITIONED_LAYER, conditioned, found_in_top, predictors

PUBLISHED_SHARE = 0.99
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
WINDOW = 3
LEAST_GAIN = 0.05
"""What a known layer must add to the share of the likeliest experts, and a condition to that of the most used one."""
PREDICTED_TOKENS = 2_048
"""Tokens that the earlier layers predict."""


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
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model in MODELS:
        chosen = inputs.routes(model, "train").chosen
        points, reached = {}, []
        for layers, part in (
            (f"all {chosen.shape[1]} layers", chosen),
            (f"first {WINDOW} layers", chosen[:, :WINDOW]),
            ("1 layer", chosen[:, :1]),
        ):
            points[layers] = skew_curve(part)
            share, observed = frequent_share(part)
            reached.append(share)
            counted = f"{percent(share)} of {len(part):,} tokens on 20 % of {observed:,} paths"
            told.append(f"{model.label}, {layers}: {counted}")
        panels.append(Panel("lines", model.label, "share of the observed paths", "share of the tokens", points=points))
        verdicts[model] = judged(reached, PUBLISHED_SHARE, PUBLISHED_SHARE)
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


def frequency(inputs: Inputs) -> Measured:
    """Measure how well 0, 1 and 2 earlier layers foretell a layer."""
    bar_panels, line_panels, told, verdicts = list[Panel](), list[Panel](), list[str](), dict[Model, Verdict]()
    for model in MODELS:
        spec = lower(open_checkpoint(str(model.folder))).model
        counted, routes = inputs.routes(model, "train").chosen, inputs.routes(model, "test")
        points, best = {}, {}
        for name, predictor in predictors(counted, spec).items():
            shares = found_in_top(routes.chosen[:PREDICTED_TOKENS], predictor, spec)
            points[name] = [(float(count), share) for count, share in enumerate(shares, 1)]
            best[name] = shares[routes.chosen.shape[2] - 1]
        use = conditioned(counted, routes.chosen)
        groups = [str(expert) for expert in range(len(use.of_all))]
        bars = {"all tokens": use.of_all, use.label: use.after}
        title = f"{model.label}: use in layer {CONDITIONED_LAYER}"
        bar_panels.append(Panel("bars", title, "expert", "share of the tokens", groups=groups, bars=bars))
        title = f"{model.label}: chosen among the n likeliest"
        line_panels.append(Panel("lines", title, "n", "share of the chosen experts", points=points))
        by_known = ", ".join(f"{percent(share)} with {name}" for name, share in best.items())
        told += [
            f"{model.label}, chosen experts among the {routes.chosen.shape[2]} likeliest: {by_known}",
            f"{model.label}, most used expert of layer {CONDITIONED_LAYER}: {percent(max(use.of_all))} of all tokens, "
            f"{percent(max(use.after))} of those after {use.condition}",
        ]
        gains = [after - before for before, after in pairwise(best.values())]
        verdicts[model] = judged([*gains, max(use.after) - max(use.of_all)], LEAST_GAIN, 0)
    return Measured([*bar_panels, *line_panels], told, of_all(verdicts.values()), verdicts[NATURAL])


def other_data(inputs: Inputs) -> Measured:
    """Measure predictions on one task with the counts of the other."""
    bars: dict[str, list[float]] = {f"counted on {task}": [] for task in TASKS}
    for tested in TASKS:
        held_out = inputs.routes(PLANTED, "test", tested).chosen
        for counted in TASKS:
            routes = inputs.routes(PLANTED, "train", counted).chosen
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
        reported="20 % of the paths carry more than 99 % of the tokens (Switch base, SAMSum and GLUE). The paper does "
        "not say whether these are observed or possible paths.",
        models=MODELS,
        how="Observed paths of the tokens of train texts.",
        why="The share depends on the number of possible paths: 28 to the power of 6 here. Tokens are far fewer, "
        "and most observed paths occur once.",
        measure=path_skew,
        on_natural="Nearly every path through all 30 layers occurs once. The likeliest fifth of the sets of one layer "
        "carries most of the tokens, but not nearly all.",
    ),
    Figure(
        name="edgemoe-frequency",
        paper="edgemoe",
        source="Figure 8",
        title="Use of experts, given the experts of earlier layers",
        reported="Experts of a layer are used about equally often. With two earlier layers known, one expert of layer "
        "3 is chosen by 87.1 % of the tokens.",
        models=MODELS,
        how=f"The predictor of `prefetch=path` foretells the first {PREDICTED_TOKENS:,} held-out tokens by pairs "
        "of experts in the train texts.",
        why="Earlier layers foretell later ones, as published. A token has several experts per layer, so one pair "
        "says less than a single path of Switch.",
        measure=frequency,
        on_natural="The use of experts is not balanced, so the likeliest ones are known without any earlier layer. "
        "Earlier layers add one point each.",
    ),
    Figure(
        name="edgemoe-other-data",
        paper="edgemoe",
        source="Table IV",
        title="Statistics of one data set, tested on another",
        reported="The offline stage on another data set costs about 2 % of accuracy on average.",
        models=(PLANTED,),
        how="Share of the tokens whose likeliest next expert was chosen, by exact sets of two layers. The paper "
        "measures accuracy of the compiled model instead.",
        why="The two tasks have different vocabularies and forms, so their paths differ more than those of two "
        "summary sets.",
        measure=other_data,
    ),
)
