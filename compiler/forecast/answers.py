"""Number of tokens that the tasks need, if answers are as long as the data's. The real length is unknown beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moec.evaluation.data import SplitData
from moec.evaluation.tasks import Item
from moec.evaluation.text_pairs import TokenPair, encode_pairs
from moec.manifests.runtime_limits import MOST_ANSWER_SLOTS
from moec.profiles.memory_floor import answers_kv_bytes, kv_bytes
from moec.profiles.weight_counts import all_weights

from ..bundle.certify import MODES_ITEMS
from ..checkpoint.tokenizer import load_tokenizer
from ..preflight.prepared import Prepared
from ..request.ports import ModesWork
from ..walker.memory import COMPILE_PROCESS_BYTES, certificate_bytes, resident_bytes

SAMPLE_ITEMS = 256
"""Items of each task that are counted. The other items are assumed to have the same length."""


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Tokens of one part of all tasks.

    read: tokens of prompts with their answers, or with each choice, which pass through the model together.
    answered: tokens of prompts with the right answer alone.
    decoded: tokens of generated answers.
    """

    read: float = 0.0
    answered: float = 0.0
    decoded: float = 0.0

    def __add__(self, other: AnswerTokens) -> AnswerTokens:
        parts = ("read", "answered", "decoded")
        return AnswerTokens(*(getattr(self, name) + getattr(other, name) for name in parts))

    def scaled(self, share: float) -> AnswerTokens:
        """Return the tokens of a share of the items."""
        return AnswerTokens(share * self.read, share * self.answered, share * self.decoded)


def count_answers(prepared: Prepared) -> tuple[AnswerTokens, AnswerTokens]:
    """Return the tokens of the validation items and of the test items of all tasks."""
    validation = test = AnswerTokens()
    for split in prepared.splits:
        shots = prepared.shots[split.task.name]
        validation += _count(prepared, split, split.validation.items, shots)
        test += _count(prepared, split, split.test.items, shots)
    return validation, test


def answer_slots(prepared: Prepared) -> int:
    """Return the sequences that the checkpoint decodes at once."""
    one = _slot_bytes(prepared)
    room = answers_kv_bytes(prepared.runtime_bytes, 2 * all_weights(prepared.lowering.model), one)
    return max(1, min(MOST_ANSWER_SLOTS, room // one))


def answering_bytes(prepared: Prepared) -> int:
    """Return the memory while the checkpoint answers: its 16-bit weights, slots, and the layers that stay."""
    model = prepared.lowering.model
    resident = resident_bytes(model, prepared.kept_layers.count)
    slots = answer_slots(prepared) * _slot_bytes(prepared)
    whole = COMPILE_PROCESS_BYTES + certificate_bytes(model) + resident + 2 * all_weights(model) + slots
    return min(whole, prepared.request.memory_limit_bytes)


def _slot_bytes(prepared: Prepared) -> int:
    """Return the bytes of the keys and values of the longest sequence."""
    longest, model = 1, prepared.lowering.model
    for split in prepared.splits:
        right, _ = _encoded(prepared, split, split.test.items[:SAMPLE_ITEMS], prepared.shots[split.task.name])
        longest = max([longest, *(len(prompt) + split.task.max_new_tokens for prompt, _ in right)])
    return kv_bytes(model, min(longest, model.default_context))


def count_mode_answers(prepared: Prepared, work: ModesWork) -> tuple[int, float, float, float]:
    """Return the items, prompts, prompt tokens and answer tokens of one setting of lossy modes.

    Items are those of the first task, those with a KL, and the timed prompts. Answers are as long as the data's.
    """
    split = prepared.splits[0]
    items = split.test.sample(MODES_ITEMS, prepared.options.seed)
    sample = items[:SAMPLE_ITEMS]
    right, given = _encoded(prepared, split, sample, prepared.shots[split.task.name])
    scale = len(items) / max(len(sample), 1)
    with_divergence, timed = right[: work.divergence_items], right[: work.timed_prompts]
    read = scale * sum(len(prompt) for prompt, _ in given) + sum(
        len(prompt) for prompt, _ in (*with_divergence, *timed)
    )
    decoded = scale * sum(len(answer) for _, answer in given)
    decoded += sum(min(len(answer), work.divergence_tokens) + 1 for _, answer in with_divergence)
    return len(items), scale * len(given) + len(with_divergence) + len(timed), read, decoded


def _encoded(
    prepared: Prepared, split: SplitData, items: Sequence[Item], shots: Sequence[Item]
) -> tuple[list[TokenPair], list[TokenPair]]:
    """Return the tokens of prompts with right answers, and with each given answer. Without choices both are equal."""
    task, tokenizer = split.task, load_tokenizer(prepared.checkpoint.root)
    right = encode_pairs(tokenizer, [(task.prompt(item, shots), task.answer(item)) for item in items])
    if task.choices is None:
        return right, right
    return right, encode_pairs(tokenizer, [pair for item in items for pair in task.given_answers(item, shots)[0]])


def _count(prepared: Prepared, split: SplitData, items: Sequence[Item], shots: Sequence[Item]) -> AnswerTokens:
    task, sample = split.task, items[:SAMPLE_ITEMS]
    context = prepared.lowering.model.original_positions
    right, given = _encoded(prepared, split, sample, shots)
    read, answered = (sum(min(len(p) + len(a), context) for p, a in pairs) for pairs in (given, right))
    is_generated = task.score is not None
    lengths = [task.max_new_tokens if task.thinking else len(answer) for _, answer in right]
    decoded = sum(lengths) if is_generated else 0
    scale = len(items) / max(len(sample), 1)
    return AnswerTokens(scale * read, scale * answered, scale * decoded)
