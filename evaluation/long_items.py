"""Items whose prompt and answer exceed the context: shortened, left out, or refused.

A task with a document, such as a text to summarise, loses the end of its document. A question is never cut, so an item
of such a task is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moec.manifests.errors import ContextOverflow, DataError, OptionError

from .tasks import Item, Task
from .text_pairs import TokenPair

TRUNCATE, SKIP, REFUSE = "truncate", "skip", "refuse"
POLICIES = (TRUNCATE, SKIP, REFUSE)
Encode = Callable[[Sequence[tuple[str, str]]], list[TokenPair]]
"""Returns the tokens of (prompt, answer) pairs."""
_CHARACTERS_PER_TOKEN = 32  # a longer document is first cut to so many characters for each token of the context
_NAMED = 5


@dataclass(frozen=True, slots=True)
class LongItem:
    """An item that exceeds the context. index: its place among the items. tokens: its length with answer and end."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FittedItems:
    """Items that fit the context.

    items: in their order.
    shortened, left_out: the items that did not fit.
    """

    items: tuple[Item, ...]
    shortened: tuple[LongItem, ...] = ()
    left_out: tuple[LongItem, ...] = ()

    def told(self, context: int) -> list[str]:
        """Return a sentence for each kind of change, with the lengths of the longest items."""
        kinds = ((self.shortened, "items lose the end of their text"), (self.left_out, "items are left out"))
        return [f"{len(found)} {what}: {_lengths(found, context)}" for found, what in kinds if found]


@dataclass(frozen=True, slots=True)
class Context:
    """The context that prompts, answers and the end token have to fit.

    tokens: its length.
    encode: tokens as the engine makes them.
    has_encoder: prompts are for an encoder, which has a context of its own.
    is_encodable: whether there is memory to encode a text. A text without counts as too long.
    """

    tokens: int
    encode: Encode
    has_encoder: bool = False
    is_encodable: Callable[[str], bool] = lambda text: True


def fit_items(
    task: Task, items: Sequence[Item], shots: Sequence[Item], context: Context, policy: str = TRUNCATE
) -> FittedItems:
    """Return the items that fit a context with their reference answer.

    policy: `truncate` cuts documents and leaves other long items out, `skip` leaves all out, `refuse` raises.
    Raises OptionError for another policy, ContextOverflow if a long item is refused, DataError if no item is left.
    """
    if policy not in POLICIES:
        raise OptionError(f"`--long-items {policy}` is not known", f"choose one of {', '.join(POLICIES)}")
    room = _Room(task, shots, context)
    kept, shortened, left_out = list[Item](), list[LongItem](), list[LongItem]()
    for at, (item, tokens) in enumerate(zip(items, room.lengths(items), strict=True)):
        if tokens <= context.tokens:
            kept.append(item)
            continue
        if policy == REFUSE:
            raise ContextOverflow(
                f"item {at} has {tokens} tokens with its answer, the context has {context.tokens}",
                "raise `--context`, or take `--long-items truncate` or `--long-items skip`",
            )
        shorter = room.shortened(item) if policy == TRUNCATE else None
        if shorter is None:
            left_out.append(LongItem(at, tokens))
        else:
            kept.append(shorter)
            shortened.append(LongItem(at, tokens))
    if not kept:
        raise DataError(
            f"none of {len(items)} items fits a context of {context.tokens} tokens",
            "raise `--context` or give shorter items",
        )
    return FittedItems(tuple(kept), tuple(shortened), tuple(left_out))


@dataclass(frozen=True, slots=True)
class _Room:
    """The lengths of the items of a task in a context."""

    task: Task
    shots: Sequence[Item]
    context: Context

    def lengths(self, items: Sequence[Item]) -> list[int]:
        """Return the tokens of each item with its longest answer and the end token.

        A text of too many characters is not encoded. Its length is an estimate above the context.
        """
        pairs = [self._pairs(item) for item in items]
        is_short = [self._is_short(own) for own in pairs]
        encoded = iter(
            self.context.encode([pair for own, short in zip(pairs, is_short, strict=True) if short for pair in own])
        )
        found = []
        for own, short in zip(pairs, is_short, strict=True):
            if not short:
                characters = max(len(prompt) + len(answer) for prompt, answer in own)
                found.append(self.context.tokens + 1 + characters // _CHARACTERS_PER_TOKEN)
            else:
                found.append(max(self._length(*next(encoded)) for _ in own))
        return found

    def shortened(self, item: Item) -> Item | None:
        """Return the item with so much of its document that it fits, cut after a word. None without a document."""
        name = self.task.document_field
        if name is None:
            return None
        text = item[name]
        while text.strip():
            tried = {**item, name: text}
            tokens = self.lengths([tried])[0]
            if tokens <= self.context.tokens:
                return tried
            # The excess as a share of the text: two or three turns.
            text = _cut(text, min(len(text) - 1, len(text) * self.context.tokens // tokens))
        return None

    def _is_short(self, pairs: Sequence[tuple[str, str]]) -> bool:
        """Return whether the texts can be encoded."""
        most = self.context.tokens * _CHARACTERS_PER_TOKEN
        sizes_fit = all(len(prompt) + len(answer) <= most for prompt, answer in pairs)
        return sizes_fit and all(self.context.is_encodable(text) for pair in pairs for text in pair)

    def _length(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Return the tokens of a row. An encoder and a decoder have a context each."""
        return max(len(prompt), len(answer) + 1) if self.context.has_encoder else len(prompt) + len(answer) + 1

    def _pairs(self, item: Item) -> list[tuple[str, str]]:
        """Return the prompt with the reference answer, or with each of the given answers."""
        if self.task.choices is not None:
            return self.task.given_answers(item, self.shots)[0]
        return [(self.task.prompt(item, self.shots), self.task.answer(item))]


def _cut(text: str, size: int) -> str:
    """Return the first `size` characters, without the word that is cut, if a word is left."""
    words = text[:size].rsplit(None, 1)
    return words[0] if len(words) == 2 and words[0].strip() else text[:size]


def _lengths(found: Sequence[LongItem], context: int) -> str:
    longest = sorted(found, key=lambda item: -item.tokens)[:_NAMED]
    named = ", ".join(f"item {item.index} has {item.tokens:,} tokens" for item in longest)
    rest = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{named}{rest}; the context has {context:,}"
