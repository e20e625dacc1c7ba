"""The texts that pass through the layers of a compile, as tokens, within the limits of its memory."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moec.evaluation.data import SplitData
from moec.evaluation.tasks import Item
from moec.evaluation.text_pairs import TokenPair, encode_pairs, forced_rows
from moec.manifests.errors import ContextOverflow, DataError
from moec.manifests.model import ModelSpec

from ..calibration.collect import choose_texts
from ..checkpoint.tokenizer import load_tokenizer
from ..preflight.prepared import KL_ITEMS, Prepared
from ..request.task_data import texts_of, train_texts
from ..sensitivity.fisher import TEXTS
from ..sensitivity.gradients import TOKENS_PER_TEXT
from ..walker.texts import SCORED_TOKENS, AnswerTexts, TokenTexts, divided_pairs

HELD_OUT_ITEMS = 500
"""Maximum number of held-out answers for the KL of the certificate. Means over tokens need fewer items than a task."""


@dataclass(frozen=True, slots=True)
class CompileTexts:
    """All texts of a search.

    calibration: train texts that are counted, and whose inputs weigh the errors of units.
    probe: the first of them, on which the errors of layers are measured.
    gradients: train texts of the gradients.
    validation: texts on which plans are measured.
    held_out: texts of the certificate's KL, by task.
    spare: train items of each perplexity task that neither calibration nor gradients use, in their order.
    """

    calibration: TokenTexts
    probe: TokenTexts
    gradients: AnswerTexts
    validation: AnswerTexts
    held_out: Mapping[str, AnswerTexts]
    spare: Mapping[str, tuple[Item, ...]] = field(default_factory=dict)

    @property
    def scored_tokens(self) -> int:
        """Tokens of the texts whose answers are scored."""
        return self.validation.texts.num_tokens + sum(answers.texts.num_tokens for answers in self.held_out.values())


def encode_all_texts(prepared: Prepared) -> CompileTexts:
    """Encode the texts of all tasks. Raises ContextOverflow, and DataError where no text is left."""
    model, limits = prepared.lowering.model, prepared.kept_layers.texts
    tokenizer = load_tokenizer(prepared.checkpoint.root)

    def encoded(texts: Sequence[tuple[str, str]]) -> list[TokenPair]:
        pairs = encode_pairs(tokenizer, texts, is_joint=model.encoder is None)
        for number in (number for pair in pairs for tokens in pair for number in tokens):
            if number >= model.vocab_size:
                raise DataError(
                    f"a text has the token `{tokenizer.id_to_token(number)}` (id {number}), and the embedding has "
                    f"{model.vocab_size} rows",
                    "leave such texts out, or compile a checkpoint whose embedding has the token",
                )
        return pairs

    train = [encoded(train_texts(split, prepared.shots)) for split in prepared.splits]
    prompts, pairs = divided_pairs(model, [pair for task in train for pair in task])
    calibration, calibrated = choose_texts(
        TokenTexts([before + answer for before, answer in pairs], prompts),
        model.original_positions,
        prepared.options.seed,
        limits.calibration,
    )
    held_out, validation = dict[str, AnswerTexts](), list[AnswerTexts]()
    count, room = max(1, KL_ITEMS // len(prepared.splits)), limits.answers // len(prepared.splits)
    for split in prepared.splits:
        name = split.task.name
        texts = encoded(texts_of(split, split.validation.items[:count], prepared.shots))
        validation.append(_scored_answers(model, name, texts, room))
        test = encoded(texts_of(split, split.test.items[:HELD_OUT_ITEMS], prepared.shots))
        held_out[name] = _scored_answers(model, name, test, limits.held_out)
    gradients = _gradient_texts(model, train, limits.gradients)
    spare = dict[str, tuple[Item, ...]]()
    for number, split in enumerate(prepared.splits):
        before = sum(map(len, train[:number]))
        of_task = {at - before for at in calibrated}
        spare[split.task.name] = _spare_items(split, train[number], of_task, _gradient_count(train), prepared)
    probe = calibration.first(limits.probe)
    return CompileTexts(calibration, probe, gradients, _joined(validation), held_out, spare)


def _spare_items(
    split: SplitData, pairs: Sequence[TokenPair], calibrated: Collection[int], gradients: int, prepared: Prepared
) -> tuple[Item, ...]:
    """Return the train items of a perplexity task that neither calibration nor gradients use, and that fit the context.

    A perplexity needs no answer of the model. So it can take any text.
    pairs: the items as tokens.
    calibrated: indices of the items of calibration.
    gradients: number of items, from the first, that may be among the texts of the gradients.
    """
    if not split.task.is_perplexity:
        return ()
    context, shots = prepared.lowering.model.default_context, prepared.shots[split.task.name]
    return tuple(
        item
        for at, (item, (prompt, answer)) in enumerate(zip(split.train.items, pairs, strict=True))
        if at >= gradients and at not in calibrated and item not in shots and len(prompt) + len(answer) < context
    )


def _gradient_count(train: Sequence[Sequence[TokenPair]]) -> int:
    """Return the number of train items of each task, from the first, that gradients may use."""
    return -(-TEXTS // len(train))


def _gradient_texts(model: ModelSpec, train: Sequence[Sequence[TokenPair]], room: int) -> AnswerTexts:
    """Return train texts, alternating between tasks, so that any number of them covers all tasks."""
    every = itertools.zip_longest(*(task[: _gradient_count(train)] for task in train))
    longest = min(TOKENS_PER_TEXT, model.original_positions)
    return _answers_within(model, [shortened(pair, longest) for row in every for pair in row if pair is not None], room)


def shortened(pair: TokenPair, tokens: int) -> TokenPair:
    """Shorten a pair to `tokens` tokens: the start of the answer, and as much of the prompt's end as fits before it."""
    prompt, answer = pair[0], pair[1][:tokens]
    return prompt[max(0, len(prompt) + len(answer) - tokens) :] or prompt[:1], answer


