"""Learn from the written bundle, run by the runtime that ships: self-test, routers, weights of eviction.

The journal keeps the result for each plan. So a resumed compile, and a device with the plan of another one, learn
nothing again.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moec.manifests.bundle import EVICTION_NAME, LOOKAHEAD_NAME
from moec.manifests.codec import canonical_json
from moec.manifests.self_test import SELF_TEST_NAME, encode_self_test

from ..preflight.prepared import Prepared
from ..request.plan import CompilePlan
from ..request.ports import LocalEngine
from .compile_context import CompileContext
from .eviction import fitted_eviction
from .lookahead import lookahead_file, sample_bytes

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
