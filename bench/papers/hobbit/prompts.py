"""Dynamic loading and lookahead in prompts, and what dynamic loading costs in quality."""

from __future__ import annotations

from dataclasses import replace

from ..figure import Figure, Measured, Panel, Verdict
from ..inputs import Inputs, mean
from ..models import PLANTED
from ..simulated import Arm, Device, simulate
from .loading import BUNDLE, DEPTHS, LOW, MOST_DEPTH, PUBLISHED, SHARE, SKIP, TEXTS, mode_rows

DEVICE = "jetson-tx2-ssd"
PROMPTS = (16, 32, 128)
TOKENS = 128
PUBLISHED_GAIN = 1.02
"""Least quotient of times that counts as a gain."""


def ttft_ms(inputs: Inputs, prompt: int, thresholds: str | None, layers_ahead: int = 0) -> float:
    """Predict the time to the first token, the mean of all texts. thresholds: None for an exact run."""
    bundle = inputs.opened(BUNDLE)
    size = int(SHARE * bundle.manifest.cost.expert_padded_bytes)
    modes = () if thresholds is None else (("dynamic_precision", thresholds),)
    arm = Arm(size, prefetch="lookahead" if layers_ahead else "off", modes=modes)
    times = []
    for trace in inputs.traces(BUNDLE, TEXTS, *MOST_DEPTH, "--prompt-tokens", prompt, "--tokens", TOKENS):
        told = replace(trace, header=replace(trace.header, prefetch_layers=max(layers_ahead, 1)))
        times.append(simulate(bundle, told, Device(DEVICE), arm).timeline.ttft_ns / 1e6)
    return mean(times)


def prefill(inputs: Inputs) -> Measured:
    """Predict the time to the first token over thresholds and over the layers looked ahead."""
    thresholds = (*LOW, PUBLISHED)
    gains = {
        f"{prompt} tokens": [ttft_ms(inputs, prompt, None) / ttft_ms(inputs, prompt, each) for each in thresholds]
        for prompt in PROMPTS
    }
    points = {}
    for label, modes in (("16 bits", None), ("16 and 4 bits", PUBLISHED)):
        for prompt in PROMPTS:
            line = [(float(layers), ttft_ms(inputs, prompt, modes, layers)) for layers in DEPTHS]
            points[f"{label}, {prompt} tokens"] = [(layers, line[0][1] / time) for layers, time in line]
    panels = [
        Panel("bars", "Low versions in prompts", "T1,T2", "speed over exact", groups=thresholds, bars=gains),
        Panel("lines", "Lookahead in prompts", "layers ahead (0: no lookahead)", "speed over no lookahead",
              points=points),
    ]  # fmt: skip
    told = [
        f"{name}: " + ", ".join(f"{gain:.2f} times at {text}" for text, gain in zip(thresholds, line, strict=True))
        for name, line in gains.items()
    ]
    told += [
        f"{name}: " + ", ".join(f"{gain:.2f} times at {layers:.0f}" for layers, gain in line[1:])
        for name, line in points.items()
    ]
    is_gain = [gains[name][-1] >= PUBLISHED_GAIN for name in gains]
    is_ahead = [max(gain for _, gain in line[1:]) >= PUBLISHED_GAIN for line in points.values()]
    verdict: Verdict = (
        "same" if all(is_gain) and all(is_ahead) else "partly" if any(is_gain) or any(is_ahead) else "different"
    )
    return Measured(panels, told, verdict)


def trade_off(inputs: Inputs) -> Measured:
    """Set the predicted speed-up of each threshold against its divergence."""
    rows, bundle = mode_rows(inputs), inputs.opened(BUNDLE)
    size = int(SHARE * bundle.manifest.cost.expert_padded_bytes)
    traces, device = inputs.traces(BUNDLE, TEXTS, *MOST_DEPTH), Device(DEVICE)
    points = {}
    for name, texts in (("low version", LOW), ("skipped", SKIP)):
        line = []
        for text in texts:
            arm = Arm(size, prefetch="off", modes=(("dynamic_precision", text),))
            gain = mean([float(simulate(bundle, trace, device, arm).gain or 0) for trace in traces])
            line.append((float(rows[text]["kl"]["mean"]), gain, text))
        points[name] = sorted(line)
    panel = Panel(
        "lines", f"Speed and divergence, {DEVICE}", "speed over exact", "KL, nats per token",
        points={name: sorted((gain, kl) for kl, gain, _ in line) for name, line in points.items()}, is_log=True,
    )  # fmt: skip
    told = [
        f"{name} at {text}: {gain:.2f} times as fast, KL {kl:.2g}"
        for name, line in points.items()
        for kl, gain, text in line
    ]
    best = {name: max(gain for _, gain, _ in line) for name, line in points.items()}
    costs = {name: max(kl for kl, _, _ in line) for name, line in points.items()}
    is_cheaper = costs["low version"] < costs["skipped"]
    return Measured([panel], told, "same" if is_cheaper and best["low version"] >= 1.19 else "partly")


FIGURES = (
    Figure(
        name="hobbit-prefill",
        paper="hobbit",
        source="Figures 16 and 17b, prefill",
        title="Dynamic loading and lookahead in prompts",
        reported="Lookahead takes 10 % off the time of prompts in all cases. Dynamic loading takes off more (part of "
        "60 to 80 % next to other programs).",
        models=(PLANTED,),
        how="Two held-out texts with prompts of 16, 32 and 128 tokens, a quarter of the experts in memory at the "
        "start. The most important token of an expert decides its version. Left without lookahead. Right: time "
        "without lookahead over time with it, by HOBBIT's rule.",
        why="Low versions shorten short prompts. In a prompt of 128 tokens nearly every expert is read in high "
        "precision. Lookahead brings nothing, because reading takes more than nine tenths of the time.",
        measure=prefill,
        origin="Simulated",
    ),
    Figure(
        name="hobbit-trade-off",
        paper="hobbit",
        source="Figures 3b and 16",
        title="Speed and divergence of dynamic loading",
        reported="Low versions are 1.19 to 1.57 times as fast as an exact run, with a loss under 1 %. Skipped "
        "experts cost more quality at an equal share.",
        models=(PLANTED,),
        how="KL of figure 3b, speed in decoding of figure 16, without lookahead. Thresholds are T1,T2.",
        why="A low version costs about a hundredth of the divergence of a skipped expert at an equal gain of speed.",
        measure=trade_off,
        origin="Measured and simulated",
    ),
)
