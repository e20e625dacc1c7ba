"""Whole runs with experts on both sides: the split changes only rounding, for any placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moec.manifests.errors import AcceleratorUnavailable, MemoryBudgetExceeded, OptionError
from moec.runtime import kernels, load
from moec.runtime.accelerator.cooperative import CooperativeExperts
from moec.runtime.accelerator.device import COPY_SLOTS
from moec.runtime.accelerator.image import entry_bytes
from moec.runtime.accelerator.latency import LatencyModel
from moec.runtime.accelerator.open_device import bring
from moec.runtime.accelerator.placement import place_experts, working_bytes
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.options.runtime import COOPERATIONS
from tests.accelerator.conftest import name_of
from tests.accelerator.simulated_device import SimulatedDevice
from tests.gates.bundles import emit_bundle
from tests.pruned_mixtral import PRUNED, save_whole
from tests.runtime.cache_kinds import caches_of
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.tiny_switch import TinySwitch, save_tiny_switch

TOKENS = np.random.default_rng(3).integers(4, 260, 60).tolist()
PREFILL = 40
EVEN = LatencyModel(1000.0, 100.0, 1500.0, 1.0, 0.01, 0.1)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cooperation")
    folder = save_tiny_mixtral(root / "model", TinyMixtral(layers=4, experts=9, top_k=3, seed=11))
    return emit_bundle(folder, root / "bundle", mixed=True)


def logits_of(engine: Engine) -> np.ndarray:
    """Return the logits of a prefill and 20 decode steps."""
    rows = [engine.logits(TOKENS[:PREFILL])]
    for position in range(PREFILL, len(TOKENS)):
        rows.append(engine.model.logits(engine.step([TOKENS[position]], [0], [position])))
    engine.cache.check_invariants()
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def on_cpu(bundle: Path) -> np.ndarray:
    with load(bundle, context=128, expert_cache="50%") as engine:
        return logits_of(engine)


def third(bundle: Path, slots: int = 1, extra_bytes: int = 0) -> str:
    """Return a budget for a third of the experts, in addition to the fixed memory."""
    manifest = open_bundle(bundle).manifest
    sizes = [entry_bytes(manifest.model, entry) for entry in manifest.stored_experts]
    fixed = working_bytes(manifest, min(1024, slots * 128), may_group=False) + COPY_SLOTS * max(sizes)
    return str(fixed + sum(sizes) // 3 + extra_bytes)


def beside(bundle: Path, **changes: Any) -> dict[str, Any]:
    """Options of a run beside torch's CPU device. Dense weights are the subject of test_dense."""
    device = {"accelerator": "torch-cpu", "accelerator_memory": third(bundle), "accelerator_dense": "host"}
    return {"context": 128, **device, **changes}


def simulate_on(engine: Engine, cooperation: Any) -> SimulatedDevice:
    """Give an engine a simulated device with a third of the experts on it."""
    manifest, experts, storage = engine.bundle.manifest, engine.model.experts, engine.storage
    sizes = [entry_bytes(manifest.model, entry) for entry in manifest.stored_experts]
    budget = sum(sizes) // 3 + COPY_SLOTS * max(sizes)
    device = SimulatedDevice(EVEN)
    placement = place_experts(sizes, range(0, len(sizes)), budget, 0, 0)
    residents = bring(device, placement, experts, storage)
    engine.model.accelerator = CooperativeExperts(
        device, experts, sizes, lambda index: False, placement, residents, {}, EVEN, cooperation
    )
    return device


@pytest.mark.gate("G2")
@pytest.mark.parametrize("cooperation", COOPERATIONS)
@pytest.mark.parametrize("cache", ["30%", "100%"])
def test_splitting_and_bringing_together_change_no_bit(
    bundle: Path, on_cpu: np.ndarray, cooperation: str, cache: str
) -> None:
    """A device that computes with the CPU's kernels: what is left is the split."""
    # The cache is in Python, as with an accelerator, which copies from the places of that cache.
    options: dict[str, Any] = {"context": 128, "expert_cache": cache, "cache_state": "cold"}
    with caches_of(PythonCache), load(bundle, **options) as engine:
        device = simulate_on(engine, cooperation)
        found = logits_of(engine)
        assert engine.model.accelerator is not None
        counts = engine.model.accelerator.counts
    assert counts.resident > 0 and device.clock.now_ns > 0
    assert (counts.copied > 0) == (cooperation != "cpu") and (counts.cpu > 0) == (cooperation != "gpu")
    assert np.array_equal(found.view(np.uint32), on_cpu.view(np.uint32))