def _scored_answers(model: ModelSpec, task: str, pairs: Sequence[TokenPair], room: int) -> AnswerTexts:
    """Return as many texts, in order, as `room` tokens hold. The last SCORED_TOKENS of an answer are scored.

    Raises ContextOverflow for a text that exceeds the context, DataError if no text is left.
    """
    if model.encoder is None:
        # What is not scored of an answer counts as prompt. The end token is scored as well.
        ends = [max(len(answer) - SCORED_TOKENS + 1, 0) for _, answer in pairs]
        pairs = [(prompt + answer[:end], answer[end:]) for (prompt, answer), end in zip(pairs, ends, strict=True)]
    answers = _answers_within(model, pairs, room, task)
    if not answers.counts:
        raise DataError(f"no text of {task} has an answer within {room} tokens", "hand in shorter texts")
    return answers


def _answers_within(model: ModelSpec, pairs: Sequence[TokenPair], room: int, task: str = "") -> AnswerTexts:
    """Return the texts that have an answer and fit into `room` tokens, in order.

    task: name of their task, if each must fit the context. Raises ContextOverflow.
    """
    prompts, decoded = divided_pairs(model, pairs)
    rows, answers, counts = forced_rows(decoded, model.eos_token_ids[:1])
    every = TokenTexts(rows, prompts)
    fitting = []
    for at, count in enumerate(counts):
        longest = max(len(rows[at]), len(prompts[at]) if prompts else 0)
        if task and longest > model.default_context:
            raise ContextOverflow(
                f"a text of {task} has {longest} tokens, the context of a certificate has {model.default_context}",
                "shorten the text",
            )
        if count and every.size(at) <= room:
            room -= every.size(at)
            fitting.append(at)
    targets = [answer[len(answer) - count :] for answer, count in zip(answers, counts, strict=True)]
    return AnswerTexts(every, counts, targets, list(pairs), []).select(fitting)


def _joined(parts: Sequence[AnswerTexts]) -> AnswerTexts:
    """Return the texts of several tasks, task after task."""

    def every(name: str) -> list[Any]:
        return [value for answers in parts for value in getattr(answers, name)]

    rows = [row for answers in parts for row in answers.texts.rows]
    prompts = [prompt for answers in parts for prompt in answers.texts.prompts]
    sizes = [len(answers.counts) for answers in parts]
    return AnswerTexts(TokenTexts(rows, prompts), every("counts"), every("targets"), every("pairs"), sizes)
