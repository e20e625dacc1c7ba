"""Time of the routers of several layers in one product, over that of one product per router."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.layers.routing import RouterStack

from ...accelerator.simulated import random_matrix
from ..figure import Figure, Measured, Panel, Verdict
from ..inputs import SHIPPED, Inputs
from ..models import RANDOM

COUNTS = (1, 2, 3, 4)
CALLS, ROUNDS = 200, 31
SPEC = QuantSpec.parse("bf16")
EPS = 1e-5
MOST_GROWTH = 1.5
"""Largest time of all routers in one product, over that of one router, that counts as stable."""
QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Shape:
    """Rows and columns of a router: experts and width of the stream."""

    label: str
    experts: int
    hidden: int


SHAPES = (Shape("8 x 4,096 (Mixtral)", 8, 4096), Shape("64 x 2,048 (OLMoE)", 64, 2048))


def stacks(shape: Shape, count: int) -> tuple[RouterStack, list[RouterStack]]:
    """Return routers of `count` layers in one stack, and the same routers in a stack each."""
    matrices = [random_matrix(shape.experts, shape.hidden, SPEC) for _ in range(count)]
    norms = [np.ones(shape.hidden, np.float32) for _ in range(count)]
    together = RouterStack(matrices, norms, [None] * count, EPS)
    alone = [RouterStack([matrix], [norm], [None], EPS) for matrix, norm in zip(matrices, norms, strict=True)]
    return together, alone


def each_share(parts: Sequence[RouterStack], hidden: np.ndarray) -> list[np.ndarray]:
    """Return the shares of each stack, one call after the other."""
    return [part.shares(hidden) for part in parts]


def thread_ns(call: Callable[[], object]) -> int:
    """Return the processor time of this thread for CALLS calls. Other processes do not count."""
    started = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return time.thread_time_ns() - started


def measured(shape: Shape) -> dict[str, Any]:
    """Return quartiles of the times over that of one router, for each number of routers, by way of computing."""
    hidden = np.random.default_rng(0).standard_normal((1, shape.hidden)).astype(np.float32)
    single = stacks(shape, 1)[0]
    quotients: dict[str, list[list[float]]] = {"one product": [], "router by router": []}
    for count in COUNTS:
        together, alone = stacks(shape, count)
        ways: dict[str, Callable[[], object]] = {
            "one product": partial(each_share, [together], hidden),
            "router by router": partial(each_share, alone, hidden),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(ROUNDS):
            unit = thread_ns(partial(single.shares, hidden))
            for name in ways if number % 2 == 0 else reversed(ways):
                found[name].append(thread_ns(ways[name]) / unit)
        for name, values in found.items():
            quotients[name].append(np.quantile(values, QUARTILES).tolist())
    return quotients


def stacked(inputs: Inputs) -> Measured:
    """Measure both ways in turns, on one thread."""
    panels, told, gains, growths = [], [], list[float](), list[float]()
    for shape in SHAPES:
        asked = (shape.label, CALLS, ROUNDS)
        found = inputs.kept("stacked-routers", SHIPPED, asked, partial(on_one_thread, shape))
        points = {
            name: [(float(count), quartiles[1]) for count, quartiles in zip(COUNTS, line, strict=True)]
            for name, line in found.items()
        }
        panels.append(Panel("lines", f"Routers of {shape.label}", "routers", "time over that of one", points=points))
        for name, line in found.items():
            low, middle, high = line[-1]
            told.append(
                f"{shape.label}, {name}: {COUNTS[-1]} routers take {middle:.2f} times as long as one ({low:.2f} to "
                f"{high:.2f})"
            )
        gains.append(points["router by router"][-1][1] / points["one product"][-1][1])
        growths.append(points["one product"][-1][1])
    told.append("four routers, router by router over one product: " + ", ".join(f"{gain:.2f} times" for gain in gains))
    verdict: Verdict = "same" if max(growths) <= MOST_GROWTH else "different"
    return Measured(panels, told, verdict)


def on_one_thread(shape: Shape) -> dict[str, Any]:
    """Return `measured` with one computing thread."""
    threads = kernels.threads()
    kernels.set_threads(1)
    try:
        return measured(shape)
    finally:
        kernels.set_threads(threads)


FIGURES = (
    Figure(
        name="hobbit-stacked",
        paper="hobbit",
        source="Figure 17a",
        title="Cost of stacked routers",
        reported="The time of routers computed one after the other grows linearly with their number. In one product it "
        "stays the same (on a GPU).",
        models=(RANDOM,),
        how="Routers of random weights in 16 bits, each with the norm of its layer, for one token. Both ways take "
        f"turns in {ROUNDS} rounds of {CALLS} calls on one thread. Times of the thread are over that of one "
        "router in the same round: medians, with quartiles in brackets.",
        why="On a CPU the time of a router is that of its weights. Such small products do not keep a GPU busy.",
        measure=stacked,
    ),
)
