"""A runtime engine as the engine of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

from moec.evaluation.harness.engine import AnswerRequest, ContextGroup
from moec.manifests.errors import ExecutionError
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.runtime.engine.continuations import AnswerTotal, score_continuations
from moec.runtime.engine.engine import Engine
from moec.runtime.text.sampling import SamplingOptions
from moec.runtime.text.template_process import template_files
from moec.runtime.text.tokenizer import named_texts
from moec.serving.engine.request import Ended, Event, Failed, GenerationRequest, TokenMade
from moec.serving.engine.scheduler import Scheduler, ServingOptions


class HarnessBundle:
    """See `evaluation/harness/engine.py: HarnessEngine`. Answers run in the scheduler of `moec serve`.

    hit_rates: share of experts that were in memory, by kind of request, and the requests of experts.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.hit_rates: dict[str, dict[str, float]] = {}

    @property
    def context(self) -> int:
        """Most positions of a sequence."""
        return self._engine.memory.context

    @property
    def has_encoder(self) -> bool:
        """True if an encoder reads the prompt."""
        return self._engine.model.spec.encoder is not None

    @cached_property
    def start_token(self) -> int | None:
        """The token that begins a text: the one that the tokenizer adds, or the one that its settings name."""
        added = [] if self.has_encoder else self._engine.tokenizer.encode("").ids
        if added:
            return added[0]
        config = template_files(self._engine.bundle, self._engine.options.verify).config
        named = named_texts(config, ("bos_token",)).get("bos_token")
        return None if named is None else self._engine.tokenizer.id_of(named)

    @property
    def end_token(self) -> int:
        """The first token that ends a text. Raises ExecutionError for a model that has none."""
        ends: tuple[int, ...] = tuple(self._engine.bundle.manifest.model.eos_token_ids)
        if not ends:
            raise ExecutionError("the model has neither a start token nor an end token", "give every task a context")
        return ends[0]

    def encode(self, text: str, adds_special_tokens: bool) -> list[int]:
        """Return the tokens of a text. Raises ContextOverflow."""
        return self._engine.encode(text, adds_special_tokens)

    def scores(self, groups: Iterable[ContextGroup]) -> Iterator[list[AnswerTotal]]:
        """Yield the scores of each group."""
        before = self._engine.cache.stats.copy()
        yield from score_continuations(self._engine, ((group.context, group.continuations) for group in groups))
        self._note_hits("continuations", before)

    def answers(self, requests: Iterable[AnswerRequest]) -> Iterator[tuple[int, str]]:
        """Yield index and text of each answer, as they end.

        Raises ExecutionError, and OptionError for a setting outside its range.
        """
        before, slots = self._engine.cache.stats.copy(), self._engine.options.slots
        faults: list[BaseException] = []
        most = 2 * slots  # an answer that has just ended may still count as running, so all others can be in the queue
        options = ServingOptions(queue=most, prefill_tokens=MAX_PASS_TOKENS)
        waiting, events = enumerate(requests), SimpleQueue[tuple[int, Event]]()
        texts: dict[int, list[str]] = {}

        def deliver(index: int, event: Event) -> None:
            events.put((index, event))

        with Scheduler(self._engine, options, faults.append) as scheduler:
            while True:
                # Few requests are in the scheduler, so that the others need no memory.
                while len(texts) < most and (following := next(waiting, None)) is not None:
                    index, request = following
                    texts[index], sampling = [], SamplingOptions(**dict[str, Any](request.sampling))
                    tokens, stop = list(request.tokens), tuple(request.stop)
                    scheduler.submit(
                        [GenerationRequest(tokens, request.max_new_tokens, partial(deliver, index), sampling, stop)]
                    )
                if not texts:
                    break
                index, event = events.get()
                if isinstance(event, TokenMade):
                    texts[index].append(event.text)
                elif isinstance(event, Ended):
                    yield index, "".join(texts.pop(index))
                elif isinstance(event, Failed):
                    raise faults[0] if faults else ExecutionError(event.message, "see `moec verify`")
        self._note_hits("answers", before)

    def _note_hits(self, kind: str, before: Any) -> None:
        used = self._engine.cache.stats.since(before)
        known = self.hit_rates.get(kind, {"lookups": 0, "hits": 0})
        lookups, hits = known["lookups"] + used.lookups, known["hits"] + used.hits
        self.hit_rates[kind] = {"lookups": lookups, "hits": hits, "hit_rate": hits / lookups if lookups else 1.0}