def rows_that_differ(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Rows of logits further apart than sums in another order bring: 1e-5 of the largest logit."""
    return np.flatnonzero(np.abs(found - expected).max(axis=1) > 1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("cooperation", COOPERATIONS)
def test_a_torch_device_computes_what_the_cpu_computes(
    bundle: Path, on_cpu: np.ndarray, device: torch.device, cooperation: str
) -> None:
    """Equal to rounding, but where rounding moves an activation over the border between two of its 8-bit codes.

    The kernels of numpy have the same specification. They differ from the native ones in the same way: one code of one
    token, which changes logits by 0.2 % of the largest one. Other devices may change other codes, so ten times as much
    is allowed.
    """
    name = name_of(device)
    memory = third(bundle, extra_bytes=0 if name == "torch-cpu" else 64 << 20)
    options = beside(bundle, accelerator=name, accelerator_memory=memory, cooperation=cooperation)
    with load(bundle, expert_cache="50%", **options) as engine:
        found = logits_of(engine)
        used = engine.model.accelerator
        assert used is not None and f"accelerator {name} for routed experts, cooperation {cooperation}" in engine.mode
        counts, placed = used.counts, used.placement
        assert name != "cuda" or used.device.used_bytes <= placed.budget_bytes
        resident = set(placed.resident)
        assert not resident & set(engine.cache.resident().tolist())  # the host's memory has no room for them as well
        told = used.to_plain()
    assert 0 < len(placed.resident) < 0.5 * 36 and placed.resident_bytes + placed.fixed_bytes <= placed.budget_bytes
    assert counts.resident > 0 and counts.resident + counts.copied + counts.cpu > 4 * 20 * 3
    assert cooperation != "gpu" or (counts.cpu == 0 and counts.copied > 0 and counts.copied_bytes > 0)
    assert cooperation != "cpu" or (counts.copied == 0 and counts.cpu > 0)
    assert told["placement"]["resident"] == len(placed.resident) and told["latency"]["cpu_token_ns"] >= 0
    assert len(rows_that_differ(found, on_cpu)) <= len(TOKENS) // 3
    assert np.abs(found - on_cpu).max() <= 0.02 * np.abs(on_cpu).max()


def test_an_encoder_uses_the_device_too(tmp_path: Path) -> None:
    """Experts have two projections. Tokens whose expert is full are not computed."""
    routed = {"num_layers": 2, "num_sparse_encoder_layers": 2, "num_decoder_layers": 2, "num_sparse_decoder_layers": 2}
    tiny = TinySwitch({**routed, "num_experts": 4, "expert_capacity": 9}, seed=4)
    found = emit_bundle(save_tiny_switch(tmp_path / "model", tiny), tmp_path / "bundle")
    with load(found, context=64) as engine:
        expected = engine.logits([0, *TOKENS[:5]], prompt=TOKENS[:30])
    with load(found, context=64, accelerator="torch-cpu", accelerator_memory="50MiB", cooperation="gpu") as engine:
        logits = engine.logits([0, *TOKENS[:5]], prompt=TOKENS[:30])
        assert engine.model.accelerator is not None and engine.model.accelerator.counts.resident > 0
    assert not len(rows_that_differ(logits, expected))


def test_a_device_that_is_slow_for_one_token_leaves_it_to_the_cpu(bundle: Path, on_cpu: np.ndarray) -> None:
    """If the host holds all experts, those of the device are read last, and computed on the faster side."""
    with load(bundle, expert_cache="100%", **beside(bundle)) as engine:
        engine.cache.finish_warming()
        used = engine.model.accelerator
        assert used is not None and engine.cache.is_resident(used.placement.resident[0])
        used.latency = LatencyModel(1000.0, 10.0, 1e9, 0.0, 1.0, 1.0)
        assert np.array_equal(logits_of(engine), on_cpu)
        assert used.counts.cpu > 0 and used.counts.resident == used.counts.copied == 0
        used.cooperation = "twiddler"
        engine.logits(TOKENS[:PREFILL])
        assert used.counts.resident > 0


def test_what_is_on_the_device_is_never_read_ahead(bundle: Path) -> None:
    # Random weights make popularity no guide, which the rule `likely` would find out.
    options = beside(bundle, prefetch="popularity", prefetch_rule="spread")
    with load(bundle, expert_cache="50%", **options) as engine:
        engine.cache.finish_warming()
        resident = list(engine.model.accelerator.placement.resident)  # type: ignore[union-attr]
        holds = engine.model.advisor.holds
        assert all(map(holds, resident)) and not all(map(holds, range(36))), "`first-miss` looks past what is there"
        assert engine.model.absent([*resident, 0, 35]) == [index for index in (0, 35) if index not in resident]
        logits_of(engine)
        assert engine.cache.stats.prefetch_reads > 0
        assert not engine.cache.prefetches[:, resident].any()


def test_big_little_runs_with_it(bundle: Path) -> None:
    with load(bundle, lossy="big-little gamma=0.9,k=1", **beside(bundle)) as engine:
        steps = list(engine.generate(TOKENS[:5], 4))
        assert steps and engine.mode_counts is not None and engine.mode_counts.tokens > 0


def test_an_error_in_a_layer_leaves_the_next_one_whole(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle, expert_cache="50%", **beside(bundle, cooperation="cpu")) as engine:
        expected = engine.logits(TOKENS[:PREFILL])
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "expert_ffn", lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.logits(TOKENS[:PREFILL])
        assert np.array_equal(engine.logits(TOKENS[:PREFILL]), expected)
        engine.cache.check_invariants()


def test_a_budget_under_the_floor_is_refused_with_the_floor(bundle: Path) -> None:
    with pytest.raises(MemoryBudgetExceeded, match=r"budget of 4096 bytes is under its floor of \d+ \(dense weights 0"):
        load(bundle, accelerator="torch-cpu", accelerator_memory="4KiB")


def test_a_device_that_is_full_after_all_is_refused_in_one_sentence(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines.")

    monkeypatch.setattr("moec.runtime.accelerator.torch_device.TorchDevice", full)
    with pytest.raises(
        AcceleratorUnavailable, match=r"does not give the \d+ bytes of its budget: CUDA out of memory"
    ) as told:
        load(bundle, context=128, accelerator="torch-cpu", accelerator_memory="64MiB")
    assert "\n" not in str(told.value)


def test_memory_of_torch_cpu_counts_in_the_budget_of_the_process(bundle: Path) -> None:
    with load(bundle, context=128, accelerator="torch-cpu", accelerator_memory="64MiB") as engine:
        assert engine.memory.accelerator_bytes == 64 << 20
        assert engine.memory.floor_bytes >= engine.memory.process_bytes + (64 << 20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_cuda_is_refused_in_one_sentence(bundle: Path) -> None:
    with pytest.raises(AcceleratorUnavailable, match="sees 0 CUDA devices here"):
        load(bundle, accelerator="cuda:1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator": "gpu"}, "unknown accelerator `gpu`"),
        ({"accelerator": "cuda:x"}, "unknown accelerator"),
        ({"accelerator": "torch-cpu"}, "shares the host's memory"),
        ({"accelerator_memory": "1GiB"}, "no effect without one"),
        ({"cooperation": "gpu"}, "no effect without one"),
        ({"accelerator_dense": "device"}, "no effect without one"),
        ({"accelerator": "torch-cpu", "accelerator_memory": "1GiB", "accelerator_dense": "there"}, "unknown place"),
        ({"accelerator": "torch-cpu", "accelerator_memory": "1GiB", "cooperation": "both"}, "unknown cooperation"),
        ({"accelerator": "torch-cpu", "accelerator_memory": "much"}, "is not a size"),
    ],
)
def test_options_that_mean_nothing_are_refused(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(bundle, **options)


def test_experts_left_out_of_a_bundle_are_never_placed(tmp_path: Path) -> None:
    bundle = emit_bundle(save_whole(tmp_path / "model"), tmp_path / "bundle", bitwidth=8, pruned=PRUNED)
    with load(bundle, context=128) as engine:
        on_cpu = logits_of(engine)
    with load(bundle, **beside(bundle, accelerator_memory="64MB", cooperation="gpu")) as engine:
        found, used = logits_of(engine), engine.model.accelerator
        assert used is not None and len(used.placement.resident) == 3 * 8 - len(PRUNED)
    assert np.abs(found - on_cpu).max() <= 0.02 * np.abs(on_cpu).max()
