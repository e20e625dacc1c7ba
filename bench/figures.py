"""Pictures of measured results, as SVG files in docs/pictures: `python -m bench.figures`.

`make figures` runs it. The same results and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from .recorded import recorded
from .small_svg import small_svg

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

ROOT = Path(__file__).parents[1]
PICTURES = Path("docs/pictures")
SWEEP = "bench/results/2026-11-22-sweep-swaps.jsonl"
SPEED = "bench/results/2026-11-24-fork.jsonl"

# Label in the picture -> name in the sweep. None is the search of moec itself.
PLANS = {
    "moec": None,
    "best uniform format": "best uniform",
    "EdgeMoE's search, moec's quantizer": "EdgeMoE with our quantizer",
    "one format per layer": "one format per layer",
}
# Label in the picture -> arms of the comparison: under a memory limit, and with everything in memory.
ENGINES = {
    "moec": ("moec", "moec"),
    "ik_llama.cpp": ("ik_llama.cpp mmap 128 KiB", "ik_llama.cpp repacked"),
    "llama.cpp": ("llama.cpp mmap 128 KiB", "llama.cpp repacked"),
}
# Share of the experts in memory, in % -> condition of the comparison. All decode 64 tokens after a prompt of 32.
SHARES = {25: "cache-25", 50: "cache-50", 75: "cache-75", 100: "memory32"}

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#666666")
MARKERS = ("o", "s", "^", "D")
SETTINGS: dict[RcKeyType, object] = {
    "svg.hashsalt": "moec",
    "svg.fonttype": "none",
    "font.size": 10,
    "path.simplify": False,
}


@dataclass(frozen=True)
class Point:
    """One measurement.

    x, y: position in the units of the axes.
    least, most: range of the repeated runs, in the unit of y; both equal y if there is one run.
    """

    x: float
    y: float
    least: float
    most: float


@dataclass(frozen=True)
class Picture:
    """Lines to draw.

    name: file name without suffix.
    series: points of each line, by label.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: dict[str, list[Point]]


def bytes_over_loss() -> Picture:
    """Return the bytes of the routed experts over the allowed loss, for the example."""
    curve = recorded(SWEEP, "example.curve.json")[0]["curve"]
    series = {}
    for label, baseline in PLANS.items():
        line = []
        for entry in curve:
            size = entry["expert_packed_bytes"] if baseline is None else entry["baselines"][baseline]
            megabytes = size / 1e6
            line.append(Point(100 * entry["target"], megabytes, megabytes, megabytes))
        series[label] = line
    return Picture(
        name="example-bytes-over-loss",
        title="Example model: bytes that keep a loss (16 bits: 18.87 MB)",
        x_label="loss of exact match allowed, %",
        y_label="routed experts, MB",
        series=series,
    )


def speed_over_share() -> Picture:
    """Return the decode speed over the share of the experts that fits in memory, for the yardstick."""
    rows = recorded(SPEED, "summary.json")
    by_arm = {(row["condition"], row["arm"]): row for row in rows}
    series = {}
    for label, (limited, unlimited) in ENGINES.items():
        line = []
        for share, condition in SHARES.items():
            row = by_arm[condition, limited if share < 100 else unlimited]
            line.append(Point(share, row["decode_tokens_per_s"], row["decode_least"], row["decode_most"]))
        series[label] = line
    return Picture(
        name="yardstick-decode-over-share",
        title="OLMoE-1B-7B's shape at 4.5 bits, Zen 4, 2 cores, 64 tokens after 32",
        x_label="share of the experts that fits in memory, %",
        y_label="decode, tokens/s (bars: least to most)",
        series=series,
    )


def draw(picture: Picture) -> bytes:
    """Return a picture as SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(7, 4), facecolor="white")
        FigureCanvasSVG(figure)
        axis = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.98, "bottom": 0.13, "top": 0.91})
        for number, (label, line) in enumerate(picture.series.items()):
            axis.errorbar(
                [point.x for point in line],
                [point.y for point in line],
                yerr=_ranges(line),
                label=label,
                color=COLOURS[number],
                marker=MARKERS[number],
                capsize=3,
            )
        axis.set_title(picture.title, fontsize=11)
        axis.set_xlabel(picture.x_label)
        axis.set_ylabel(picture.y_label)
        axis.set_xticks(sorted({point.x for line in picture.series.values() for point in line}))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        image = BytesIO()
        figure.savefig(image, format="svg", metadata={"Title": picture.title})
    return small_svg(image.getvalue())


def _ranges(line: list[Point]) -> list[list[float]] | None:
    """Return how far the repeated runs lie below and above each point; None if there is one run."""
    below = [point.y - point.least for point in line]
    above = [point.most - point.y for point in line]
    return [below, above] if any(below + above) else None


def pictures() -> list[Picture]:
    """Return every picture of docs/pictures."""
    return [bytes_over_loss(), speed_over_share()]


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / PICTURES, help="where the pictures go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures():
        (folder / f"{picture.name}.svg").write_bytes(draw(picture))
        print(folder / f"{picture.name}.svg")


if __name__ == "__main__":
    main()
