"""Logits of texts that pass the layers of a checkpoint, one loaded at a time, as a compile measures a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from moec.compiler.families import Lowering
from moec.compiler.walker.loaded_layer import LoadedLayer, embedded
from moec.compiler.walker.texts import TextStates, TokenTexts
from moec.compiler.workspace.parallel import workers


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
