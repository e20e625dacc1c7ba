"""Learn from the written bundle, run by the runtime that ships: self-test, routers, weights of eviction.

The journal keeps the result for each plan. So a resumed compile, and a device with the plan of another one, learn
nothing again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moec.evaluation.text_pairs import TokenPair
from moec.manifests.bundle import EVICTION_NAME, LOOKAHEAD_NAME
from moec.manifests.codec import canonical_json
from moec.manifests.model import ExpertKey
from moec.manifests.runtime_limits import MAX_PASS_TOKENS
from moec.manifests.self_test import SELF_TEST_NAME, encode_self_test

from ..linear_maps import (
    HELD_OUT,
    MAX_AHEAD,
    MAX_TOKENS,
    LearnedMap,
    RoutingSample,
    can_learn,
    encode_maps,
    layer_groups,
    learn_maps,
    lookahead_report,
)
from ..preflight.prepared import Prepared
from ..request.plan import CompilePlan
from ..request.ports import FitEviction, FittedEviction, LocalEngine, RoutedText
from ..request.task_data import texts_of, train_texts
from .compile_context import CompileContext

FITTED_TEXTS = 16
"""Texts that are replayed, and as many held-out ones. A replay of these takes about 0.1 s for the example."""
LEAST_TEXTS = 8
"""Fewer texts of either kind say little of others."""
DECODED_TOKENS = 64
"""Tokens of a text that are replayed after its prompt."""
SAMPLE_SHARE = 8
"""The routing that is kept takes at most this part of the memory, or that of one layer and those that it foresees."""
Learned = tuple[dict[str, bytes], dict[str, Any]]
"""Further files of a bundle by name, and what quality.json says of them."""


def learn(context: CompileContext, plan: CompilePlan, partial: Path) -> Learned:
    """Return what is learned from a bundle that is not published yet. The self-test takes seconds and is made anew."""
    prepared = context.prepared
    with prepared.request.open_runtime(partial, prepared.runtime_bytes - sample_bytes(prepared)) as engine:
        test = engine.self_test()
        files, reports = _from_journal(context, plan, partial, engine) if prepared.splits else ({}, {})
    return files if test is None else {**files, SELF_TEST_NAME: encode_self_test(test)}, reports


def _from_journal(context: CompileContext, plan: CompilePlan, partial: Path, engine: LocalEngine) -> Learned:
    """Return what the data of the compile teaches, from the journal if a bundle of this plan was made before."""
    key = " ".join([plan.digest, *map(str, plan.low_units.values())])
    stage = f"learned-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    learned = cache(lambda: _learn(context.prepared, plan, partial, engine))
    reports = context.journal.json(f"{stage}-reports", lambda: learned()[1])
    arrays = context.journal.arrays(
        stage, lambda: {name: np.frombuffer(data, np.uint8) for name, data in learned()[0].items()}
    )
    return {name: data.tobytes() for name, data in arrays.items()}, reports


def _learn(prepared: Prepared, plan: CompilePlan, partial: Path, engine: LocalEngine) -> Learned:
    files, reports = dict[str, bytes](), dict[str, Any]()
    lookahead = lookahead_file(prepared, plan, engine)
    if lookahead is not None:
        files[LOOKAHEAD_NAME], reports["lookahead"] = lookahead
    eviction = fitted_eviction(prepared.request.fit_eviction, prepared, partial, engine)
    if eviction is not None:
        reports["eviction"] = dict(eviction.record)
        if eviction.is_better:
            files[EVICTION_NAME] = canonical_json({"hobbit": dict(eviction.weights)})
    return files, reports


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


def sample_bytes(prepared: Prepared) -> int:
    """Return the memory for the routing of texts. The runtime that records it has the rest."""
    return prepared.runtime_bytes // SAMPLE_SHARE


def lookahead_file(prepared: Prepared, plan: CompilePlan, engine: LocalEngine) -> tuple[bytes, dict[str, Any]] | None:
    """Return the content of `lookahead.safetensors`, and what quality.json says of it; None without learned routers."""
    maps = learn_lookahead(prepared, plan, engine)
    if not maps:
        return None
    data = encode_maps(maps)
    return data, lookahead_report(maps, len(data))


def learn_lookahead(prepared: Prepared, plan: CompilePlan, engine: LocalEngine) -> list[LearnedMap]:
    """Return the maps of a bundle that is not published yet; none if they foresee no more than its routers do.

    engine: opened on the bundle, with memory left for the sample.
    With little memory the texts run once for each group of layers. The maps are the same.
    """
    model = prepared.lowering.model
    if not prepared.splits or not can_learn(model):
        return []
    left_out = {ExpertKey(unit.layer, unit.expert) for unit, spec in plan.units.items() if spec.is_pruned}
    maps, progress = list[LearnedMap](), prepared.talk.progress("learning to look ahead")
    texts = sample_texts(prepared, engine.encode_pairs)
    if len(texts) < HELD_OUT:
        prepared.talk.note(f"no routers are learned: they need {HELD_OUT} train texts of 2 tokens, found {len(texts)}")
        return []
    groups = layer_groups(model, sum(map(len, texts)), sample_bytes(prepared))
    for number, group in enumerate(groups):
        samples = {
            layer: RoutingSample() for layer in model.expert_layers if group[0] <= layer <= group[-1] + MAX_AHEAD
        }
        for done, record in enumerate(engine.recorded_routing(texts), 1):
            for layer, sample in samples.items():
                sample.add(record[layer])
            progress(number * len(texts) + done, (len(groups) + 1) * len(texts))
        maps += learn_maps(model, samples, group, left_out)
    progress(1, 1)
    return maps


def sample_texts(prepared: Prepared, encode: Callable[[list[tuple[str, str]]], Sequence[TokenPair]]) -> list[list[int]]:
    """Return train texts of all tasks in turn as tokens, up to MAX_TOKENS of them.

    A text has as many tokens as one pass takes, because a pass is what is recorded.
    encode: returns the tokens of prompts and answers.
    """
    tasks = [train_texts(split, prepared.shots) for split in prepared.splits]
    left, longest = MAX_TOKENS, min(MAX_PASS_TOKENS, prepared.lowering.model.default_context)
    sample = list[list[int]]()
    for at in range(max(map(len, tasks))):
        for texts in tasks:
            if at < len(texts) and left > 0:
                ((prompt, answer),) = encode([texts[at]])
                tokens = [*prompt, *answer][: min(longest, left)]
                if len(tokens) > 1:
                    left -= len(tokens)
                    sample.append(tokens)
    return sample
