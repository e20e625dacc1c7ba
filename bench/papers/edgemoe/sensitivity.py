"""The loss of one expert in 2 bits: sensitivity to quantization."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...recorded import recorded
from ..figure import Figure, Measured, Panel, Verdict, of_all, percent
from ..inputs import SHIPPED, Inputs
from ..models import NATURAL, PLANTED, Model

LEAST_SPREAD = 2.0
"""Ratio of the largest loss to the median that counts as experts of different importance."""
NATURAL_SOURCE = "bench/results/2026-11-26-natural-certificate.jsonl"
TOP_SHARE = 0.1


def sensitivity(inputs: Inputs) -> Measured:
    """Return the predicted loss of each expert in the format of fewest bits, from certificates of bundles."""
    (natural,) = recorded(NATURAL_SOURCE, "quality-2-percent.json")
    panels, told, verdicts = [], [], dict[Model, Verdict]()
    for model, quality in ((PLANTED, inputs.quality(SHIPPED)), (NATURAL, natural)):
        found: dict[str, Any] = quality["sensitivity"]["experts"]
        losses = np.array(found["losses"])
        title = f"{model.label}, one expert in {found['format']}"
        panels.append(Panel("map", title, "expert", "layer", rows=(1000 * losses).tolist()))
        spread = float(losses.max() / np.median(losses))
        used = np.array(quality["statistics"]["popularity"])
        told += [f"{model.label}: {sentence}" for sentence in (*described(losses), by_use(losses, used))]
        verdicts[model] = "same" if spread >= LEAST_SPREAD else "different"
    return Measured(panels, told, of_all(verdicts.values()), verdicts[NATURAL])


def described(losses: np.ndarray) -> list[str]:
    """Return sentences on the losses of experts, [L, E], nats per token."""
    layer, expert = np.unravel_index(int(losses.argmax()), losses.shape)
    median, ordered = float(np.median(losses)), np.sort(losses.ravel())[::-1]
    top = max(1, round(TOP_SHARE * losses.size))
    by_layer = losses.sum(1)
    return [
        f"most sensitive is expert {expert} of layer {layer}, {1000 * losses.max():.1f} thousandths of a nat per "
        f"token, {losses.max() / median:.0f} times the median ({1000 * median:.2g})",
        f"the {top} most sensitive of {losses.size} experts have {percent(ordered[:top].sum() / losses.sum())} of the "
        f"sum of all losses; the most sensitive layer, {by_layer.argmax()}, has "
        f"{percent(by_layer.max() / losses.sum())}",
    ]


def by_use(losses: np.ndarray, used: np.ndarray) -> str:
    """Return a sentence on losses and use of the experts of a layer. used: share of the tokens, [L, E]."""
    found = [float(np.corrcoef(of_layer, use)[0, 1]) for of_layer, use in zip(losses, used, strict=True)]
    return f"loss and use of an expert correlate at {np.mean(found):.2f} inside a layer, on average"


FIGURES = (
    Figure(
        name="edgemoe-sensitivity",
        paper="edgemoe",
        source="Figure 7a",
        title="Sensitivity of each expert to 2 bits",
        reported="One expert has INT2, all others INT4. It costs 0.44 % of Rouge-2 on SAMSum for the first expert, and "
        "0.59 % for the second.",
        models=(PLANTED, NATURAL),
        how="Predicted KL to the checkpoint from gradients, in thousandths of a nat per token. The other experts "
        f"keep 16 bits. Values of `quality.json` of `examples/bundle`, and of `{NATURAL_SOURCE}`.",
        why="Experts differ here too. The largest values of the planted example were made, so they say nothing of "
        "other models.",
        measure=sensitivity,
        on_natural="Experts differ far less. Inside a layer the loss follows the use, and the first layer is the most "
        "sensitive one.",
    ),
)
