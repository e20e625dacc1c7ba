"""Popularity of experts, and the hit rate of placements by it."""

from __future__ import annotations

import numpy as np

from moec.compiler.calibration.activation_paths import count_popularity

from ..figure import Figure, Measured, Panel, Verdict, judged, of_all, over_layers, percent
from ..inputs import Inputs
from ..models import MODELS, NATURAL, Model

PLACED = {"environment 1": 56 / 256, "environment 2": 125 / 256}
"""Share of the experts that the GPU holds in the environments of the paper."""
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LEVELS, ACTIVATION_TOKENS = (0.001, 0.01, 0.1, 1.0), 2048
LEAST_GAIN = 0.03
"""Published gain of the best placement over a random one, as a share of all uses."""


def popularity(inputs: Inputs, model: Model, split: str) -> np.ndarray:
    """Return the tokens of each expert, [L, E]."""
    chosen = inputs.routes(model, split).chosen
    return count_popularity(chosen, int(chosen.max()) + 1)


def popularity_map(inputs: Inputs) -> Measured:
    """Measure how often each expert is used, over the most used one."""
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model in MODELS:
        counts = popularity(inputs, model, "train")
        shares = counts / counts.max()
        panels.append(Panel("map", model.label, "expert", "layer", rows=shares.tolist()))
        quarter, three = np.quantile(shares, (0.25, 0.75))
        told.append(
            f"{model.label}: mean {shares.mean():.2f}, standard deviation {shares.std():.2f}, "
            f"quartiles {quarter:.2f} and {three:.2f}, least {shares.min():.2f}"
        )
        verdicts[model] = judged([float(shares.mean())], 0.5, 0.5)
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


def hit_rate(placed: np.ndarray, counts: np.ndarray) -> float:
    """Return the share of uses that placed experts serve. placed: bool, counts: uses; [L, E] each."""
    return float(counts[placed].sum() / counts.sum())


def placement(inputs: Inputs) -> Measured:
    """Measure the hit rate of the most popular, random and least popular experts, by share of the experts placed."""
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model in MODELS:
        known, tested = popularity(inputs, model, "train"), popularity(inputs, model, "test")
        order = np.argsort(-known.ravel(), kind="stable")

        def rate(share: float, is_best: bool, order: np.ndarray = order, tested: np.ndarray = tested) -> float:
            count = round(share * len(order))
            placed = np.zeros(len(order), bool)
            placed[order[:count] if is_best else order[len(order) - count :]] = True
            return hit_rate(placed.reshape(tested.shape), tested)

        points = {
            "most popular": [(share, rate(share, True)) for share in SHARES],
            "random (mean)": [(share, share) for share in SHARES],
            "least popular": [(share, rate(share, False)) for share in SHARES],
        }
        panels.append(Panel("lines", model.label, "share of the experts placed", "hit rate", points=points))
        verdicts[model] = judged([rate(share, True) - share for share in PLACED.values()], LEAST_GAIN, 0)
        for environment, share in PLACED.items():
            best, worst = rate(share, True), rate(share, False)
            placed = f"{model.label}, {environment} ({percent(share, 1)} placed)"
            told.append(f"{placed}: best {percent(best, 1)}, worst {percent(worst, 1)}")
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


def near_zero(inputs: Inputs) -> Measured:
    """Measure the share of activations near 0 in the chosen experts, layer by layer."""
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model in MODELS:
        counts: dict[float, list[float]] = {level: [] for level in LEVELS}
        passes = 0
        for routing in inputs.routed(model, "test", ACTIVATION_TOKENS):
            passes += 1
            for layer in range(routing.count):
                values = routing.activations(layer).abs()
                for level, found in counts.items():
                    found.append(float((values < level).float().mean()))
        shares = {level: np.array(found).reshape(passes, -1).mean(0) for level, found in counts.items()}
        points = {f"below {level:g}": over_layers(found) for level, found in shares.items()}
        panels.append(Panel("lines", model.label, "layer", "share of the values", points=points))
        told.append(
            f"{model.label}, mean over the layers: "
            + ", ".join(f"{percent(found.mean(), 1)} below {level:g}" for level, found in shares.items())
        )
        verdicts[model] = "same" if shares[0.01].max() < 0.5 else "different"
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


FIGURES = (
    Figure(
        name="twiddler-popularity",
        paper="twiddler",
        source="Figure 8",
        title="Popularity of experts",
        reported="Uses over those of the most used expert: mean 0.71, standard deviation 0.08, quartiles 0.67 and "
        "0.76, least 0.22. The paper calls this relatively balanced.",
        models=MODELS,
        how="Uses by the tokens of train texts.",
        why="A loss balanced the experts in training, as for Mixtral. The deviation is larger because each layer "
        "has few experts and one kind of text.",
        measure=popularity_map,
        on_natural="Uses are not balanced: no loss balanced the experts when this model was divided and trained.",
    ),
    Figure(
        name="twiddler-placement",
        paper="twiddler",
        source="Appendix C",
        title="Hit rate of placements by popularity",
        reported="With 56 of 256 experts on the GPU: best 25.2 %, random 21.9 %, worst 18.7 %. With 125: best 53.0 %, "
        "random 48.8 %, worst 44.6 %.",
        models=MODELS,
        how="Experts are ranked on train texts and counted on held-out texts.",
        why="The gain is the spread of the popularity, which is larger here.",
        measure=placement,
        on_natural="The gain is far larger than published, because the uses are not balanced.",
    ),
    Figure(
        name="twiddler-activations",
        paper="twiddler",
        source="Table 2",
        title="Values near 0 after SiLU",
        reported="In Mixtral, fewer than 2 % of the values are below 0.001 in every layer. In 28 of 32 layers fewer "
        "than 5 % are below 0.01, in 24 fewer than 30 % below 0.1. So leaving out zeros saves little.",
        models=MODELS,
        how=f"Values of the gate of the chosen experts on {ACTIVATION_TOKENS:,} held-out tokens, mean over the layers.",
        why="SiLU has no exact zeros, and few values are near 0 in these models too.",
        measure=near_zero,
        on_natural="More values are near 0 in the first layers, and still fewer than 5 % are below 0.01 in each layer.",
    ),
)
