"""Distribution of the latency of samples: prompt and answer of a held-out item."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moec.runtime.simulation.timeline import Timeline
from moec.runtime.text.tokenizer import load_tokenizer
from moec.runtime.trace.trace import Trace

from ...expert_cache.eviction import texts
from ..figure import Figure, Measured, Panel, Verdict, percent, significant
from ..inputs import Inputs, complete_file
from ..models import DATA, PLANTED
from ..simulated import Device
from .arms import ARMS, Runtime, predicted
from .speed import PI, TX2

SAMPLES = 24
COMPARED = ("moec", "EdgeMoE", "EdgeMoE without P", "IO-FREE", "IO-QEXP", "STI", "IO-EXP")
BASELINES = ("IO-EXP", "IO-QEXP", "STI")
"""Arms that the paper finds slower than EdgeMoE."""
QUANTILES = (0.1, 0.5, 0.9)


ANSWERS = ("\nAnswer:", "\nSummary:")
"""What ends the prompt of an item."""


def prompt_of(item: str) -> str:
    """Return the part of an item that is given. Raises ValueError for an item without an answer."""
    for mark in ANSWERS:
        if mark in item:
            return item[: item.index(mark) + len(mark)]
    raise ValueError(f"expected one of {ANSWERS} in an item, found {item[:60]!r}")


def sample(inputs: Inputs, bundle: str, number: int) -> Trace:
    """Return the trace of a bundle on one held-out item. Even numbers are problems, odd ones dialogues."""
    item = texts(DATA, "test", number + 1, 1)[number]
    tokenizer = load_tokenizer(inputs.opened(bundle))
    prompt, whole = (len(tokenizer.encode(text).ids) for text in (prompt_of(item), item))
    lengths = ("--prompt-tokens", prompt, "--tokens", whole - prompt)
    return inputs.recorded(bundle, ["item", str(number)], _file(inputs.folder, number, item), *lengths)


def _file(folder: Path, number: int, item: str) -> Path:
    path = folder / "texts" / f"item-{number}.txt"
    if not path.exists():
        with complete_file(path) as partial:
            partial.write_text(item, encoding="utf-8")
    return path


def sample_ms(timeline: Timeline) -> float:
    """Return the time of a whole sample: of its prompt and of each further token."""
    return (timeline.ttft_ns + (timeline.tpot_mean_ns or 0) * (timeline.tokens - 1)) / 1e6


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return (value, share of the values up to it), in rising order."""
    return [(value, (at + 1) / len(values)) for at, value in enumerate(sorted(values))]


def latencies(inputs: Inputs, runtime: Runtime, device: Device) -> list[float]:
    """Return the predicted time of each sample, ms."""
    traces = (sample(inputs, runtime.bundle, number) for number in range(SAMPLES))
    return [sample_ms(predicted(inputs, runtime, device, trace)) for trace in traces]


def latency(inputs: Inputs) -> Measured:
    """Predict the time of samples on both devices."""
    panels, told, is_less = [], [], dict[str, list[bool]]()
    for name in (TX2, PI):
        device = Device(name)
        times = {arm: latencies(inputs, ARMS[arm], device) for arm in COMPARED}
        points = {arm: distribution(values) for arm, values in times.items()}
        panels.append(
            Panel("lines", f"Predicted on {name}", "time of a sample, ms", "share of the samples", points=points)
        )
        medians = {arm: float(np.median(values)) for arm, values in times.items()}
        told.append(f"{name}, median: " + ", ".join(f"{arm} {significant(value)} ms" for arm, value in medians.items()))
        for rival in BASELINES:
            quotients = np.quantile(times[rival], QUANTILES) / np.quantile(times["EdgeMoE"], QUANTILES)
            is_less.setdefault(rival, []).append(bool(quotients.min() > 1))
            told.append(
                f"{name}, {rival} over EdgeMoE: "
                + ", ".join(
                    f"{quotient:.2f} at {percent(share)}" for quotient, share in zip(quotients, QUANTILES, strict=True)
                )
            )
    wins = [all(each) for each in is_less.values()]
    verdict: Verdict = "same" if all(wins) else "partly" if any(wins) else "different"
    return Measured(panels, told, verdict)


FIGURES = (
    Figure(
        name="edgemoe-latency",
        paper="edgemoe",
        source="Figure 12",
        title="Distribution of the latency of samples",
        reported="EdgeMoE is faster than the baselines for all samples. On a Raspberry Pi 4B half of them take less "
        "than 46 s, with IO-EXP less than 106 s (Switch base with 8 experts).",
        models=(PLANTED,),
        how=f"{SAMPLES} held-out items, problems and dialogues in turn, with the arms of figure 11. A sample is a "
        "prompt and all tokens of its answer, which are forced. It begins with the warm start of its arm.",
        why="EdgeMoE is faster than IO-EXP and STI at each percentile, as published, and slower than IO-QEXP, as in "
        "figure 11.",
        origin="Simulated",
        measure=latency,
    ),
)
