"""When a compile goes layer by layer, and what it then runs: texts, limits, and the errors that say what would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moec.evaluation.data import SplitData
from moec.evaluation.tasks import Item
from moec.manifests.errors import ContextOverflow, OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec

from ..calibration import chosen_texts
from ..families import Lowering
from ..targets import Target
from ..text_pairs import TokenPair, encode_pairs, forced_rows, load_tokenizer
from .memory import streamed_bytes, whole_bytes
from .sweep import SweepInputs

CALIBRATION_TOKENS = 65_536
"""Tokens that calibration runs at most: their residual streams are what a sweep holds beside one layer."""
ANSWER_TOKENS = 32_768
"""Tokens of validation texts whose answers are scored, prompts included."""


def goes_layer_by_layer(model: ModelSpec, specs: Sequence[QuantSpec], limit_bytes: int) -> bool:
    """Whether a compile that holds the whole model would exceed the limit."""
    return whole_bytes(model, specs) > limit_bytes


def need_bytes(model: ModelSpec, specs: Sequence[QuantSpec], threads: int) -> int:
    """Peak memory of a compile layer by layer, for texts of any length."""
    return streamed_bytes(model, CALIBRATION_TOKENS + ANSWER_TOKENS, specs, threads)


def check_layerwise(
    model: ModelSpec, target: Target, specs: Sequence[QuantSpec], threads: int, limit_bytes: int, has_data: bool
) -> None:
    """Refuse what cannot be compiled layer by layer. Raises OptionError with the memory that would do."""
    whole, need = whole_bytes(model, specs), need_bytes(model, specs, threads)
    if target.kind == "loss":
        raise OptionError(
            f"a loss target needs generated answers of the whole model, {whole} bytes of memory, found {limit_bytes}",
            "take `--kl`, `--bits-per-weight` or `--size`, or raise `--memory`",
        )
    if not has_data:
        raise OptionError(
            f"a search without data holds the whole model, {whole} bytes of memory, found {limit_bytes}",
            "add `--data`, or take `--uniform`",
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
    """Train texts for calibration, and the first validation items of every task for KL. Raises ContextOverflow."""
    tokenizer = load_tokenizer(lowering.checkpoint.root)
    train: list[tuple[str, str]] = []
    validation: list[tuple[str, str]] = []
    for split in splits:
        task, examples = split.task, shots[split.task.name]
        train += [(task.prompt(item, examples), task.answer(item)) for item in split.train.items]
        chosen = split.validation.items[: max(1, answer_items // len(splits))]
        validation += [(task.prompt(item, examples), task.answer(item)) for item in chosen]
    context = lowering.model.max_positions
    rows = chosen_texts(encode_pairs(tokenizer, train), context, seed, CALIBRATION_TOKENS)
    answers, counts = _answers(encode_pairs(tokenizer, validation), lowering)
    return SweepInputs(
        rows, answers, counts, tuple(spec for spec in specs if spec.bitwidth < 16), dense_probe, quantizer, seed
    )


def _answers(pairs: Sequence[TokenPair], lowering: Lowering) -> tuple[list[list[int]], list[int]]:
    """As many texts as ANSWER_TOKENS hold, with how many tokens of each are scored."""
    rows, _, counts = forced_rows(pairs, lowering.model.eos_token_ids[:1])
    kept: list[list[int]] = []
    scored: list[int] = []
    for row, count in zip(rows, counts, strict=True):
        if len(row) > lowering.model.max_positions:
            raise ContextOverflow(
                f"a text has {len(row)} tokens, the context of the model has {lowering.model.max_positions}",
                "shorten the text",
            )
        if count and sum(map(len, kept)) + len(row) <= ANSWER_TOKENS:
            kept.append(row)
            scored.append(count)
    return kept, scored
