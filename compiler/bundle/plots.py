"""The picture of the report: size versus KL, bits per unit, popularity and sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from moec.manifests.errors import MissingDependency
from moec.manifests.model import PROJECTIONS

_MARKERS = ("s", "^", "v", "d")


def report_picture(name: str, quality: Mapping[str, Any]) -> bytes:
    """Return a PNG of the whole report. Raises MissingDependency without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependency("the picture needs `matplotlib`", 'pip install "moec[compile]"') from error
    figure = Figure(figsize=(13, 9))  # fixed margins, because an automatic layout draws everything twice
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, gridspec_kw={"left": 0.07, "right": 0.98, "bottom": 0.06, "top": 0.91, "hspace": 0.27})
    figure.suptitle(f"{name}: target {quality['target']['kind']} {quality['target']['value']:g}, {quality['verdict']}")
    _frontier(axes[0, 0], quality)
    _heat_map(figure, axes[0, 1], _bits_grid(quality), "bits per weight", "layer", "expert: gate, up, down", "viridis")
    statistics = quality["statistics"]
    if statistics is not None:
        grid = np.array(statistics["popularity"])
        _heat_map(figure, axes[1, 0], grid, "share of the layer's tokens", "layer", "expert", "magma")
    else:
        axes[1, 0].set_axis_off()
    _gains(axes[1, 1], quality)
    image = BytesIO()
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()


def _bits_grid(quality: Mapping[str, Any]) -> np.ndarray:
    """Return [L, 3 E]: the three projections of an expert are adjacent. Missing experts are blank."""
    units = quality["bits"]["units"]
    layers, experts = len(units["down"]), max(map(len, units["down"]))
    grid = np.full((layers, experts, len(PROJECTIONS)), np.nan)
    for column, projection in enumerate(PROJECTIONS):
        for layer, bits in enumerate(units[projection]):
            grid[layer, : len(bits), column] = bits
    return grid.reshape(layers, experts * len(PROJECTIONS))


def _heat_map(figure: Any, axis: Any, grid: np.ndarray, title: str, rows: str, columns: str, colours: str) -> None:
    image = axis.imshow(grid, aspect="auto", cmap=colours, interpolation="nearest")
    figure.colorbar(image, ax=axis)
    axis.set_title(title)
    axis.set_ylabel(rows)
    axis.set_xlabel(columns)


def _frontier(axis: Any, quality: Mapping[str, Any]) -> None:
    axis.set_title("size of the routed experts and KL")
    axis.set_xlabel("routed experts, MB (10^6 bytes)")
    axis.set_ylabel("mean KL to the reference, nats per token")
    axis.set_yscale("log")
    search = [t for t in quality["trials"] if t["kl"] is not None and t["purpose"] in ("search", "plan")]
    if search:
        axis.plot(
            [t["expert_packed_bytes"] / 1e6 for t in search], [t["kl"]["mean"] for t in search], "o", label="search"
        )
    comparison = quality["comparison"]
    if comparison is not None:
        for marker, baseline in zip(_MARKERS, comparison["baselines"], strict=False):
            points = np.array([point for point in baseline["frontier"] if point[1] > 0]).reshape(-1, 2)
            axis.plot(points[:, 0] / 1e6, points[:, 1], marker, alpha=0.7, label=baseline["name"])
        axis.plot(
            [quality["sizes"]["expert_packed_bytes"] / 1e6], [comparison["plan_kl"]], "*", markersize=18, label="plan"
        )
    if search or comparison is not None:
        axis.legend()


def curve_picture(name: str, curve: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a sweep as PNG: bytes of routed experts over the permitted loss, for moec and the baselines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6))
    FigureCanvasAgg(figure)
    axis = figure.subplots(gridspec_kw={"left": 0.1, "right": 0.97, "bottom": 0.1, "top": 0.93})
    axis.set_title(f"{name}: routed experts at each loss")
    axis.set_xlabel("relative loss allowed")
    axis.set_ylabel("routed experts, MB (10^6 bytes)")
    axis.set_xscale("log")
    names = next((list(point["baselines"]) for point in curve if point["baselines"]), [])
    for marker, other in zip(("s-", "^-", "v-", "d-"), names, strict=False):
        _line(axis, [(point["target"], point["baselines"].get(other)) for point in curve], marker, other)
    _line(axis, [(point["target"], point["expert_packed_bytes"]) for point in curve], "*-", "moec")
    targets = [100 * point["target"] for point in curve]
    axis.set_xticks(targets, [f"{target:g} %" for target in targets])
    axis.set_xticks([], minor=True)
    axis.set_ylim(bottom=0)
    axis.legend()
    image = BytesIO()
    figure.savefig(image, format="png", dpi=110, metadata={"Software": None})
    return image.getvalue()


def _line(axis: Any, points: Sequence[tuple[float, float | None]], marker: str, label: str) -> None:
    known = [(100 * loss, size / 1e6) for loss, size in points if size is not None]
    axis.plot([loss for loss, _ in known], [size for _, size in known], marker, label=label)


def _gains(axis: Any, quality: Mapping[str, Any]) -> None:
    sensitivity = quality["sensitivity"]
    if sensitivity is None:
        axis.set_axis_off()
        return
    axis.set_title("measured gain: KL per unit of output error")
    axis.set_xlabel("layer")
    axis.set_yscale("log")
    for projection, values in sensitivity["gains"].items():
        positive = np.where(np.array(values) > 0, values, np.nan)
        axis.plot(range(len(values)), positive, "o-", label=projection)
    axis.legend()
