"""Accuracy with few bits: of the experts alone, and of all weights."""

from __future__ import annotations

from ..figure import Figure, Measured, Panel, percent
from ..inputs import Inputs
from ..models import DATA, PLANTED, TASKS, TRAINED

BITS = (8, 4, 2)
ALL_BITS = (8, 4)
ITEMS = 500
EVALUATED = ("--limit", ITEMS)


def exact_match(inputs: Inputs, bundle: str, task: str = "gsm8k") -> float:
    """Return the score of a bundle on held-out items."""
    told = inputs.told("eval", bundle, "--data", DATA / task, "--task", task, *EVALUATED)
    return float(told["value"])


def bits(inputs: Inputs) -> Measured:
    """Measure quality with 8, 4 and 2 bits."""
    panels, told, holds = [], [], []
    for model in TRAINED:
        name = model.label
        whole = exact_match(inputs, f"{model.name}-16")
        experts = [exact_match(inputs, f"{model.name}-experts-{width}") for width in BITS]
        everything = [exact_match(inputs, f"{model.name}-all-{width}") for width in ALL_BITS]
        points = {
            "experts only": [(float(width), value) for width, value in zip(BITS, experts, strict=True)],
            "all weights": [(float(width), value) for width, value in zip(ALL_BITS, everything, strict=True)],
            "16 bits": [(float(width), whole) for width in BITS],
        }
        panels.append(Panel("lines", name, "bits", "exact match", points=points))
        told += [
            f"{name}, experts only in {width} bits: {value:.3f}, loss {percent(1 - value / whole, 1)}"
            for width, value in zip(BITS, experts, strict=True)
        ]
        told += [
            f"{name}, all weights in {width} bits: {value:.3f}, loss {percent(1 - value / whole, 1)}"
            for width, value in zip(ALL_BITS, everything, strict=True)
        ]
        holds += [experts[1] >= everything[1] - 0.01, experts[2] <= experts[1] + 0.01, 1 - experts[1] / whole <= 0.02]
    return Measured(panels, told, "same" if all(holds) else "partly")


def other_data(inputs: Inputs) -> Measured:
    """Measure the score of 2 bits on both tasks, calibrated on either."""
    bars: dict[str, list[float]] = {"16 bits": [exact_match(inputs, "planted-16", task) for task in TASKS]}
    for calibrated, bundle in (("gsm8k", "planted-2"), ("samsum", "planted-2-samsum")):
        bars[f"2 bits, calibrated on {calibrated}"] = [exact_match(inputs, bundle, task) for task in TASKS]
    panel = Panel("bars", "Score by calibration data", "tested on", "exact match or Rouge-2", groups=TASKS, bars=bars)
    own, other = (next(name for name in bars if name.endswith(task)) for task in TASKS)
    more = [bars[other][0] / bars[own][0], bars[own][1] / bars[other][1]]
    told = [
        f"{name}: " + ", ".join(f"{task} {value:.3f}" for task, value in zip(TASKS, values, strict=True))
        for name, values in bars.items()
    ]
    return Measured([panel], told, "same" if min(more) >= 0.98 else "different")


FIGURES = (
    Figure(
        name="edgemoe-bits",
        paper="edgemoe",
        source="Figure 6",
        title="Accuracy with few bits of the experts or of all weights",
        reported="Experts in INT4 lose 1.30 to 1.44 %, experts in INT2 5.82 % on SAMSum. Quantizing all weights "
        "loses more. The measure is Rouge-2.",
        models=TRAINED,
        how=f"{ITEMS} held-out problems, rounding to nearest without data, groups of 64. Dense weights have at least 4 "
        "bits, so all weights in 2 bits are not measured.",
        why="Experts in 4 bits cost little, and all weights cost a little more, as published. The plain example loses "
        "about as much with experts in 2 bits as the paper's. The planted one loses nearly everything, because its "
        "sensitivity was planted.",
        measure=bits,
    ),
    Figure(
        name="edgemoe-other-calibration",
        paper="edgemoe",
        source="Table IV",
        title="Calibration on one data set, tested on another",
        reported="The offline stage on another data set costs about 2 % of accuracy on average.",
        models=(PLANTED,),
        how=f"All experts in 2 bits by GPTQ, calibrated on one task and tested on {ITEMS} held-out items of both.",
        why="GPTQ fits the codes to the inputs of the calibration data. Problems and dialogues have little in common.",
        measure=other_data,
    ),
)
