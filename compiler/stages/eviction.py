"""Fit the weights of HOBBIT's eviction score to the routing of the written bundle, run by the runtime that ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.manifests.runtime_limits import MAX_PASS_TOKENS

from ..preflight.prepared import Prepared
from ..request.ports import FittedEviction, LocalEngine, RoutedText
from ..request.task_data import train_texts, validation_texts

FITTED_TEXTS = 16
"""Texts that are replayed, and as many held-out ones. A replay of these takes about 0.1 s for the example."""
LEAST_TEXTS = 8
"""Fewer texts of either kind say little of others."""
DECODED_TOKENS = 64
"""Tokens of a text that are replayed after its prompt."""


def fit_eviction(prepared: Prepared, partial: Path, engine: LocalEngine) -> FittedEviction | None:
    """Return the weights for a bundle that is not published yet; None without data, or if nothing has to be evicted.

    They are fitted to train texts, and compared with the default weights on validation texts.
    """
    request, model = prepared.request, prepared.lowering.model
    if request.fit_eviction is None or not prepared.splits or model.encoder is not None:
        return None
    pairs = [
        _in_turn([texts(split, prepared.shots) for split in prepared.splits])
        for texts in (train_texts, validation_texts)
    ]
    if any(len(each) < LEAST_TEXTS for each in pairs):
        found = " and ".join(str(len(each)) for each in pairs)
        request.talk.note(
            f"no weights of eviction are fitted: they need {LEAST_TEXTS} train and validation texts, found {found}"
        )
        return None
    progress = request.talk.progress("fitting the weights of eviction")
    training, held_out = (routed_texts(engine, each, model.default_context) for each in pairs)
    return request.fit_eviction(partial, training, held_out, progress)


def _in_turn(tasks: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[str, str]]:
    """Return the first texts of all tasks in turn, at most FITTED_TEXTS."""
    longest = max(map(len, tasks), default=0)
    return [texts[at] for at in range(longest) for texts in tasks if at < len(texts)][:FITTED_TEXTS]


def routed_texts(engine: LocalEngine, pairs: Sequence[tuple[str, str]], context: int) -> list[RoutedText]:
    """Return the routing of texts, as much as one pass records. A prompt leaves room for at least one token."""
    longest = min(MAX_PASS_TOKENS, context)
    texts = [(prompt[: longest - 1], answer) for prompt, answer in engine.encode_pairs(pairs)]
    whole = [[*prompt, *answer[:DECODED_TOKENS]][:longest] for prompt, answer in texts]
    kept = [at for at, tokens in enumerate(whole) if len(tokens) > 1]
    records = engine.recorded_routing([whole[at] for at in kept])
    return [
        RoutedText(len(texts[at][0]), {layer: own.chosen for layer, own in record.items()})
        for at, record in zip(kept, records, strict=True)
    ]
