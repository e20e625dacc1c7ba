"""Little models: fewer experts per token, and all of them for tokens of low confidence."""

from __future__ import annotations

from typing import Any

from ...recorded import recorded
from ..figure import Figure, Measured, Panel, percent
from ..inputs import Inputs, mean
from ..models import DATA, PLAIN
from ..simulated import Arm, Device, mean_gain, simulate

BUNDLE, DEVICE = "plain-16", "jetson-tx2-ssd"
EXPERTS_SOURCE = "bench/results/2026-11-26-plain-example.jsonl"
GAMMAS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95)
PUBLISHED_GAMMA = 0.7
CONFIDENCES = tuple(at / 20 for at in range(21))
ITEMS, TEXTS = 200, 3
SHARE = 0.5
PARTS = {1: "K/4", 2: "K/2", 3: "3K/4"}


def gamma_modes(gamma: float) -> tuple[tuple[str, str], ...]:
    """Return the options of a little model of K/2 experts."""
    return (("big_little", f"gamma={gamma},k=2"),)


def gamma_rows(inputs: Inputs) -> list[dict[str, Any]]:
    """Return the answers and decisions with all experts, then with each gamma."""
    modes = "; ".join(f"big-little gamma={gamma},k=2" for gamma in GAMMAS)
    asked = ("--data", DATA, "--task", "gsm8k", "--limit", ITEMS, "--expert-cache", f"{SHARE:.0%}", "--modes", modes)
    rows: list[dict[str, Any]] = inputs.told("eval", BUNDLE, *asked)["rows"]
    return rows


def gamma_sweep(inputs: Inputs) -> Measured:
    """Measure quality, fallbacks and predicted speed-up over gamma."""
    whole, *rows = gamma_rows(inputs)
    bundle, device, traces = inputs.opened(BUNDLE), Device(DEVICE), inputs.traces(BUNDLE, TEXTS)
    size = int(SHARE * bundle.manifest.cost.expert_padded_bytes)
    gains = [mean_gain(bundle, traces, device, Arm(size, modes=gamma_modes(gamma))) for gamma in GAMMAS]
    fallbacks = [0.0 if row["decisions"] is None else row["decisions"]["fallback_share"] or 0.0 for row in rows]
    pairs = list(zip(GAMMAS, rows, strict=True))
    panels = [
        Panel(
            "lines", "Problems answered", "gamma", "exact match",
            points={
                "little model, K/2": [(gamma, row["value"]) for gamma, row in pairs],
                "all experts": [(gamma, whole["value"]) for gamma in GAMMAS],
            },
        ),
        Panel(
            "lines", "Tokens computed again", "gamma", "share of the tokens",
            points={"fallback ratio": list(zip(GAMMAS, fallbacks, strict=True))},
        ),
        Panel(
            "lines", f"Predicted on {DEVICE}", "gamma", "speed over all experts",
            points={"little model, K/2": list(zip(GAMMAS, gains, strict=True))},
        ),
    ]  # fmt: skip
    told = [
        f"gamma {gamma:g}: exact match {row['value']:.3f} (all experts {whole['value']:.3f}), "
        f"{percent(fallback, 1)} computed again, {gain:.2f} times as fast"
        for (gamma, row), fallback, gain in zip(pairs, fallbacks, gains, strict=True)
    ]
    is_trade = fallbacks == sorted(fallbacks) and gains[0] > gains[-1] > 1
    return Measured(panels, told, "same" if is_trade else "partly")


def fewer_experts(inputs: Inputs) -> Measured:
    """Return quality and fallbacks of little models of three sizes, as recorded in the experiment."""
    rows: list[dict[str, Any]] = recorded(EXPERTS_SOURCE, "modes.json")[0]["rows"]
    found = {row["options"].get("big_little"): row for row in rows}
    whole, kinds = found[None]["value"], {"vanilla": "gamma=0", "with fallback, gamma 0.7": "gamma=0.7"}
    values = {name: [found[f"{gamma},k={k}"]["value"] for k in PARTS] for name, gamma in kinds.items()}
    bars = {**values, "all experts": [whole] * len(PARTS)}
    ratios = [found[f"gamma=0.7,k={k}"]["decisions"]["fallback_share"] for k in PARTS]
    panels = [
        Panel("bars", "Problems answered", "experts per token", "exact match", groups=list(PARTS.values()), bars=bars),
        Panel(
            "bars", "Tokens computed again, gamma 0.7", "experts per token", "share of the tokens",
            groups=list(PARTS.values()), bars={"fallback ratio": ratios},
        ),
    ]  # fmt: skip
    told = [
        f"{part} ({k} of 4): vanilla {vanilla:.3f}, with fallback {kept:.3f}, {percent(ratio, 1)} computed again "
        f"(all experts {whole:.3f})"
        for (k, part), vanilla, kept, ratio in zip(PARTS.items(), *values.values(), ratios, strict=True)
    ]
    helps = [kept >= vanilla for vanilla, kept in zip(*values.values(), strict=True)]
    return Measured(panels, told, "same" if all(helps) else "partly")


