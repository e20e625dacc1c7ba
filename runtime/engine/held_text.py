"""The text whose keys and values stay in the first slot from one answer to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moec.manifests.runtime_limits import MAX_PASS_TOKENS

Prefill = Callable[[Sequence[int], int], np.ndarray]
"""Maps tokens and the position of the first one to the residual stream [T, D] of their last pass."""


class HeldText:
    """Tokens that the first slot of an engine holds. Pass one object to every `Engine.generate` of a conversation.

    Then each answer prefills only what follows the common beginning with the text before. The logits are those of a
    run that prefills everything, because a row of a pass depends only on its own sequence.
    Any other use of the engine takes over the slot. The next prompt is then computed from its start.

    tokens: tokens whose keys and values the slot holds.
    sequence: number of the sequence that wrote them, as `Engine.begin_sequence` counts.
    reused: number of tokens of the last prompt that were not computed again.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.sequence, self.reused, self._is_stopped = 0, 0, False

    def stop(self) -> None:
        """End the running answer before its next pass. A signal handler may call this."""
        self._is_stopped = True

    @property
    def is_stopped(self) -> bool:
        """True if the running answer gets no more passes."""
        return self._is_stopped

    def begin(self, tokens: Sequence[int], sequence: int, is_kept: bool) -> None:
        """Begin an answer.

        tokens: the whole prompt. At least its last token is computed again, because its logits are needed.
        sequence: number of the new sequence.
        is_kept: whether the slot still holds `self.tokens`.
        """
        most = min(len(self.tokens), len(tokens) - 1) if is_kept else 0
        self.reused = next((at for at in range(most) if self.tokens[at] != tokens[at]), most)
        self.tokens = list(tokens[: self.reused])
        self.sequence, self._is_stopped = sequence, False

    def read(self, tokens: Sequence[int], prefill: Prefill) -> np.ndarray | None:
        """Run the tokens of a prompt that the slot lacks. Returns the residual stream of the last pass.

        It is None if the answer was stopped before the end of the prompt.
        After an error, the tokens of the finished passes are held.
        """
        hidden = None
        while len(self.tokens) < len(tokens):
            if self._is_stopped:
                return None
            start = len(self.tokens)
            part = tokens[start : start + MAX_PASS_TOKENS]
            hidden = prefill(part, start)
            self.tokens += part
        return hidden
