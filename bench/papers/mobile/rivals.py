"""A little model next to runtimes of the kinds that MoBiLE compares with, and the time of its two kinds of passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.runtime.options.runtime import Prefetch

from ..figure import Figure, Measured, Panel, Verdict
from ..inputs import Inputs, mean
from ..models import DATA, PLAIN
from ..simulated import Arm, Device, simulate
from .little_models import BUNDLE, DEVICE, GAMMAS, ITEMS, PUBLISHED_GAMMA, SHARE, TEXTS, gamma_modes, gamma_rows

SKIPPED = (0.7, 0.8, 0.9)
"""Thresholds of unimportance above which a missed expert is skipped."""
PRE_GATED = ("--set", "prefetch-rule=spread", "--set", "prefetch-layers=1", "--set", "prefetch-experts=4")
"""Reads all experts that the next layer is foreseen to choose."""
Mode = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Kind:
    """A kind of runtime. recorded: options of `moec bench` for its traces."""

    prefetch: Prefetch
    modes: Mode = ()
    recorded: tuple[object, ...] = ()


def skipping(threshold: float) -> Mode:
    """Return the options under which missed experts above a threshold are skipped."""
    return (("dynamic_precision", f"{threshold:g},{threshold:g}"),)


KINDS = {
    "offloading": Kind("off"),
    "Pre-gated type": Kind("lookahead", recorded=PRE_GATED),
    **{f"AdapMoE type, {threshold:g}": Kind("lookahead", skipping(threshold)) for threshold in SKIPPED},
    "MoBiLE": Kind("lookahead", gamma_modes(PUBLISHED_GAMMA)),
    "moec": Kind("lookahead"),
}


def token_ms(inputs: Inputs, kind: Kind, share: float = SHARE) -> float:
    """Predict the time per token, the mean of all texts. share: of the experts in memory."""
    bundle, device = inputs.opened(BUNDLE), Device(DEVICE)
    arm = Arm(int(share * bundle.manifest.cost.expert_padded_bytes), prefetch=kind.prefetch, modes=kind.modes)
    traces = inputs.traces(BUNDLE, TEXTS, *kind.recorded)
    return mean([float(simulate(bundle, trace, device, arm).timeline.tpot_mean_ns or 0) / 1e6 for trace in traces])


def skip_rows(inputs: Inputs) -> dict[float, float]:
    """Return the exact match with skipped experts, by threshold."""
    modes = "; ".join(f"dynamic-precision {threshold:g},{threshold:g}" for threshold in SKIPPED)
    asked = ("--data", DATA, "--task", "gsm8k", "--limit", ITEMS, "--expert-cache", f"{SHARE:.0%}", "--modes", modes)
    _, *rows = inputs.told("eval", BUNDLE, *asked)["rows"]
    return {threshold: float(row["value"]) for threshold, row in zip(SKIPPED, rows, strict=True)}


def rivals(inputs: Inputs) -> Measured:
    """Predict the speed of all kinds. Measure the answers of lossy kinds."""
    times = {name: token_ms(inputs, kind) for name, kind in KINDS.items()}
    gains = {name: times["offloading"] / time for name, time in times.items()}
    whole, *rows = (float(row["value"]) for row in gamma_rows(inputs))
    little, skipped = dict(zip(GAMMAS, rows, strict=True)), skip_rows(inputs)
    scores = dict.fromkeys(KINDS, whole)
    scores |= {f"AdapMoE type, {threshold:g}": value for threshold, value in skipped.items()}
    scores["MoBiLE"] = little[PUBLISHED_GAMMA]
    names = list(KINDS)
    panels = [
        Panel("bars", f"Predicted on {DEVICE}", "", "speed over offloading", groups=names,
              bars={"half of the experts in memory": [gains[name] for name in names]}),
        Panel("bars", "Problems answered", "", "exact match", groups=names,
              bars={"half of the experts in memory": [scores[name] for name in names]}),
    ]  # fmt: skip
    told = [f"{name}: {gains[name]:.2f} times as fast, exact match {scores[name]:.3f}" for name in names]
    over = {name: gains["MoBiLE"] / gains[name] for name in names if name.startswith(("Pre-gated", "AdapMoE"))}
    told.append("MoBiLE over " + ", ".join(f"{name}: {gain:.2f} times" for name, gain in over.items()))
    wins = [gain > 1 for gain in over.values()]
    verdict: Verdict = "same" if all(wins) else "partly" if any(wins) else "different"
    return Measured(panels, told, verdict)


def passes(inputs: Inputs) -> Measured:
    """Predict the time of a pass with all experts, of a little pass, and of the pass of a fallback."""
    shares = (0.25, 0.5, 0.75)
    bars: dict[str, list[float]] = {"all experts": [], "little pass": [], "pass of a fallback": []}
    for share in shares:
        whole, little, both = (
            token_ms(inputs, Kind("lookahead", modes), share) for modes in ((), gamma_modes(0.0), gamma_modes(1.0))
        )
        for line, value in zip(bars.values(), (whole, little, both - little), strict=True):
            line.append(value)
    groups = [f"{share:.0%}" for share in shares]
    panel = Panel("bars", f"Predicted on {DEVICE}", "experts in memory", "ms", groups=groups, bars=bars)
    told = [
        f"{group} in memory: " + ", ".join(f"{name} {line[at]:.2f} ms" for name, line in bars.items())
        for at, group in enumerate(groups)
    ]
    is_less = [less_than(bars[name], bars["all experts"]) for name in ("little pass", "pass of a fallback")]
    return Measured([panel], told, "same" if all(is_less) else "partly" if any(is_less) else "different")


def less_than(values: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether each value is less than its other one."""
    return all(value < other for value, other in zip(values, others, strict=True))


FIGURES = (
    Figure(
        name="mobile-rivals",
        paper="mobile",
        source="Figure 5 right",
        title="Speed and answers next to other kinds of runtimes",
        reported="With equal memory MoBiLE is 1.28 times as fast as Pre-gated MoE and 1.21 times as fast as AdapMoE.",
        models=(PLAIN,),
        how=f"Speed: {TEXTS} held-out texts, half of the experts in memory. Offloading reads on demand. The "
        "Pre-gated type reads the four experts ahead that the next layer is foreseen to choose. Its gates are "
        "not trained anew, so it reads what they missed and loses nothing. The AdapMoE type skips missed "
        f"experts of little weight (`dynamic-precision T,T`, {len(SKIPPED)} thresholds) and reads ahead as "
        f"moec does. MoBiLE has gamma {PUBLISHED_GAMMA} and K/2. Answers: {ITEMS} held-out problems by `moec "
        "eval --modes`. The other programs themselves were not run.",
        why="MoBiLE is faster than the Pre-gated type by about as much as published. The finding on AdapMoE is not "
        "confirmed: skipping above a threshold of 0.7 is faster, and answers as many problems.",
        measure=rivals,
        origin="Measured and simulated",
    ),
    Figure(
        name="mobile-passes",
        paper="mobile",
        source="Figure 3 left",
        title="Time of a little pass and of a fallback",
        reported="A little pass takes less time than one with all experts. So does the pass of a fallback, because the "
        "discarded pass read its experts ahead.",
        models=(PLAIN,),
        how=f"{TEXTS} held-out texts, with lookahead. A little pass has gamma 0, so no token is computed again. "
        "With gamma 1 every token is. The pass of a fallback is the difference of both times.",
        why="A little pass reads half as many experts. All experts of a token are read once, in one of both passes.",
        measure=passes,
        origin="Simulated",
    ),
)