def fallback_curve(inputs: Inputs) -> Measured:
    """Measure the share of tokens under each confidence, for little models of three sizes."""
    points = {}
    for k, part in PARTS.items():
        options = () if k == 2 else ("--trace-little", k)
        traces = inputs.traces(BUNDLE, TEXTS, *options)
        told = [each.scores.confidence for trace in traces for each in trace.passes if each.scores is not None]
        sure = [confidence for confidence in told if confidence is not None]
        points[part] = [(level, mean([confidence < level for confidence in sure])) for level in CONFIDENCES]
    panel = Panel("lines", "Fallback ratio over gamma", "gamma", "share of the tokens", points=points)
    at = {part: dict(curve)[PUBLISHED_GAMMA] for part, curve in points.items()}
    found = [f"{part}: {percent(share)} of the tokens are under {PUBLISHED_GAMMA}" for part, share in at.items()]
    return Measured([panel], found, "same" if at["K/4"] >= at["K/2"] >= at["3K/4"] else "different")


def with_prefetch(inputs: Inputs) -> Measured:
    """Predict a little model and reading ahead, alone and together."""
    bundle, device = inputs.opened(BUNDLE), Device(DEVICE)
    size = int(SHARE * bundle.manifest.cost.expert_padded_bytes)
    little = gamma_modes(PUBLISHED_GAMMA)
    arms = {
        "all experts": Arm(size, prefetch="off"),
        "all experts, lookahead": Arm(size),
        "little model": Arm(size, prefetch="off", modes=little),
        "little model, lookahead": Arm(size, modes=little),
    }
    times = {
        name: mean([float(simulate(bundle, trace, device, arm).timeline.tpot_mean_ns or 0) for trace in traces])
        for traces in [inputs.traces(BUNDLE, TEXTS)]
        for name, arm in arms.items()
    }
    gains = {name: times["all experts"] / time for name, time in times.items()}
    panel = Panel(
        "bars", f"Predicted on {DEVICE}", "", "speed over all experts", groups=list(gains),
        bars={"half of the experts in memory": list(gains.values())},
    )  # fmt: skip
    told = [f"{name}: {gain:.2f} times" for name, gain in gains.items()]
    best = max(gains, key=lambda name: gains[name])
    return Measured([panel], told, "same" if best == "little model, lookahead" else "different")


_SIMULATED = "Half of the experts are in memory. Flash takes the place of the PCIe link of the paper."
FIGURES = (
    Figure(
        name="mobile-gamma",
        paper="mobile",
        source="Table III, figure 5 left",
        title="Quality, fallbacks and speed over gamma",
        reported="OLMoE on GSM8K, K/2: gamma 0 gives 0.371 at 1.85 times the speed. Gamma 0.7 gives 0.448 at 1.57 "
        "times, with 21 % of the tokens computed again. All experts give 0.515.",
        models=(PLAIN,),
        how=f"Exact match and fallbacks: {ITEMS} held-out problems by `moec eval --modes`. One is {100 / ITEMS:g} "
        f"%. Speed: forced held-out texts, on which about 30 % of the tokens fall back. {_SIMULATED}",
        why="Speed falls with gamma. The answers fall back far less often than those of OLMoE. At equal fallback "
        "ratios the speed is lower than published, because a cache serves half of the requests.",
        origin="Measured and simulated",
        measure=gamma_sweep,
    ),
    Figure(
        name="mobile-experts",
        paper="mobile",
        source="Table IV",
        title="K/4, K/2 and 3K/4 experts",
        reported="OLMoE on GSM8K, vanilla and with fallback: 0.040 and 0.180 with 2 of 64 experts, 0.371 and 0.448 "
        "with 4, 0.491 and 0.506 with 6. All (8 of 64) give 0.515.",
        models=(PLAIN,),
        how=f"1,000 held-out problems (`{EXPERTS_SOURCE}`, whose first line has the command).",
        why="The fallback recovers a part of the loss for K/4, and most of it for K/2. The published fallback "
        "ratios are more than ten times as high.",
        measure=fewer_experts,
    ),
    Figure(
        name="mobile-fallback",
        paper="mobile",
        source="Tables III and IV",
        title="Fallback ratio of little models",
        reported="OLMoE on GSM8K, gamma 0.7. With 2 of 64 experts 29 % of the tokens fall back, with 4 or 6 21 %.",
        models=(PLAIN,),
        how="Confidence of each token of held-out problems and dialogues, teacher-forced.",
        why="Forced text has tokens that nothing foretells, which hide the differences. In generated answers the "
        "ratio falls with the number of experts (table IV).",
        measure=fallback_curve,
    ),
    Figure(
        name="mobile-prefetch",
        paper="mobile",
        source="Section IV-B",
        title="A little model and reading ahead",
        reported="MoBiLE alone is 1.60 to 1.72 times as fast as offloading, and 1.92 times together with pre-gating.",
        models=(PLAIN,),
        how=f"Gamma {PUBLISHED_GAMMA}, K/2. {_SIMULATED}",
        why="A little model reads half as many experts, and reading ahead overlaps reads with computing. The gains "
        "are smaller because the cache serves half of the requests.",
        origin="Simulated",
        measure=with_prefetch,
    ),
)
