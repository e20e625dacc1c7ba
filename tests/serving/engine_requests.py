"""Requests to a scheduler, and a way to wait for their events."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from moec.serving.engine.request import Ended, Event, Failed, GenerationRequest, TokenMade
from moec.serving.engine.scheduler import Scheduler

PATIENCE_S = 60


class Asked:
    """One request and what came back."""

    def __init__(self, tokens: Sequence[int], max_new_tokens: int = 8, **options: Any) -> None:
        self.events: list[Event] = []
        self._has_ended, self._has_begun = threading.Event(), threading.Event()
        self.request = GenerationRequest(list(tokens), max_new_tokens, self._deliver, **options)

    def _deliver(self, event: Event) -> None:
        self.events.append(event)
        self._has_begun.set()
        if isinstance(event, Ended | Failed):
            self._has_ended.set()

    def wait(self) -> Event:
        """Return the last event."""
        assert self._has_ended.wait(PATIENCE_S), "no end"
        return self.events[-1]

    def wait_for_token(self) -> None:
        """Wait for the first event."""
        assert self._has_begun.wait(PATIENCE_S), "no event"

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, TokenMade)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, TokenMade))

    @property
    def ended(self) -> Ended:
        event = self.wait()
        assert isinstance(event, Ended), event
        return event

    @property
    def failed(self) -> Failed:
        event = self.wait()
        assert isinstance(event, Failed), event
        return event


def ask(scheduler: Scheduler, *asked: Asked) -> None:
    """Submit requests and wait for all ends."""
    for each in asked:
        scheduler.submit([each.request])
    for each in asked:
        each.wait()
