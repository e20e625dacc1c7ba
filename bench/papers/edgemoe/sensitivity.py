"""The loss of one expert in 2 bits: sensitivity to quantization."""

from __future__ import annotations

import numpy as np

from ..figure import Figure, Measured, Panel, percent
from ..inputs import SHIPPED, Inputs
from ..models import PLANTED

LEAST_SPREAD = 2.0
"""Ratio of the largest loss to the median that counts as experts of different importance."""


def sensitivity(inputs: Inputs) -> Measured:
    """Return the predicted loss of each expert in the format of fewest bits, from the certificate of the bundle."""
    found = inputs.quality(SHIPPED)["sensitivity"]["experts"]
    losses = np.array(found["losses"])
    panel = Panel("map", f"One expert in {found['format']}", "expert", "layer", rows=(1000 * losses).tolist())
    layer, expert = np.unravel_index(int(losses.argmax()), losses.shape)
    spread = float(losses.max() / np.median(losses))
    top = np.sort(losses.ravel())[::-1]
    told = [
        f"most sensitive: expert {expert} of layer {layer}, {1000 * losses.max():.0f} thousandths of a nat per token",
        f"{spread:.0f} times the median, {1000 * np.median(losses):.1f} thousandths",
        f"share of the 5 most sensitive of {losses.size} experts in the sum of all losses: "
        f"{percent(top[:5].sum() / top.sum())}",
    ]
    return Measured([panel], told, "same" if spread >= LEAST_SPREAD else "different")


FIGURES = (
    Figure(
        name="edgemoe-sensitivity",
        paper="edgemoe",
        source="Figure 7a",
        title="Sensitivity of each expert to 2 bits",
        reported="One expert has INT2, all others INT4. The loss of accuracy differs from expert to expert. It is "
        "0.44 % for the first and 0.59 % for the second. The unit is Rouge-2 on SAMSum.",
        models=(PLANTED,),
        how="Predicted KL to the checkpoint from gradients (the default of `moec compile`), in thousandths of a nat "
        "per token. `quality.json` of `examples/bundle` has it. The other experts keep 16 bits.",
        why="Experts differ here too. The largest values are planted: the gains of two experts per layer were made "
        "unequal at the start of the training. So the size of the spread says nothing of other models.",
        measure=sensitivity,
    ),
)
