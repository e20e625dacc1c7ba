"""Events of a pull: sentences and a progress bar for people, or a line of JSON for each."""

from __future__ import annotations

import time

from moec.shipping.channel import Channel, ChannelBundle
from moec.shipping.pull.delta import PullObserver, PullPlan

from . import output
from .progress_bar import ProgressBar

LINE_EVERY_S = 1.0


class PullTalk(PullObserver):
    """Sentences on stderr.

    bar: shows the progress.
    """

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar

    def chosen(self, channel: Channel, bundle: ChannelBundle, name: str) -> None:
        output.say(
            f"channel `{channel.channel}`, sequence {channel.sequence}: `{channel.model}` for `{bundle.device}`, "
            f"bundle {name}"
        )

    def planned(self, plan: PullPlan) -> None:
        kinds = (
            (plan.fetched_bytes, "to fetch"),
            (plan.copied_bytes, "to copy from installed bundles"),
            (plan.linked_bytes, "in unchanged files"),
            (plan.kept_bytes, "there already"),
        )
        parts = ", ".join(f"{output.human_bytes(size_bytes)} {kind}" for size_bytes, kind in kinds if size_bytes)
        output.say(f"{output.human_bytes(plan.total_bytes)}: {parts or 'nothing to do'}")

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        self._bar(done_bytes, total_bytes)

    def testing(self) -> None:
        output.say("all bytes are there and checked; running the self-test")

    def warning(self, text: str) -> None:
        output.say(f"warning: {text}")


class PullLines(PullObserver):
    """One JSON object a line on stdout. `event` names its kind. Progress is told once in LINE_EVERY_S."""

    def __init__(self) -> None:
        self._last_line = time.monotonic() - LINE_EVERY_S

    def chosen(self, channel: Channel, bundle: ChannelBundle, name: str) -> None:
        facts = {item: getattr(channel, item) for item in ("model", "channel", "sequence", "expires")}
        facts |= {"device": bundle.device, "bundle": name, "total_bytes": bundle.total_bytes}
        output.data_json({"event": "chosen", **facts})

    def planned(self, plan: PullPlan) -> None:
        names = ("total_bytes", "fetched_bytes", "copied_bytes", "linked_bytes", "kept_bytes")
        output.data_json({"event": "planned", **{name: getattr(plan, name) for name in names}})

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY_S or done_bytes == total_bytes:
            self._last_line = now
            output.data_json({"event": "progress", "done_bytes": done_bytes, "total_bytes": total_bytes})

    def testing(self) -> None:
        output.data_json({"event": "testing"})

    def warning(self, text: str) -> None:
        output.data_json({"event": "warning", "message": text})
