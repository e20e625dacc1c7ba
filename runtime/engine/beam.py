"""Beam search: the most likely answers that a few beams reach, equal to those of transformers' `generate`.

Shapes: B beams, V vocabulary.
Source: transformers, generation/utils.py (`_beam_search`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.errors import ExecutionError, OptionError

from ..kernels.elementary import exp, natural_log, power
from ..text.tokenizer import checked_ids
from .engine import Engine

MAX_BEAMS = 64
_NEVER = np.float32(-1e9)


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Options of a beam search.

    beams: number of beams, B.
    length_penalty: the score of a finished answer is log-probability / length ** length_penalty.
    early_stopping: end with the first B finished answers. Otherwise end when no running beam can get a better score.
    Raises OptionError outside the ranges.
    """

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.beams <= MAX_BEAMS:
            raise OptionError(f"beams must be 1 to {MAX_BEAMS}, found {self.beams}")
        if not -10 <= self.length_penalty <= 10:
            raise OptionError(f"the length penalty must be -10 to 10, found {self.length_penalty}")


@dataclass(frozen=True, slots=True)
class Beam:
    """One answer.

    tokens: ids, including the end token.
    score: log-probability / length ** length_penalty, nats.
    """

    tokens: tuple[int, ...]
    score: float


def beam_search(engine: Engine, prompt: Sequence[int], max_new_tokens: int, options: BeamOptions) -> list[Beam]:
    """Return at most B answers, best first. The engine must have a slot for each beam.

    Raises ContextOverflow if the prompt leaves no room, InputError for ids outside the vocabulary, OptionError.
    """
    tokens = checked_ids(prompt)
    engine.check_tokens(tokens)
    if max_new_tokens < 1:
        raise OptionError(f"max_new_tokens must be a whole number of 1 or more, found {max_new_tokens}")
    if engine.options.slots < options.beams:
        raise OptionError(
            f"{options.beams} beams need as many slots, the engine has {engine.options.slots}",
            f"load the bundle with slots={options.beams}",
        )
    limit = engine.new_tokens_limit(tokens, max_new_tokens)
    with engine.exclusive:
        return _Search(engine, tokens, limit, options).run()


class _Search:
    def __init__(self, engine: Engine, prompt: list[int], limit: int, options: BeamOptions) -> None:
        self._engine, self._prompt, self._limit, self._options = engine, prompt, limit, options
        self._ends = engine.bundle.manifest.model.eos_token_ids
        # All beams are the same at the start, so only the first one counts.
        self._running: list[tuple[int, ...]] = [()] * options.beams
        self._scores = np.full(options.beams, _NEVER, np.float32)
        self._scores[0] = 0
        self._finished: list[Beam] = []

    def run(self) -> list[Beam]:
        engine, beams = self._engine, self._options.beams
        engine.begin_sequence()
        (prompt,) = engine.begin_texts([0], [self._prompt])
        hidden = engine.prefill(prompt)[-1:]
        engine.copy_slots([0] * beams, len(prompt))
        log_probs = np.repeat(self._log_probs(engine.model.logits(hidden)), beams, axis=0)
        while True:
            parents = self._advance(log_probs)
            length = len(self._running[0])
            if self._is_over(length):
                return sorted(self._finished, key=lambda beam: -beam.score)[:beams]
            positions = len(prompt) + length - 1
            engine.copy_slots(parents, positions)
            last = [tokens[-1] for tokens in self._running]
            log_probs = self._log_probs(engine.decode(last, range(beams), [positions] * beams))

    def _log_probs(self, logits: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of logits: [B, V] -> float32 [B, V]. Raises ExecutionError for NaN."""
        if not np.isfinite(logits.max()):
            raise ExecutionError("the logits hold NaN or infinity", "check the bundle with `moec verify`")
        shifted = logits - logits.max(axis=1, keepdims=True)
        total = natural_log(exp(shifted).sum(axis=1, keepdims=True)).astype(np.float32)
        return np.asarray(shifted - total, np.float32)

    def _advance(self, log_probs: np.ndarray) -> list[int]:
        """Add one token to each beam. Returns for each new beam the old one that it continues."""
        beams, vocabulary = self._options.beams, log_probs.shape[1]
        total = (log_probs + self._scores[:, None]).reshape(-1)
        # So many that B remain, even if each of the best B ends.
        count = min(max(2, 1 + len(self._ends)) * beams, len(total))
        # Of equal candidates the first ones. Those that `argpartition` takes depend on the processor.
        possible = np.flatnonzero(total >= np.partition(total, -count)[-count])
        best = possible[np.lexsort((possible, -total[possible]))][:count]
        candidates = [(int(at) // vocabulary, int(at) % vocabulary, total[at]) for at in best]
        length = len(self._running[0]) + 1
        ends = [token in self._ends or length >= self._limit for _, token, _ in candidates]
        is_full = len(self._finished) >= beams and self._options.early_stopping
        for (parent, token, score), is_end in list(zip(candidates, ends, strict=True))[:beams]:
            if is_end and not is_full:
                value = score / self._divisor(length)
                self._finished.append(Beam((*self._running[parent], token), float(value)))
        self._finished = sorted(self._finished, key=lambda beam: -beam.score)[:beams]
        going = [entry for entry, is_end in zip(candidates, ends, strict=True) if not is_end][:beams]
        if len(going) < beams:  # the limit ends all of them
            self._running = [(*self._running[parent], token) for parent, token, _ in candidates[:beams]]
            return [parent for parent, _, _ in candidates[:beams]]
        self._running = [(*self._running[parent], token) for parent, token, _ in going]
        self._scores = np.array([score for _, _, score in going], np.float32)
        return [parent for parent, _, _ in going]

    def _divisor(self, length: int) -> np.float32:
        """Return length ** length_penalty."""
        return np.float32(power(length, np.array(self._options.length_penalty)))

    def _is_over(self, length: int) -> bool:
        if length >= self._limit:
            return True
        if len(self._finished) < self._options.beams:
            return False
        if self._options.early_stopping:
            return True
        possible = self._scores[0] / self._divisor(length)
        return bool(possible <= self._finished[-1].score)
