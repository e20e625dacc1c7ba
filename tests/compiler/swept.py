"""A sweep over the layers of a tiny checkpoint, as a compile makes it: counts of its texts, and quantized units."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.compiler.families import Lowering
from moec.compiler.quantization.swept_store import SweptStore
from moec.compiler.stages.encode_texts import CompileTexts
from moec.compiler.stages.sweep import Sweep, Swept
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.texts import AnswerTexts, TokenTexts, divided_pairs
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.evaluation.engine import no_progress
from moec.evaluation.text_pairs import TokenPair, forced_rows
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec


def scored(model: ModelSpec, pairs: Sequence[TokenPair]) -> AnswerTexts:
    """Return the texts of prompts and answers, every token of an answer and the end token scored."""
    prompts, decoded = divided_pairs(model, pairs)
    rows, answers, counts = forced_rows(decoded, model.eos_token_ids[:1])
    targets = [answer[len(answer) - count :] for answer, count in zip(answers, counts, strict=True)]
    return AnswerTexts(TokenTexts(rows, prompts), counts, targets, list(pairs), [len(pairs)])


def compile_texts_of(model: ModelSpec, pairs: Sequence[TokenPair]) -> CompileTexts:
    """Return these prompts and answers as the texts of all stages."""
    prompts, decoded = divided_pairs(model, pairs)
    calibration = TokenTexts([before + answer for before, answer in decoded], prompts)
    answers = scored(model, pairs)
    return CompileTexts(calibration, calibration, answers, answers, {"text": answers})


def swept(
    lowering: Lowering,
    pairs: Sequence[TokenPair] | None,
    work: Path,
    specs: Sequence[QuantSpec] = (),
    quantizer: str = "rtn",
    threads: int = 1,
) -> tuple[Swept, SweptStore, Journal]:
    """Sweep the layers of a checkpoint. Dense weights keep 16 bits.

    pairs: the texts; None: units are quantized without any.
    work: folder of the journal.
    specs: formats in which units are quantized.
    """
    journal, probe = Journal(work, "x", Disk()), dict.fromkeys(lowering.model.dense_shapes(), lowering.spec_16bit)
    store = SweptStore(lowering, quantizer, specs, journal)
    sweep = Sweep(LoadedLayer(lowering), store, journal, probe, 0)
    texts = None if pairs is None else compile_texts_of(lowering.model, pairs)
    return sweep.run(texts, threads, no_progress), store, journal
