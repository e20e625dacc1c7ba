"""Lossy modes with an accelerator: an expert in its memory counts as cached. It is never low, skipped or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moec.manifests.errors import OptionError
from moec.runtime import load
from moec.runtime.modes.expert_choice import PassChoice, Routed
from moec.runtime.modes.mode_counts import ModeCounts
from tests.runtime.modes.conftest import forced_steps

from .conftest import memory_for

LOSSY: list[dict[str, Any]] = [{"lossy": "dynamic-precision 0,0.5"}, {"lossy": "cache-routing margin=0.9,drop=0.2"}]


def device_options(bundle: Path, share: float) -> dict[str, Any]:
    """Return the options of a device with memory for a share of the experts. No measured time decides the placement."""
    device = {"accelerator": "torch-cpu", "accelerator_memory": str(memory_for(bundle, share, 64))}
    return {**device, "accelerator_dense": "host", "cooperation": "cpu"}


def decoded(bundle: Path, **options: Any) -> tuple[np.ndarray, ModeCounts]:
    logits, counts = forced_steps(bundle, expert_cache="25%", **options)
    assert counts is not None
    return logits, counts


@pytest.mark.parametrize("modes", LOSSY, ids=str)
def test_with_all_experts_on_the_device_nothing_is_given_up(two_version_bundle: Path, modes: dict[str, Any]) -> None:
    on_device = device_options(two_version_bundle, 1)
    found, counts = decoded(two_version_bundle, **on_device, **modes)
    assert counts.ranks and (counts.missed, counts.low, counts.skipped, counts.replaced, counts.dropped) == (0,) * 5
    again, _ = decoded(two_version_bundle, **on_device, lossy="big-little gamma=1,k=3")
    assert np.array_equal(found, again)


@pytest.mark.parametrize("modes", LOSSY, ids=str)
def test_residents_are_computed_as_they_are(
    two_version_bundle: Path, modes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[tuple[int, list[int], list[int]]] = []
    select = PassChoice.select

    def noted(self: PassChoice, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        found = select(self, routed)
        if not self._is_prompt:
            decided.append((routed.layer, routed.chosen[0].tolist(), found[0][0].tolist()))
        return found

    monkeypatch.setattr(PassChoice, "select", noted)
    _, without = decoded(two_version_bundle, **modes)
    decided.clear()
    _, counts = decoded(two_version_bundle, **device_options(two_version_bundle, 0.4), **modes)
    assert 0 < counts.missed < without.missed
    with load(two_version_bundle, context=64, **device_options(two_version_bundle, 0.4), **modes) as engine:
        resident = set(engine.model.accelerator.placement.resident)  # type: ignore[union-attr]
    kept = 0
    for layer, chosen, found in decided:
        for expert, became in zip(chosen, found, strict=True):
            if layer * 8 + expert in resident:
                assert became == expert
                kept += 1
    assert kept


def test_runs_repeat_to_the_bit(two_version_bundle: Path) -> None:
    options = {**device_options(two_version_bundle, 0.4), **LOSSY[0]}
    first, counts = decoded(two_version_bundle, **options)
    repeated, same = decoded(two_version_bundle, **options)
    assert counts.missed and same == counts and np.array_equal(first, repeated)


def test_a_device_of_unknown_size_is_refused(two_version_bundle: Path) -> None:
    for modes in LOSSY:
        with pytest.raises(OptionError, match="How many an accelerator holds would depend on its free memory"):
            load(two_version_bundle, accelerator="cuda", **modes)


def test_dense_weights_go_where_they_fit_whatever_was_fast_that_day(
    two_version_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.runtime.accelerator.dense.DenseLatency.device_is_faster", False)
    device: dict[str, Any] = {"accelerator": "torch-cpu", "accelerator_memory": "64MiB", "context": 64}
    for modes, is_there in (({}, False), (LOSSY[0], True)):
        with load(two_version_bundle, **device, **modes) as engine:
            assert engine.model.accelerator is not None and engine.model.accelerator.uses_dense == is_there
