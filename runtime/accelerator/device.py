"""ExpertDevice: the operations that a device offers for experts.

Implementations: `torch_device.py` and `simulation/accelerator_replay.py`.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np

from .. import kernels

COPY_SLOTS = 4
"""Most copies that are in progress or wait to be computed.

Two slots would keep a link busy if each copy began when the previous one ends.
The CPU begins copies only between two of its own experts, so the link needs a queue that lasts as long as one of them.
"""

DeviceExpert: TypeAlias = Any
"""An expert on the device. Its type belongs to the device that made it."""


class ExpertDevice(Protocol):
    """A device that computes one layer at a time. Not thread-safe.

    The order is `begin`, any number of `run` and `launch`, `collect`.

    name: name that the user gave.
    host_bytes: host memory that the device needs, without the memory that the process has when the device is opened.

    counts_all: whether used_bytes includes memory that other code takes on the device.
    """

    name: str
    host_bytes: int
    counts_all: bool

    @property
    def used_bytes(self) -> int:
        """Largest amount of device memory taken so far, bytes."""

    def keep(self, expert: kernels.Expert) -> DeviceExpert:
        """Upload an expert that stays on the device. Its host bytes may be freed when this returns."""

    def copy(self, expert: kernels.Expert) -> DeviceExpert:
        """Begin to copy an expert for one `run`. Its host bytes may be freed when this returns.

        Waits while COPY_SLOTS copies have not been computed.
        """

    def drop(self, expert: DeviceExpert) -> None:
        """Give up a copy that will not be run."""

    def begin(self, hidden_states: np.ndarray) -> None:
        """Set the rows of a layer, float32 [T, D], contiguous. They must not change until `collect`.

        Drops results that were not collected, also those of a layer that an error ended.
        """

    def run(self, expert: DeviceExpert, tokens: np.ndarray, ranks: np.ndarray) -> None:
        """Add an expert to those that the next `launch` begins. A device may also begin it at once.

        tokens, ranks: where its results go, int32 [n] each; no pair occurs twice.
        """

    def launch(self) -> None:
        """Begin to compute the experts that were added."""

    def collect(self, parts: np.ndarray) -> None:
        """Begin what was added, wait for the results of this layer and write them into parts, float32 [T, K, D]."""

    def synchronize(self) -> None:
        """Wait for all work that was begun."""

    def close(self) -> None:
        """Free the device's memory."""
