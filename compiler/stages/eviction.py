"""Fit the weights of HOBBIT's eviction score to the routing of the written bundle, run by the runtime that ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from ..preflight.prepared import Prepared
from ..request.ports import FitEviction, FittedEviction, LocalEngine, RoutedText
from ..request.task_data import texts_of, train_texts

FITTED_TEXTS = 16
"""Texts that are replayed, and as many held-out ones. A replay of these takes about 0.1 s for the example."""
LEAST_TEXTS = 8
"""Fewer texts of either kind say little of others."""
DECODED_TOKENS = 64
"""Tokens of a text that are replayed after its prompt."""


def fitted_eviction(
    fit: FitEviction | None, prepared: Prepared, partial: Path, engine: LocalEngine
) -> FittedEviction | None:
    """Return the weights for a bundle that is not published yet; None without data, or if nothing has to be evicted.

    They are fitted to train texts, and compared with the default weights on validation texts.
    """
    model, splits = prepared.lowering.model, prepared.splits
    if fit is None or not splits or model.encoder is not None:
        return None
    train = _in_turn([train_texts(split, prepared.shots) for split in splits])
    validation = _in_turn([texts_of(split, split.validation.items, prepared.shots) for split in splits])
    if min(len(train), len(validation)) < LEAST_TEXTS:
        prepared.talk.note(
            f"no weights of eviction are fitted: they need {LEAST_TEXTS} train and validation texts, "
            f"found {len(train)} and {len(validation)}"
        )
        return None
    progress = prepared.talk.progress("fitting the weights of eviction")
    training, held_out = (routed_texts(engine, texts, model.default_context) for texts in (train, validation))
    return fit(partial, training, held_out, progress)


def _in_turn(tasks: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the first texts of all tasks in turn, at most FITTED_TEXTS."""
    longest = max(map(len, tasks), default=0)
    return [texts[at] for at in range(longest) for texts in tasks if at < len(texts)][:FITTED_TEXTS]


def routed_texts(engine: LocalEngine, pairs: Sequence[tuple[str, str]], context: int) -> list[RoutedText]:
    """Return the routing of texts, as much as one pass records. A prompt leaves room for at least one token."""
    longest = min(MAX_PASS_TOKENS, context)
    texts = [(prompt[: longest - 1], answer) for prompt, answer in engine.encode_pairs(pairs)]
    whole = [[*prompt, *answer[:DECODED_TOKENS]][:longest] for prompt, answer in texts]
    usable = [at for at, tokens in enumerate(whole) if len(tokens) > 1]
    records = engine.recorded_routing([whole[at] for at in usable])
    return [
        RoutedText(len(texts[at][0]), {layer: routing.chosen for layer, routing in record.items()})
        for at, record in zip(usable, records, strict=True)
    ]
