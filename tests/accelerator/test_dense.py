"""Dense weights on a torch device: the CPU's logits to rounding, for every family, in whatever order tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moec.manifests.errors import ExecutionError, MemoryBudgetExceeded, OptionError
from moec.manifests.quant import QuantSpec
from moec.runtime import load
from moec.runtime.accelerator.dense import DenseLatency, dense_bytes, shared_bytes
from moec.runtime.accelerator.torch_attention import together, unpacked
from moec.runtime.accelerator.torch_device import TorchDevice
from moec.runtime.beam import BeamOptions, beam_search
from moec.runtime.budget import longest_pass
from moec.runtime.bundle import open_bundle
from moec.runtime.engine import Engine
from moec.runtime.kernels import reference
from moec.runtime.model import load_dense
from tests.gates.bundles import emit_bundle
from tests.kernels.packer import random_matrix
from tests.kernels.products import inputs, matrix_of
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.tiny_switch import TinySwitch, save_tiny_switch

TOKENS = np.random.default_rng(4).integers(4, 260, 70).tolist()
PREFILL = 50
CONTEXT = 96


def on(device: torch.device, **options: Any) -> dict[str, Any]:
    """Options of a run with dense weights on the device."""
    name = "torch-cpu" if device.type == "cpu" else "cuda"
    return {
        "context": CONTEXT, "accelerator": name, "accelerator_memory": "300MiB", "cooperation": "gpu",
        "accelerator_dense": "device", **options,
    }  # fmt: skip


def logits_of(engine: Engine) -> np.ndarray:
    """Of a prefill and twenty decode steps."""
    rows = [engine.logits(TOKENS[:PREFILL])]
    rows += [engine.decode([TOKENS[at]], [0], [at]) for at in range(PREFILL, len(TOKENS))]
    return np.concatenate(rows)


def dense_on_device(engine: Engine) -> bool:
    used = engine.model.accelerator
    assert used is not None
    assert (used.dense is not None) == used.to_plain()["dense_is_on_device"]
    return used.dense is not None


@pytest.mark.parametrize("family", sorted(TINY_FAMILIES))
def test_sixteen_bits_differ_by_the_order_of_sums_alone(tmp_path: Path, device: torch.device, family: str) -> None:
    """Windows, sinks, biases, norms of queries and keys, latent attention, shared experts, tied heads, rotations."""
    bundle = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES[family]), tmp_path / "bundle")
    with load(bundle, context=CONTEXT) as engine:
        expected = logits_of(engine)
    with load(bundle, **on(device)) as engine:
        assert dense_on_device(engine) and " for dense weights and routed experts" in engine.mode
        found = logits_of(engine)
        host = engine._on_host[1]
        assert not any(keys.any() for keys in host.keys[1:])  # the layers that were not timed wrote nothing here
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_dense_weights_read_the_same_rounded_rows(tmp_path: Path, device: torch.device, bits: int) -> None:
    """A sum in another order may flip one of the 8-bit codes of an activation, as in test_cooperation."""
    folder = save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=3, experts=4, top_k=2, seed=5))
    bundle = emit_bundle(folder, tmp_path / "bundle", dense_bits=bits)
    with load(bundle, context=CONTEXT) as engine:
        expected = logits_of(engine)
    with load(bundle, **on(device)) as engine:
        found = logits_of(engine)
    assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
    assert np.median(np.abs(found - expected)) <= 1e-5 * np.abs(expected).max()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dense")
    return emit_bundle(save_tiny_family(root / "model", TINY_FAMILIES["gpt-oss"]), root / "bundle")


def test_sequences_side_by_side_do_not_see_each_other(bundle: Path, device: torch.device) -> None:
    """A pass with tokens of three slots, then one token of each, is what each sequence is alone."""
    texts = [TOKENS[:9], TOKENS[9:30], TOKENS[30:33]]
    with load(bundle, **on(device)) as engine:
        alone = [engine.logits(text)[-2:] for text in texts]
    with load(bundle, **on(device, slots=3)) as engine:
        slots = [slot for slot, text in enumerate(texts) for _ in text[:-1]]
        positions = [at for text in texts for at in range(len(text) - 1)]
        flat = [token for text in texts for token in text[:-1]]
        order = np.argsort(positions, kind="stable")  # slots take turns; each stays in order
        hidden = engine.step(*([np.array(part)[order].tolist() for part in (flat, slots, positions)]))
        last = [int(np.flatnonzero(np.array(slots)[order] == slot)[-1]) for slot in range(3)]
        before = engine.model.logits(hidden[last])
        after = engine.decode([text[-1] for text in texts], [0, 1, 2], [len(text) - 1 for text in texts])
    for slot, expected in enumerate(alone):
        found = np.stack([before[slot], after[slot]])
        assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def test_beams_go_on_from_copied_keys(bundle: Path, device: torch.device) -> None:
    def found(engine: Engine) -> list[Sequence[int]]:
        return [beam.tokens for beam in beam_search(engine, TOKENS[:6], 8, BeamOptions(4))]

    with load(bundle, context=CONTEXT, slots=4) as engine:
        expected = found(engine)
    with load(bundle, **on(device, slots=4)) as engine:
        assert found(engine) == expected


def test_long_prompts_take_turns(bundle: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(bundle, **on(device)) as engine:
        whole = logits_of(engine)
        monkeypatch.setattr("moec.runtime.accelerator.torch_attention.CHUNK_FLOATS", 700)
        in_parts = logits_of(engine)
    assert np.abs(in_parts - whole).max() <= 2e-5 * np.abs(whole).max()


def test_weights_unpacked_in_parts_are_the_kernels_weights(
    bundle: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moec.runtime.accelerator.torch_attention.UNPACKED_AT_ONCE", 2000)
    matrix = load_dense(open_bundle(bundle), verify=False)["lm_head"]
    expected = np.empty((matrix.rows, matrix.columns), np.float32)
    reference.dequantize_rows(matrix, np.arange(matrix.rows), expected)
    assert np.array_equal(unpacked(matrix, device).cpu().numpy(), expected)


def test_matrices_that_read_rows_differently_are_multiplied_apart(device: torch.device) -> None:
    """A search may give query and key different formats; products come back in their order."""
    texts = ("q4g32", "q8", "bf16", "fp16", "q4g32")
    matrices = [matrix_of(random_matrix(40 + at, 64, QuantSpec.parse(text), at)) for at, text in enumerate(texts)]
    biases = [np.full(matrix.rows, at, np.float32) if at % 2 else None for at, matrix in enumerate(matrices)]
    x, linears = inputs(7, 64), together(matrices, biases, device)
    assert len(linears) == 3
    found = [rows.cpu().numpy() for linear in linears for rows in linear(torch.from_numpy(x).to(device))]
    for rows, matrix, bias in zip(found, matrices, biases, strict=True):
        expected = np.empty((7, matrix.rows), np.float32)
        reference.linear(matrix, x, expected)
        expected += 0 if bias is None else bias
        assert np.abs(rows - expected).max() <= 1e-5 * np.abs(expected).max()


def test_both_sides_may_take_turns_between_sequences(bundle: Path, device: torch.device) -> None:
    with load(bundle, context=CONTEXT) as engine:
        expected = logits_of(engine)
        with pytest.raises(OptionError, match="no accelerator holds the dense weights"):
            engine.place_dense(on_device=True)
    with load(bundle, **on(device)) as engine:
        there = logits_of(engine)
        steps = engine.generate(TOKENS[:5], 3)
        next(steps)
        engine.place_dense(on_device=False)
        with pytest.raises(ExecutionError, match="taken over"):
            list(steps)
        accelerator, engine.model.accelerator = engine.model.accelerator, None
        assert np.array_equal(logits_of(engine), expected)
        engine.model.accelerator = accelerator
        engine.place_dense(on_device=True)
        assert np.array_equal(logits_of(engine), there)


def test_auto_takes_the_side_that_was_measured_to_be_faster(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for latency, expected in ((DenseLatency(9e9, 1.0, 1.0, 1.0), True), (DenseLatency(1.0, 1.0, 9e9, 1.0), False)):
        monkeypatch.setattr("moec.runtime.accelerator.opening.measure_dense", lambda *_, found=latency: found)
        with load(bundle, **on(torch.device("cpu"), accelerator_dense="auto")) as engine:
            assert dense_on_device(engine) == expected
            assert latency.to_text() in engine.mode
            assert (" for dense weights and routed experts" in engine.mode) == expected


def test_a_slow_start_pays_on_a_long_prompt() -> None:
    """512 tokens in one pass and 128 passes of one."""
    assert DenseLatency(100.0, 1000.0, 4000.0, 10.0).device_is_faster
    assert not DenseLatency(100.0, 1000.0, 6000.0, 10.0).device_is_faster


def test_dense_weights_that_do_not_fit_stay_here_or_are_refused(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    needed = dense_bytes(manifest, longest_pass(manifest.model, 1, CONTEXT), 1, CONTEXT)
    assert needed > 0
    options = on(torch.device("cpu"), accelerator_memory="1MiB", accelerator_dense="auto")
    with load(bundle, **options) as engine:
        assert not dense_on_device(engine)
    with pytest.raises(MemoryBudgetExceeded, match=rf"under its floor of \d+ \(dense weights {needed},"):
        load(bundle, **{**options, "accelerator_dense": "device"})


def test_dense_weights_come_before_experts(bundle: Path) -> None:
    """What they take is missing for experts, and all of it together is inside the budget."""
    manifest = open_bundle(bundle).manifest
    needed = dense_bytes(manifest, longest_pass(manifest.model, 1, CONTEXT), 1, CONTEXT)
    placed = {}
    for place in ("host", "device"):
        with load(bundle, **on(torch.device("cpu"), accelerator_dense=place)) as engine:
            used = engine.model.accelerator
            assert used is not None
            placed[place] = used.placement
    assert placed["device"].fixed_bytes - placed["host"].fixed_bytes == needed
    assert placed["device"].fixed_bytes + placed["device"].resident_bytes <= placed["device"].budget_bytes


def test_shared_experts_are_computed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES["qwen2"]), tmp_path / "bundle")
    assert shared_bytes(open_bundle(bundle).manifest) > 0
    runs, run = list[int](), TorchDevice.run

    def recorded(self: TorchDevice, expert: Any, tokens: np.ndarray, ranks: np.ndarray) -> None:
        runs.append(int(ranks[0]))
        run(self, expert, tokens, ranks)

    monkeypatch.setattr(TorchDevice, "run", recorded)
    with load(bundle, **on(torch.device("cpu"))) as engine:
        runs.clear()
        engine.logits(TOKENS[:5])
        top_k, layers = engine.model.spec.layers[0].experts.top_k, engine.model.spec.num_layers
        assert sum(rank == top_k for rank in runs) == layers
        assert engine.model.times.shared_ns == 0


def test_a_model_with_an_encoder_keeps_them_here(tmp_path: Path) -> None:
    routed = {"num_layers": 2, "num_sparse_encoder_layers": 2, "num_decoder_layers": 2, "num_sparse_decoder_layers": 2}
    folder = save_tiny_switch(tmp_path / "model", TinySwitch({**routed, "num_experts": 4}, seed=4))
    bundle = emit_bundle(folder, tmp_path / "bundle")
    with pytest.raises(OptionError, match="with an encoder are computed by the CPU"):
        load(bundle, **on(torch.device("cpu")))
    with load(bundle, **on(torch.device("cpu"), accelerator_dense="auto")) as engine:
        assert not dense_on_device(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator_dense": "device"}, "no effect without one"),
        ({"accelerator": "torch-cpu", "accelerator_memory": "1GiB", "accelerator_dense": "there"}, "unknown place"),
    ],
)
def test_options_that_mean_nothing_are_refused(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(bundle, **options)
