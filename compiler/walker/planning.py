"""When a compile goes layer by layer, and what it then runs: texts, limits, and the errors that say what would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moec.evaluation.data import SplitData
from moec.evaluation.tasks import Item
from moec.evaluation.text_pairs import TokenPair, encode_pairs, forced_rows
from moec.manifests.errors import ContextOverflow, DataError, OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec

from ..bundle.certify import LOGITS_AT_ONCE
from ..calibration.collect import chosen_texts
from ..checkpoint.tokenizer import load_tokenizer
from ..families import Lowering
from ..request.options import CompileOptions
from ..sensitivity.fisher import asks_gradients
from .memory import certifying_bytes, gradients_bytes, streamed_bytes, whole_bytes
from .sweep import AnswerTexts, SweepInputs

CALIBRATION_TOKENS = 65_536
"""Tokens that calibration runs at most: their residual streams are what a sweep holds beside one layer."""
SCORED_TOKENS = 512
"""Tokens of one text that are scored at most, its last: what bounds the logits of a certificate."""
ANSWER_TOKENS = 16_384
"""Tokens of texts whose answers are scored, prompts included: of validation, and of held-out ones for each task."""


def goes_layer_by_layer(model: ModelSpec, specs: Sequence[QuantSpec], threads: int, limit_bytes: int) -> bool:
    """Whether a compile that holds the whole model would exceed the limit."""
    return whole_bytes(model, specs, threads) > limit_bytes


def need_bytes(
    model: ModelSpec, options: CompileOptions, specs: Sequence[QuantSpec], threads: int, tasks: int = 1
) -> int:
    """Peak memory of a compile layer by layer, for texts of any length: of its passes, or of the certificate.

    The certificate of a loss runs two bundles, the checkpoint's own weights in one of them.
    """
    passes = streamed_bytes(model, CALIBRATION_TOKENS + (1 + tasks) * ANSWER_TOKENS, specs, threads)
    if asks_gradients(options.sensitivity, model):
        passes = max(passes, gradients_bytes(model, (1 + tasks) * ANSWER_TOKENS, specs, threads))
    runtimes = 1 + (options.target.kind == "loss")
    certified = runtimes * certifying_bytes(model, (1 + tasks) * ANSWER_TOKENS)
    return max(passes, _certificate_bytes(model) + certified)


def check_layerwise(
    model: ModelSpec, options: CompileOptions, specs: Sequence[QuantSpec], threads: int, limit_bytes: int, tasks: int
) -> None:
    """Refuse what cannot be compiled layer by layer. Raises OptionError with the memory that would do."""
    whole, need = whole_bytes(model, specs, threads), need_bytes(model, options, specs, threads, tasks)
    if model.encoder is not None:
        raise OptionError(
            f"a model with an encoder is searched in memory as a whole, {whole} bytes, found {limit_bytes}",
            "take `--uniform`, or raise `--memory`",
        )
    if options.search == "edgemoe":
        raise OptionError(
            f"EdgeMoE's search holds the whole model, {whole} bytes of memory, found {limit_bytes}",
            "leave out `--search edgemoe`, or raise `--memory`",
        )
    if options.sensitivity == "exact":
        raise OptionError(
            f"`--sensitivity exact` measures every expert alone in the whole model, {whole} bytes, found {limit_bytes}",
            "leave it out, or raise `--memory`",
        )
    if not tasks:
        raise OptionError(
            f"a search without data holds the whole model, {whole} bytes of memory, found {limit_bytes}",
            "add `--data`, or take `--uniform`",
        )
    if options.low_spec is not None and options.low_spec not in specs:
        raise OptionError(
            f"layer by layer, low versions are among the formats that are searched, and {options.low_spec} is not",
            f"add {options.low_spec.bitwidth} to `--bits`",
        )
    if need > limit_bytes:
        raise OptionError(
            f"one layer at a time takes {need} bytes of memory, found {limit_bytes}",
            f"give `--memory {-(-need // 2**20)}MiB` if the machine has them, or offer fewer `--bits`",
        )


def sweep_inputs(
    lowering: Lowering,
    splits: Sequence[SplitData],
    shots: Mapping[str, tuple[Item, ...]],
    specs: Sequence[QuantSpec],
    dense_probe: Mapping[str, QuantSpec],
    quantizer: str,
    seed: int,
    answer_items: int,
) -> SweepInputs:
    """Train texts for calibration, and the first validation and test items of every task for KL.

    Raises ContextOverflow.
    """
    tokenizer = load_tokenizer(lowering.checkpoint.root)
    train: list[tuple[str, str]] = []
    validation, room = AnswerTexts([], [], []), ANSWER_TOKENS // max(len(splits), 1)
    held_out: dict[str, AnswerTexts] = {}
    for split in splits:
        task, examples = split.task, shots[split.task.name]
        train += [(task.prompt(item, examples), task.answer(item)) for item in split.train.items]
        chosen = split.validation.items[: max(1, answer_items // len(splits))]
        own = [(task.prompt(item, examples), task.answer(item)) for item in chosen]
        validation.add(_answers(encode_pairs(tokenizer, own), lowering, task.name, room))
        test = [(task.prompt(item, examples), task.answer(item)) for item in split.test.items]
        held_out[task.name] = _answers(encode_pairs(tokenizer, test), lowering, task.name, ANSWER_TOKENS)
    context = lowering.model.original_positions
    rows = [row for row, _ in chosen_texts(encode_pairs(tokenizer, train), context, seed, CALIBRATION_TOKENS)]
    formats = tuple(spec for spec in specs if spec.bitwidth < 16)
    return SweepInputs(rows, validation, held_out, formats, dense_probe, quantizer, seed)


def _answers(pairs: Sequence[TokenPair], lowering: Lowering, task: str, room: int) -> AnswerTexts:
    """As many texts, in order, as `room` tokens hold; what comes before the last SCORED_TOKENS counts as prompt.

    Raises ContextOverflow for a text that no context holds, DataError where none is left.
    """
    context = lowering.model.default_context
    pairs = [_shortened(pair) for pair in pairs]
    rows, _, counts = forced_rows(pairs, lowering.model.eos_token_ids[:1])
    kept, tokens = AnswerTexts([], [], []), 0
    for row, count, pair in zip(rows, counts, pairs, strict=True):
        if len(row) > context:
            raise ContextOverflow(
                f"a text of {task} has {len(row)} tokens, a certificate layer by layer holds {context}",
                "shorten the text",
            )
        if count and tokens + len(row) <= room:
            tokens += len(row)
            kept.rows.append(row)
            kept.counts.append(count)
            kept.pairs.append(pair)
    if not kept.rows:
        raise DataError(f"no text of {task} has an answer within {room} tokens", "hand in shorter texts")
    return kept


def _shortened(pair: TokenPair) -> TokenPair:
    prompt, answer = pair
    kept = max(len(answer) - SCORED_TOKENS + 1, 0)  # the end token is scored as well
    return prompt + answer[:kept], answer[kept:]


def runtime_bytes(model: ModelSpec, limit_bytes: int) -> int:
    """The budget of the runtime while it certifies; left to itself it would take most of the machine."""
    return limit_bytes - _certificate_bytes(model)


def _certificate_bytes(model: ModelSpec) -> int:
    """What a certificate holds beside the runtime: the output matrix, logits of both sides and the making of them."""
    held = max(LOGITS_AT_ONCE, SCORED_TOKENS * model.vocab_size)
    return 4 * 4 * held + 2 * model.vocab_size * model.hidden_size + (64 << 20)
