"""`moec` with larger steps of the search toward a KL, and without swaps. Arguments are those of `moec`."""

from __future__ import annotations

import math

import numpy as np

from moec.cli.main import main
from moec.compiler.search.bracket import Bracket
from moec.compiler.search.swaps import NO_SWAPS
from moec.compiler.sensitivity.trials import Trials
from moec.compiler.stages import planning

AIM, POWER, FIRST_KL_PER_LOSS = 0.98, 1.5, 1.9


def next_budget(bracket: Bracket, budget: float, ratio: float) -> float:
    """Return the next predicted loss: see `Bracket.next_budget`, with AIM and POWER."""
    proposed = budget * float(np.clip((AIM * ratio) ** POWER, 1 / 16, 16))
    floor = bracket.low.predicted if bracket.low is not None else 0.0
    if floor * 1.02 < proposed < bracket.high / 1.02:
        return proposed
    if math.isinf(bracket.high):
        return floor * 2
    return math.sqrt(floor * bracket.high) if floor > 0 else bracket.high / 16


if __name__ == "__main__":
    planning.swaps = lambda prepared: NO_SWAPS
    Bracket.next_budget = next_budget
    Trials.first_kl_per_loss = property(lambda trials: FIRST_KL_PER_LOSS)
    main()
