"""Dynamic loading in two precisions, and lookahead over several layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...recorded import recorded
from ..figure import Figure, Measured, Panel, percent
from ..inputs import Inputs, mean
from ..models import DATA, PLANTED
from ..simulated import Arm, Device, mean_gain, simulate

BUNDLE = "planted-16-4"
PUBLISHED = "0.55,0.82"
"""Thresholds at which the planted example has the published shares of high, low and skipped experts."""
DEVICES = ("jetson-tx2-ssd", "raspberry-pi-4b-sd")
LOW = ("0,1", "0.55,1", "0.65,1", "0.8,1")
SKIP = ("0.55,0.55", "0.65,0.65", "0.8,0.8")
ITEMS, TEXTS = 60, 2
SHARE = 0.25
ACCURACY_SOURCE = "bench/results/2026-11-22-modes-mixed.jsonl"
DEPTHS = (0, 1, 2, 3, 4)
MOST_DEPTH = ("--set", "prefetch-rule=first-miss", "--set", "prefetch-layers=4")


def mode_rows(inputs: Inputs) -> dict[str | None, dict[str, Any]]:
    """Return the measured divergence and decisions by thresholds; None is the key of the exact run."""
    modes = "; ".join(f"dynamic-precision {text}" for text in (*LOW, *SKIP))
    asked = ("--data", DATA, "--task", "gsm8k", "--limit", ITEMS, "--expert-cache", f"{SHARE:.0%}", "--modes", modes)
    return {row["options"].get("dynamic_precision"): row for row in inputs.told("eval", BUNDLE, *asked)["rows"]}


def skip_or_low(inputs: Inputs) -> Measured:
    """Measure the KL of skipping and of low versions over the share of the experts that are replaced."""
    rows, points = mode_rows(inputs), {}
    for name, texts, share in (("low version", LOW, "low_share"), ("skipped", SKIP, "skipped_share")):
        found = [rows[text] for text in texts]
        points[name] = sorted((row["decisions"][share], row["kl"]["mean"]) for row in found)
    panel = Panel(
        "lines", "Divergence from the exact run", "share of the chosen experts that is replaced", "KL, nats "
        "per token",
        points=points, is_log=True,
    )  # fmt: skip
    told = [
        f"{name}: " + ", ".join(f"{kl:.2g} at {percent(share, 1)}" for share, kl in line)
        for name, line in points.items()
    ]
    is_better = max(kl for _, kl in points["low version"]) < min(kl for _, kl in points["skipped"])
    return Measured([panel], told, "same" if is_better else "partly")


def dynamic_loading(inputs: Inputs) -> Measured:
    """Predict the speed-up of dynamic loading by thresholds, on two devices."""
    bundle = inputs.opened(BUNDLE)
    size = int(SHARE * bundle.manifest.cost.expert_padded_bytes)
    texts = (*LOW, PUBLISHED)
    arms = [Arm(size, modes=(("dynamic_precision", text),)) for text in texts]
    traces = inputs.traces(BUNDLE, TEXTS, *MOST_DEPTH)
    bars = {name: [mean_gain(bundle, traces, Device(name), arm) for arm in arms] for name in DEVICES}
    panel = Panel("bars", "Decoding with low versions", "T1,T2", "speed over exact", groups=texts, bars=bars)
    told = [
        f"{name}: " + ", ".join(f"{gain:.2f} times at {text}" for text, gain in zip(texts, gains, strict=True))
        for name, gains in bars.items()
    ]
    published = [gains[-1] for gains in bars.values()]
    return Measured(
        [panel], told, "same" if min(published) >= 1.19 else "partly" if max(published) > 1.02 else "different"
    )


def depth(inputs: Inputs) -> Measured:
    """Predict the speed over the layers looked ahead, with and without low versions."""
    bundle, device = inputs.opened(BUNDLE), Device(DEVICES[0])
    size = int(SHARE * bundle.manifest.cost.expert_padded_bytes)
    points = {}
    for name, modes in (("16 bits", ()), ("16 and 4 bits", (("dynamic_precision", PUBLISHED),))):
        line = []
        for layers in DEPTHS:
            arm = Arm(size, prefetch="lookahead" if layers else "off", modes=modes)
            rates = []
            for trace in inputs.traces(BUNDLE, TEXTS, *MOST_DEPTH):
                told = replace(trace, header=replace(trace.header, prefetch_layers=max(layers, 1)))
                rates.append(float(simulate(bundle, told, device, arm).timeline.tokens_per_s or 0))
            line.append((float(layers), mean(rates)))
        points[name] = [(layers, rate / line[0][1]) for layers, rate in line]
    panel = Panel(
        "lines",
        f"Predicted on {DEVICES[0]}",
        "layers ahead (0: no lookahead)",
        "speed over no lookahead",
        points=points,
    )
    found = [
        f"{name}: " + ", ".join(f"{gain:.3f} at {layers:.0f}" for layers, gain in line) for name, line in points.items()
    ]
    gains = {name: max(gain for _, gain in line[1:]) for name, line in points.items()}
    is_same = gains["16 and 4 bits"] >= gains["16 bits"] >= 1
    return Measured([panel], found, "same" if is_same else "partly" if max(gains.values()) >= 1 else "different")


def accuracy(inputs: Inputs) -> Measured:
    """Return exact match with dynamic precision, as recorded in the experiment."""
    (record,) = recorded(ACCURACY_SOURCE, "example.json")
    rows = {row["options"].get("dynamic_precision", "exact"): row for row in record["rows"]}
    values = [row["value"] for row in rows.values()]
    panel = Panel("bars", "Problems answered", "T1,T2", "exact match", groups=list(rows), bars={"value": values})
    told = [
        f"{name}: {row['value']:.3f}, loss {percent(row['loss']['loss'], 2)} "
        f"({percent(row['loss']['interval95'][0], 2)} to {percent(row['loss']['interval95'][1], 2)})"
        for name, row in rows.items()
    ]
    worst = max(row["loss"]["loss"] for row in rows.values())
    return Measured([panel], told, "same" if worst <= 0.01 else "different")


_SIMULATED = "Two held-out texts, a quarter of the experts in memory. "
FIGURES = (
    Figure(
        name="hobbit-skip-or-low",
        paper="hobbit",
        source="Figure 3b",
        title="Skip an expert or read its low version",
        reported="Skipping 10 % of the experts raises perplexity by more than 1 %. Low versions of fewer than 20 % "
        "cost less than 1 %. The gap grows with the share.",
        models=(PLANTED,),
        how=f"KL to the exact run on {ITEMS} held-out problems, by `moec eval --modes`. Experts have 16 and 4 "
        "bits, and a quarter of them is in memory.",
        why="A low version keeps nearly all of an expert's output. The perplexity of 60 problems would not be "
        "precise enough.",
        measure=skip_or_low,
    ),
    Figure(
        name="hobbit-dynamic-loading",
        paper="hobbit",
        source="Figure 16",
        title="Speed-up of dynamic loading",
        reported="1.19 to 1.57 times, largest on the Jetson Orin, whose storage is slowest.",
        models=(PLANTED,),
        how=_SIMULATED + f"At {PUBLISHED} this model has the published shares of 67, 30 and 3 %.",
        why="Only missed experts are read in low precision, and the first expert of a token never is. Both devices "
        "wait for storage nearly all the time, so the gain is equal.",
        origin="Simulated",
        measure=dynamic_loading,
    ),
    Figure(
        name="hobbit-accuracy",
        paper="hobbit",
        source="Table 3",
        title="Accuracy with two precisions",
        reported="Accuracy on GSM8K and TruthfulQA falls by at most 1 %.",
        models=(PLANTED,),
        how="1,000 held-out problems, 8 bits with low versions of 2 bits, a quarter of the experts in memory "
        f"(`{ACCURACY_SOURCE}`). Intervals hold 95 %.",
        why="Low versions of unimportant experts change few answers. The problems are not GSM8K.",
        measure=accuracy,
    ),
    Figure(
        name="hobbit-depth",
        paper="hobbit",
        source="Figure 17b",
        title="Lookahead over one to four layers",
        reported="In decoding, lookahead brings 1.01 times or nothing in one precision, and about 1.05 times with two. "
        "The depth matters little.",
        models=(PLANTED,),
        how=_SIMULATED + "The rule is HOBBIT's: a later layer is asked only if no expert of the nearer one is missing.",
        why="A wrong guess delays needed experts, and nearly all time here is reading. The default rule of moec, "
        "`likely`, reads only predictions that were right often enough. On the plain example it gains 1.11 "
        "times.",
        origin="Simulated",
        measure=depth,
    ),
)
