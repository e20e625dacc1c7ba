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

    def changes(self, context: int) -> list[str]:
        """Return a sentence for each kind of change, with the lengths of the longest items."""
        sentences = []
        for changed, what in (
            (self.shortened, "items lose the end of their text"),
            (self.left_out, "items are left out"),
        ):
            longest = sorted(changed, key=lambda item: -item.tokens)[:_NAMED]
            named = ", ".join(f"item {item.index} has {item.tokens:,} tokens" for item in longest)
            rest = f", and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
            if changed:
                sentences.append(f"{len(changed)} {what}: {named}{rest}; the context has {context:,}")
        return sentences


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
    fitted, shortened, left_out = list[Item](), list[LongItem](), list[LongItem]()
    for at, (item, tokens) in enumerate(zip(items, _lengths(task, items, shots, context), strict=True)):
        if tokens <= context.tokens:
            fitted.append(item)
            continue
        if policy == REFUSE:
            raise ContextOverflow(
                f"item {at} has {tokens} tokens with its answer, the context has {context.tokens}",
                "raise `--context`, or take `--long-items truncate` or `--long-items skip`",
            )
        shorter = _shortened(task, item, shots, context) if policy == TRUNCATE else None
        if shorter is None:
            left_out.append(LongItem(at, tokens))
        else:
            fitted.append(shorter)
            shortened.append(LongItem(at, tokens))
    if not fitted:
        raise DataError(
            f"none of {len(items)} items fits a context of {context.tokens} tokens",
            "raise `--context` or give shorter items",
        )
    return FittedItems(tuple(fitted), tuple(shortened), tuple(left_out))


def _lengths(task: Task, items: Sequence[Item], shots: Sequence[Item], context: Context) -> list[int]:
    """Return the tokens of each item with its longest answer and the end token.

    A text of too many characters is not encoded. Its length is an estimate above the context.
    """
    most = context.tokens * _CHARACTERS_PER_TOKEN
    answers_of_items = [
        [(task.prompt(item, shots), task.answer(item))] if task.choices is None else task.given_answers(item, shots)[0]
        for item in items
    ]
    longest = [max(len(prompt) + len(answer) for prompt, answer in pairs) for pairs in answers_of_items]
    are_short = [
        characters <= most and all(context.is_encodable(text) for pair in pairs for text in pair)
        for pairs, characters in zip(answers_of_items, longest, strict=True)
    ]
    short = [pair for pairs, is_short in zip(answers_of_items, are_short, strict=True) if is_short for pair in pairs]
    encoded = iter(context.encode(short))
    lengths = list[int]()
    for pairs, characters, is_short in zip(answers_of_items, longest, are_short, strict=True):
        if not is_short:
            lengths.append(context.tokens + 1 + characters // _CHARACTERS_PER_TOKEN)
            continue
        rows = [next(encoded) for _ in pairs]
        if context.has_encoder:  # an encoder and a decoder have a context each
            lengths.append(max(max(len(prompt), len(answer) + 1) for prompt, answer in rows))
        else:
            lengths.append(max(len(prompt) + len(answer) + 1 for prompt, answer in rows))
    return lengths


def _shortened(task: Task, item: Item, shots: Sequence[Item], context: Context) -> Item | None:
    """Return the item with so much of its document that it fits, cut after a word. None without a document."""
    name = task.document_field
    if name is None:
        return None
    text = item[name]
    while text.strip():
        shorter = {**item, name: text}
        tokens = _lengths(task, [shorter], shots, context)[0]
        if tokens <= context.tokens:
            return shorter
        # The excess as a share of the text: two or three turns.
        text = text[: min(len(text) - 1, len(text) * context.tokens // tokens)]
        words = text.rsplit(None, 1)
        if len(words) == 2 and words[0].strip():
            text = words[0]
    return None
