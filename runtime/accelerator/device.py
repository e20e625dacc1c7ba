"""ExpertDevice: what a device must be able to do with experts. Implementations: torch_device.py and
simulation/accelerator_device.py."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from .. import kernels

COPY_SLOTS = 4
"""Copies under way or waiting to be computed, at most. Two would keep a link busy if somebody began the next whenever
one ends; the processor does that between two experts of its own, so the link needs a queue for the time of one.
"""

DeviceExpert: TypeAlias = Any
"""An expert on the device; only the device that made it knows what it is."""


class ExpertDevice(Protocol):
    """One layer at a time: `begin`, any number of `run`, `collect`. Not for use from several threads at once.

    name: as the user named it. host_bytes: what it takes of the host's memory beyond what the process has when it is
    opened. counts_all: whether used_bytes counts what others keep on it as well.
    """

    name: str
    host_bytes: int
    counts_all: bool

    @property
    def used_bytes(self) -> int:
        """Bytes of its memory that it has taken, at most."""

    def keep(self, expert: kernels.Expert) -> DeviceExpert:
        """Upload an expert that stays. Its host bytes may go once this returns."""

    def copy(self, expert: kernels.Expert) -> DeviceExpert:
        """Begin to copy an expert for one `run`; its host bytes may go once this returns.

        Waits while COPY_SLOTS copies have not been computed.
        """

    def drop(self, expert: DeviceExpert) -> None:
        """Give up a copy that nobody will run."""

    def begin(self, hidden_states: np.ndarray) -> None:
        """Take the rows of a layer, float32 [T, D]; results that were not collected are dropped."""

    def run(self, expert: DeviceExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        """Begin to compute an expert. tokens, ranks: int32 [n], the places of its results, no pair twice."""

    def collect(self, parts: np.ndarray) -> None:
        """Wait for the results of this layer and write them to their places in float32 [T, K, D]."""

    def synchronize(self) -> None:
        """Wait for everything that was begun."""

    def close(self) -> None:
        """Give the device's memory back."""
