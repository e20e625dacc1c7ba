"""Checkpoints as a compile reads them: lowered, changed in config.json, passed layer by layer, and swept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import Lowering, lower
from moec.compiler.quantization.swept_store import SweptStore
from moec.compiler.stages.encode_texts import CompileTexts
from moec.compiler.stages.sweep import Sweep, Swept
from moec.compiler.walker.loaded_layer import LoadedLayer, embedded
from moec.compiler.walker.texts import AnswerTexts, TextStates, TokenTexts, divided_pairs
from moec.compiler.workspace.durable import Disk
from moec.compiler.workspace.journal import Journal
from moec.compiler.workspace.parallel import workers
from moec.evaluation.engine import no_progress
from moec.evaluation.text_pairs import TokenPair, forced_rows
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from tests.oracles.checkpoints import OWN_FAMILIES, save_own_family
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_switch import TINY_SWITCHES, save_tiny_switch


def lowered(path: Path) -> Lowering:
    """Return the lowering of the checkpoint in a folder."""
    return lower(open_checkpoint(str(path)))


def save_family(name: str, folder: Path) -> Path:
    """Write a tiny checkpoint, one of TINY_FAMILIES, OWN_FAMILIES and TINY_SWITCHES."""
    if name in TINY_SWITCHES:
        return save_tiny_switch(folder, TINY_SWITCHES[name])
    if name in OWN_FAMILIES:
        return save_own_family(folder, OWN_FAMILIES[name])
    return save_tiny_family(folder, TINY_FAMILIES[name])


def configured(path: Path, **changes: Any) -> Path:
    """Change keys of config.json. The value ... removes a key."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return path


def walked_logits(
    lowering: Lowering,
    rows: Sequence[list[int]],
    prompts: Sequence[list[int]] = (),
    weights: Mapping[Any, Tensor] | None = None,
    slot: LoadedLayer | None = None,
) -> list[Tensor]:
    """Return the logits [T, V] of each row.

    prompts: what an encoder reads, one for each row.
    weights: in place of the checkpoint's own.
    slot: where the layers are loaded.
    """
    slot, own = slot or LoadedLayer(lowering), weights or {}
    table = own.get("embedding", lowering.dense_weight("embedding"))
    texts = TokenTexts(list(rows), list(prompts))
    states = TextStates.begin(texts, lambda ids: embedded(ids, table, lowering.model.embedding_scale))
    with workers(1) as pool:
        for layer in range(lowering.model.num_layers):
            slot.load(layer, own.get)
            slot.run([states], pool)
    head = slot.head()
    head = replace(head, matrix=own.get(lowering.model.head_name, head.matrix))
    normed = slot.normed(states.scored_states([len(row) for row in rows]))
    return list(head.logits(normed).split([len(row) for row in rows]))


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
