"""Events of a pull, for the one who shows them."""

from __future__ import annotations

from dataclasses import dataclass

from ..channel import Channel, ChannelBundle


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Bytes of a pull.

    total_bytes: the bundle without its `moec.json`.
    linked_bytes: files that an installed bundle has; they take no disk.
    kept_bytes: bytes that an earlier pull left.
    copied_bytes: experts and dense weights that an installed bundle has.
    fetched_bytes: bytes that come from the store.
    """

    total_bytes: int
    linked_bytes: int
    kept_bytes: int
    copied_bytes: int
    fetched_bytes: int


class PullObserver:
    """Receives the events of a pull. This one ignores them."""

    def chosen(self, channel: Channel, bundle: ChannelBundle, name: str) -> None:
        """Receive the bundle of a verified channel. name: of its folder."""

    def planned(self, plan: PullPlan) -> None:
        """Receive the plan, before any weight is fetched."""

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Receive the bytes of the bundle that are there."""

    def testing(self) -> None:
        """Learn that all bytes are there, and that the bundle is opened."""

    def warning(self, text: str) -> None:
        """Receive a sentence that the user should read."""
