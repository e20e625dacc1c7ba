"""Continuous batching: one thread owns the engine, and requests join and leave between its passes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moec.manifests.errors import MoecError, OptionError
from moec.runtime.engine.engine import Engine
from moec.runtime.engine.slots import Placement, common_length

from .request import Failed, GenerationRequest
from .running import Activity, PassRunner, RunningSequence
from .saved_slots import SavedSlots

_SHARED_TOKENS = 16
"""A request waits for a prompt in progress if it can then copy so many tokens more."""

_SAVE_AFTER_S = 0.2
"""Time without work after which slots are saved."""


class QueueFull(Exception):
    """The queue has no place. `waiting` is the number of requests in it."""

    def __init__(self, waiting: int) -> None:
        super().__init__(f"{waiting} requests wait")
        self.waiting = waiting


class ShuttingDown(Exception):
    """The server takes no more requests."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Options of the scheduler.

    queue: most requests that wait for a slot.
    prefill_tokens: most tokens of prompts in a pass while answers run.
    Raises OptionError.
    """

    queue: int = 32
    prefill_tokens: int = 256

    def __post_init__(self) -> None:
        if self.queue < 0:
            raise OptionError(f"`--queue` must be 0 or more, found {self.queue}", "leave it out for 32")
        if self.prefill_tokens < 1:
            raise OptionError(f"`--prefill-tokens` must be 1 or more, found {self.prefill_tokens}", "try 256")


class Scheduler:
    """Runs requests on one engine. `start` starts its thread; the end of the `with` block ends it.

    report: called with errors that are no MoecError, for the log. It must not raise.
    saved_slots: slots on disk, or None. They are saved while nothing else is to do, and at the end.
    after_events: called after the events of a pass, and after those of ended requests. It must neither raise nor block.
    """

    def __init__(
        self,
        engine: Engine,
        options: ServingOptions | None = None,
        report: Callable[[BaseException], None] = lambda error: None,
        saved_slots: SavedSlots | None = None,
    ) -> None:
        self.engine, self.options, self.activity = engine, options or ServingOptions(), Activity()
        self._saved_slots, self._unsaved = saved_slots, set[int]()
        self._report = report
        self.after_events: Callable[[], None] = lambda: None
        self._runner = PassRunner(engine, self.options.prefill_tokens, self._fail, self.activity)
        self.pool = engine.slots
        self._waiting = deque[GenerationRequest]()
        self._running: list[RunningSequence] = []
        self._changed, self._steps_done = threading.Condition(), 0
        self._is_draining = self._ends_running = self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def __enter__(self) -> Scheduler:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    # -- any thread ----------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, all or none. Raises QueueFull, ShuttingDown."""
        with self._changed:
            if self._is_draining or not self._thread.is_alive():
                raise ShuttingDown
            places = self.options.queue + self.engine.options.slots - len(self._running)
            if len(self._waiting) + len(requests) > max(places, 0):
                self.activity.add_end("refused")
                raise QueueFull(len(self._waiting))
            self._waiting.extend(requests)
            self._changed.notify_all()

    def cancel(self, requests: Iterable[GenerationRequest]) -> None:
        """End requests before the next pass. Requests that have ended are left alone."""
        with self._changed:
            for request in requests:
                request.cancel()
            self._changed.notify_all()

    def place_in_queue(self, request: GenerationRequest) -> int | None:
        """Return the place of a waiting request, from 1; None if it does not wait."""
        with self._changed:
            return next((at for at, waiting in enumerate(self._waiting, 1) if waiting is request), None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        """True while the engine's thread takes requests."""
        return self._thread.is_alive() and not self._is_draining

    def drain(self, ends_running: bool = False) -> None:
        """Take no more requests, and end those that wait. Running ones go on, unless `ends_running`."""
        with self._changed:
            self._is_draining = True
            self._ends_running = self._ends_running or ends_running
            waiting, self._waiting = list(self._waiting), deque()
            for sequence in self._running if ends_running else ():
                sequence.request.cancel()
            self._changed.notify_all()
        for request in waiting:
            self._tell(request, Failed("shutting_down", "the server is shutting down"))
        self.after_events()

    def stop(self, patience_s: float | None = None) -> bool:
        """End all requests and the thread, and wait for the end of its pass. Returns whether the thread has ended.

        patience_s: most seconds in which neither a pass ends nor a slot is saved; None: no limit. A pass that waits
            for its storage cannot be interrupted.
        """
        self.drain(ends_running=True)
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        done = -1
        while self._thread.is_alive() and self._steps_done != done:
            done = self._steps_done
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    # -- the engine's thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._drop_ended()
                self._admit()
                self.after_events()
                if self._running:
                    self._runner.run(self._running)
                    self._steps_done += 1
                    self._release_ended()
                    self.after_events()
        finally:  # also after a fault: no client must wait for a thread that has ended
            self.drain(ends_running=True)
            self._drop_ended()
            self.after_events()
            while self._unsaved:
                self._save_slot()

    def _wait_for_work(self) -> bool:
        """Block until there is work, and save slots meanwhile. Returns False at the end."""
        while True:
            with self._changed:
                if self._waiting or self._running:
                    return True
                if self._is_stopping:
                    return False
                has_news = self._changed.wait(_SAVE_AFTER_S if self._unsaved else None)
            if not has_news:
                self._save_slot()

    def _save_slot(self) -> None:
        self._steps_done += 1
        slot = self.pool.slots[self._unsaved.pop()]
        try:
            with self.engine.exclusive:
                if self._saved_slots is not None and slot.is_free:
                    self._saved_slots.save(slot)
        except Exception as error:  # a server without saved slots still answers
            self._report(error)

    def _drop_ended(self) -> None:
        """End requests that were cancelled or are too late, running and waiting."""
        now_ns = time.perf_counter_ns()
        for sequence in self._running:
            failed = self._why_ended(sequence.request, now_ns)
            if failed is not None:
                sequence.has_ended = True
                self._tell(sequence.request, failed)
        self._release_ended()
        with self._changed:
            ended = [(request, failed) for request in self._waiting if (failed := self._why_ended(request, now_ns))]
            gone = {id(request) for request, _ in ended}
            self._waiting = deque(request for request in self._waiting if id(request) not in gone)
        for request, failed in ended:
            self._tell(request, failed)

    def _why_ended(self, request: GenerationRequest, now_ns: int) -> Failed | None:
        if request.is_cancelled:
            return Failed("cancelled", "the request was cancelled")
        if request.is_late(now_ns):
            return Failed("deadline_exceeded", f"the request took more than its {request.deadline_s:g} s")
        return None

    def _admit(self) -> None:
        """Give waiting requests slots, in their order, except for those that wait for a prompt they share."""
        if self._waiting and not self._running:
            self.engine.begin_sequence(keeps_slots=True)
        with self._changed:
            waiting = list(self._waiting)
        for request in waiting:
            if not self.pool.free:
                return
            if self._shares_prompt_in_progress(request) or not self._take(request):
                continue
            self._begin(request, self.pool.place(request.tokens, reuses=not request.scores_prompt))

    def _take(self, request: GenerationRequest) -> bool:
        """Take a request out of the queue. Returns False if `drain` has ended it since the queue was read."""
        with self._changed:
            if request not in self._waiting:
                return False
            self._waiting.remove(request)
        return True

    def _shares_prompt_in_progress(self, request: GenerationRequest) -> bool:
        """Return whether a running prompt will soon hold much more of this request than any slot does now."""
        if request.scores_prompt or not self.pool.can_reuse:
            return False
        reusable, _ = self.pool.longest(request.tokens)
        for sequence in self._running:
            if not sequence.is_prefilling:
                continue
            prompt = sequence.known[: sequence.prompt_length]
            if common_length(prompt, request.tokens) > max(reusable, len(sequence.slot.tokens)) + _SHARED_TOKENS:
                return True
        return False

    def _begin(self, request: GenerationRequest, placement: Placement) -> None:
        engine, slot = self.engine, placement.slot
        try:
            placement = self._with_saved(request, placement)
            if placement.source is not None:
                engine.copy_prefix(placement.source, slot, placement.reused)
            (text,) = engine.begin_texts([slot.index], [request.tokens])
            sequence = RunningSequence(engine, request, placement, text, self.activity)
        except Exception as error:
            slot.tokens, slot.is_free = [], True
            self._tell(request, self._failure(error))
            return
        self.activity.prompt_tokens += len(request.tokens)
        self.activity.cached_tokens += placement.reused
        with self._changed:
            self._running.append(sequence)
            if self._ends_running:  # since the request was taken
                request.cancel()

    def _with_saved(self, request: GenerationRequest, placement: Placement) -> Placement:
        """Return a placement whose slot was read from disk, if that has much more of the request than the memory."""
        if self._saved_slots is None or request.scores_prompt:
            return placement
        if self._saved_slots.longest(request.tokens) < placement.reused + _SHARED_TOKENS:
            return placement
        slot = placement.slot
        self._saved_slots.load(slot, request.tokens)
        if not slot.tokens and placement.source is not None:
            return placement
        return Placement(slot, len(slot.tokens), None)

    def _release_ended(self) -> None:
        ended = [sequence for sequence in self._running if sequence.has_ended]
        if not ended:
            return
        with self._changed:
            self._running = [sequence for sequence in self._running if not sequence.has_ended]
        for sequence in ended:
            sequence.slot.is_free = True
            if self._saved_slots is not None:
                self._unsaved.add(sequence.slot.index)

    def _fail(self, sequence: RunningSequence, error: Exception) -> None:
        """End a sequence that cannot go on. Its slot keeps what was computed before."""
        if not sequence.has_ended:
            sequence.has_ended = True
            self._tell(sequence.request, self._failure(error))

    def _failure(self, error: Exception) -> Failed:
        if isinstance(error, MoecError):
            return Failed(type(error).__name__, error.message)
        self._report(error)
        return Failed("engine_failed", "a fault in the engine ended this request")

    def _tell(self, request: GenerationRequest, failed: Failed) -> None:
        self.activity.add_end(failed.code if failed.code in ("cancelled", "deadline_exceeded") else "failed")
        request.deliver(failed)
