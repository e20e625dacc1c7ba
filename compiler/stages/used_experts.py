"""The use of experts as devices say it, else as calibration says it, else unknown."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..calibration.collect import ActivationStatistics
from ..calibration.tables import Tables
from ..preflight.prepared import Prepared


def with_use_on_devices(prepared: Prepared, statistics: ActivationStatistics | None) -> ActivationStatistics | None:
    """Return the statistics with the use of experts on devices, if the request names it, and tell so."""
    use, talk = prepared.use, prepared.talk
    if use is None:
        return statistics
    for note in use.notes(None if statistics is None else statistics.num_tokens):
        talk.note(note)
    return None if statistics is None else use.statistics(statistics, prepared.options.path_keys)


def used_tables(prepared: Prepared, statistics: ActivationStatistics | None) -> Tables | None:
    """Return the tables of the bundle; None if nothing is known.

    statistics: result of `with_use_on_devices`; None without data.
    """
    if statistics is not None:
        return Tables.of(statistics)
    return None if prepared.use is None else prepared.use.tables(prepared.options.path_keys)


def used_popularity(prepared: Prepared, statistics: ActivationStatistics | None) -> NDArray[np.uint32] | None:
    """Return the tokens of each expert, uint32 [L, E]; None if nothing is known.

    statistics: result of `with_use_on_devices`; None without data.
    """
    if statistics is not None:
        return statistics.popularity
    return None if prepared.use is None else prepared.use.popularity(None)
