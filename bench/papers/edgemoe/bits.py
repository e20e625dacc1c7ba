"""Accuracy with few bits: of the experts alone, and of all weights."""

from __future__ import annotations

from ..figure import Figure, Measured, Panel, of_all, percent
from ..inputs import Inputs
from ..models import DATA, MODELS, NATURAL, PLANTED, TASKS, TRAINED, Model

BITS = (8, 4, 2)
ALL_BITS = (8, 4)
ITEMS, TEXTS = 500, 40
EVALUATED = ("--limit", ITEMS)


def exact_match(inputs: Inputs, bundle: str, task: str = "gsm8k") -> float:
    """Return the score of a bundle on held-out items."""
    told = inputs.told("eval", bundle, "--data", DATA / task, "--task", task, *EVALUATED)
    return float(told["value"])


def quality(inputs: Inputs, model: Model, bundle: str) -> float:
    """Return the quality of a bundle by the metric of its model."""
    if model.metric == "exact match":
        return exact_match(inputs, bundle)
    task = ("--data", model.data / model.task, "--task", "perplexity")
    return float(inputs.told("eval", bundle, *task, "--limit", TEXTS)["value"])


def bits_of(inputs: Inputs, model: Model) -> Measured:
    """Measure the quality of one model with 8, 4 and 2 bits."""
    whole, is_perplexity = quality(inputs, model, f"{model.name}-16"), model.metric == "perplexity"
    kinds = {"experts only": ("experts", BITS), "all weights": ("all", ALL_BITS)}
    points, losses, told = dict[str, list[tuple[float, float]]](), dict[tuple[str, int], float](), list[str]()
    for kind, (part, widths) in kinds.items():
        values = [quality(inputs, model, f"{model.name}-{part}-{width}") for width in widths]
        points[kind] = [(float(width), value) for width, value in zip(widths, values, strict=True)]
        for width, value in zip(widths, values, strict=True):
            losses[part, width] = loss = value / whole - 1 if is_perplexity else 1 - value / whole
            score = f"perplexity {value:.2f}" if is_perplexity else f"{value:.3f}"
            told.append(f"{model.label}, {kind} in {width} bits: {score}, loss {percent(loss, 1)}")
    points["16 bits"] = [(float(width), whole) for width in BITS]
    panel = Panel("lines", model.label, "bits", model.metric, points=points, is_log=is_perplexity)
    holds = [
        losses["experts", 4] <= losses["all", 4] + 0.01,
        losses["experts", 2] >= losses["experts", 4] - 0.01,
        losses["experts", 4] <= 0.02,
    ]
    return Measured([panel], told, "same" if all(holds) else "partly")


def bits(inputs: Inputs) -> Measured:
    """Measure the quality of all models with 8, 4 and 2 bits."""
    found = {model: bits_of(inputs, model) for model in MODELS}
    panels = [panel for each in found.values() for panel in each.panels]
    told = [sentence for each in found.values() for sentence in each.found]
    in_tree = of_all([found[model].verdict for model in TRAINED])
    return Measured(panels, told, in_tree, found[NATURAL].verdict)


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
        reported="Experts in INT4 lose 1.30 to 1.44 % of Rouge-2, experts in INT2 5.82 % (SAMSum). Quantizing all "
        "weights loses more.",
        models=MODELS,
        how=f"{ITEMS} held-out problems, or the perplexity of {TEXTS} held-out texts of prose. Rounding to nearest, "
        "groups of 64. Dense weights have at least 4 bits.",
        why="Experts in 4 bits cost little, and all weights a little more. The planted example loses nearly "
        "everything in 2 bits, because its sensitivity was planted.",
        on_natural="Experts in 4 bits lose about twice as much as in the paper, and rounding in 2 bits destroys the "
        "model. The measure is perplexity, after a shorter training (68 steps). "
        "[Benchmarks](../benchmarks.md#natural-weights) has plans of moec.",
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
        why="GPTQ fits the codes to the calibration data. Problems and dialogues have little in common.",
        measure=other_data,
    ),
)
