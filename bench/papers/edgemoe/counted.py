"""Measured energy of a token, where the machine has an energy counter that processes can read (RAPL on Linux)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..figure import Figure, Measured, Panel
from ..inputs import Inputs
from ..models import PLANTED
from .arms import ARMS
from .throttled import command

ZONES = Path("/sys/class/powercap")
FEW, MANY = 16, 256
"""Tokens of both runs. The difference of their energies leaves out the start of the process."""
ROUNDS = 7
COMPARED = ("moec", "EdgeMoE", "IO-FREE", "IO-QEXP", "IO-EXP")
MOST_MORE = 1.17
"""Published mean of the energy of EdgeMoE over that of IO-FREE."""


@dataclass(frozen=True)
class Zone:
    """An energy counter: a processor package.

    folder: has `energy_uj`, and `max_energy_range_uj` at which the count starts again at 0.
    """

    folder: Path

    def microjoules(self) -> int:
        """Return the count."""
        return int((self.folder / "energy_uj").read_text())

    def since(self, before: int) -> int:
        """Return the microjoules since an earlier count, which started again at most once."""
        range_uj = int((self.folder / "max_energy_range_uj").read_text())
        return (self.microjoules() - before) % (range_uj + 1)


def packages(zones: Path = ZONES) -> list[Zone]:
    """Return the counters of all processor packages that this process may read; empty if there is none."""
    found = []
    for name in sorted(zones.glob("*/name")):
        try:
            if name.read_text().startswith("package"):
                zone = Zone(name.parent)
                zone.microjoules()
                found.append(zone)
        except OSError:
            continue
    return found


def lacking() -> str:
    """Return what a measurement needs that is not here; empty if nothing is missing."""
    return "" if packages() else f"a machine with an energy counter in `{ZONES}` measures it"


def joules(call: Callable[[], object], zones: list[Zone]) -> float:
    """Return the energy of all packages during a call."""
    before = [zone.microjoules() for zone in zones]
    call()
    return sum(zone.since(count) for zone, count in zip(zones, before, strict=True)) / 1e6


def token_joules(inputs: Inputs, arm: str) -> dict[str, Any]:
    """Return quartiles of the energy of a token over rounds."""
    zones, found = packages(), []

    def run(tokens: int) -> float:
        arguments = command(inputs, ARMS[arm], tokens)
        return joules(lambda: subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True), zones)

    for _ in range(ROUNDS):
        found.append((run(MANY) - run(FEW)) / (MANY - FEW))
    return {"quartiles": np.quantile(found, (0.25, 0.5, 0.75)).tolist()}


def energy(inputs: Inputs) -> Measured:
    """Measure the energy of a token of each arm."""
    found = {}
    for arm in COMPARED:
        asked = (arm, FEW, MANY, ROUNDS)
        counted = inputs.kept("counted-energy", ARMS[arm].bundle, asked, partial(token_joules, inputs, arm))
        found[arm] = [1000 * float(value) for value in counted["quartiles"]]
    panel = Panel("bars", "Energy of a token, counted", "", "mJ", groups=list(found),
                  bars={"energy": [line[1] for line in found.values()]}, is_log=True)  # fmt: skip
    told = [f"{arm}: {middle:.3g} mJ ({low:.3g} to {high:.3g})" for arm, (low, middle, high) in found.items()]
    more = found["EdgeMoE"][1] / found["IO-FREE"][1]
    told.append(f"EdgeMoE takes {more:.2f} times the energy of IO-FREE")
    return Measured([panel], told, "same" if more <= MOST_MORE else "different")


FIGURES = (
    Figure(
        name="edgemoe-energy-counted",
        paper="edgemoe",
        source="Figure 13",
        title="Counted energy of a token",
        reported="EdgeMoE takes 1.1 % more energy than IO-FREE at least, and 17 % more on average.",
        models=(PLANTED,),
        how=f"Count of the processor packages (RAPL) while `moec bench` decodes {MANY} tokens, less the count with "
        f"{FEW} tokens, per token. Median of {ROUNDS} rounds, with quartiles in brackets. The count has the energy of "
        "the packages, not that of memory and storage, and also that of other processes.",
        why="Reading takes time in which the processor waits, and waiting takes energy too.",
        measure=energy,
        needs=lacking,
    ),
)
