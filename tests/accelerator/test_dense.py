"""Dense weights on a torch device: the CPU's logits to rounding, for every family, in whatever order tokens come."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moec.manifests.errors import AcceleratorUnavailable, ExecutionError, MemoryBudgetExceeded, OptionError
from moec.manifests.quant import QuantSpec
from moec.profiles.memory_floor import longest_pass
from moec.runtime import load
from moec.runtime.accelerator.dense import DenseLatency, dense_bytes, shared_bytes
from moec.runtime.accelerator.torch_attention import products_of, unpacked
from moec.runtime.accelerator.torch_dense import dense_on
from moec.runtime.accelerator.torch_device import TorchDevice
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.batch import generate_many
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.engine.engine import Engine
from moec.runtime.kernels import TokenPlaces, reference
from moec.runtime.model.dense_weights import load_dense
from tests.accelerator.conftest import memory_for, name_of
from tests.gates.bundles import emit_bundle
from tests.kernels.packer import random_matrix
from tests.kernels.products import inputs, matrix_of
from tests.tiny_families import DENSE_ON_CPU, TINY_FAMILIES, save_tiny_family
from tests.tiny_models import TinyMixtral, save_tiny_mixtral, save_tiny_olmoe
from tests.tiny_switch import TinySwitch, save_tiny_switch

TOKENS = np.random.default_rng(4).integers(4, 260, 58).tolist()
PREFILL = 50
CONTEXT = 96


def on(device: torch.device, **options: Any) -> dict[str, Any]:
    """Options of a run with dense weights on the device."""
    return {
        "context": CONTEXT, "accelerator": name_of(device), "accelerator_memory": "300MiB", "cooperation": "gpu",
        "accelerator_dense": "device", **options,
    }  # fmt: skip


def logits_of(engine: Engine) -> np.ndarray:
    """Return the logits of a prefill and 8 decode steps."""
    rows = [engine.logits(TOKENS[:PREFILL])]
    rows += [engine.decode([TOKENS[at]], [0], [at]) for at in range(PREFILL, len(TOKENS))]
    return np.concatenate(rows)


def dense_on_device(engine: Engine) -> bool:
    used = engine.model.accelerator
    assert used is not None
    told = used.to_plain()
    assert (used.dense is not None) == used.uses_dense == told["dense_is_on_device"]
    return used.uses_dense


@pytest.mark.parametrize(
    "family", sorted(name for name in TINY_FAMILIES if TINY_FAMILIES[name].name not in DENSE_ON_CPU)
)
def test_sixteen_bits_differ_by_the_order_of_sums_alone(tmp_path: Path, device: torch.device, family: str) -> None:
    """Windows, sinks, biases, norms of queries and keys, latent attention, shared experts, tied heads, rotations."""
    bundle = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES[family]), tmp_path / "bundle")
    with load(bundle, context=CONTEXT) as engine:
        expected = logits_of(engine)
    with load(bundle, **on(device)) as engine:
        assert dense_on_device(engine) and " for dense weights and routed experts" in engine.mode
        found = logits_of(engine)
        host = engine.dense_on_host[1]
        assert not any(keys.any() for keys in host.keys[1:])  # the layers that were not timed wrote nothing here
    assert np.abs(found - expected).max() <= 2e-5 * np.abs(expected).max()


def save_any(folder: Path, name: str) -> Path:
    """Mixtral, OLMoE, which norms queries and keys over all heads, or another family."""
    tiny = TinyMixtral(layers=3, experts=4, top_k=2, seed=5)
    if name in TINY_FAMILIES:
        return save_tiny_family(folder, TINY_FAMILIES[name])
    return save_tiny_mixtral(folder, tiny) if name == "mixtral" else save_tiny_olmoe(folder, tiny)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["mixtral", "olmoe", "deepseek-v2"])
def test_quantized_dense_weights_read_the_same_rounded_rows(
    tmp_path: Path, device: torch.device, name: str, bits: int
) -> None:
    """A sum in another order may flip one of the 8-bit codes of an activation, as in test_cooperation."""
    folder = save_any(tmp_path / "model", name)
    bundle = emit_bundle(folder, tmp_path / "bundle", dense_bits=bits)
    with load(bundle, context=CONTEXT) as engine:
        expected = logits_of(engine)
    with load(bundle, **on(device)) as engine:
        found = logits_of(engine)
    assert np.abs(found - expected).max() <= 0.1 * np.abs(expected).max()
    rows = np.abs(found - expected).max(axis=1) <= 1e-5 * np.abs(expected).max()
    assert rows.mean() > 0.05, "until the first code flips, the order of sums alone"


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
    x, linears = inputs(7, 64), products_of(matrices, biases, device)
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
        assert accelerator is not None and not accelerator.uses_dense
        engine.place_dense(on_device=True)
        assert np.array_equal(logits_of(engine), there)


def test_auto_takes_the_side_that_was_measured_to_be_faster(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for latency, expected in ((DenseLatency(9e9, 1.0, 1.0, 1.0), True), (DenseLatency(1.0, 1.0, 9e9, 1.0), False)):
        monkeypatch.setattr("moec.runtime.accelerator.open_device.measure_dense", lambda *_, found=latency: found)
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
    least = memory_for(bundle, 0.1, longest_pass(manifest.model, 1, CONTEXT))
    options = on(torch.device("cpu"), accelerator_memory=str(least), accelerator_dense="auto")
    with load(bundle, **options) as engine:
        assert not dense_on_device(engine)
        assert f"would take {needed / 2**20:.1f} MiB and do not fit" in engine.mode
    with pytest.raises(MemoryBudgetExceeded, match=rf"under its floor of \d+ \(dense weights {needed},"):
        load(bundle, **{**options, "accelerator_dense": "device"})


def test_dense_weights_come_before_experts(bundle: Path) -> None:
    """Their memory is not available to experts, and the sum is within the budget."""
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
        engine.place_dense(on_device=False)
        runs.clear()
        engine.logits(TOKENS[:5])
        assert engine.model.times.shared_ns > 0 and top_k not in runs


def test_a_model_with_an_encoder_keeps_them_here(tmp_path: Path) -> None:
    routed = {"num_layers": 2, "num_sparse_encoder_layers": 2, "num_decoder_layers": 2, "num_sparse_decoder_layers": 2}
    folder = save_tiny_switch(tmp_path / "model", TinySwitch({**routed, "num_experts": 4}, seed=4))
    bundle = emit_bundle(folder, tmp_path / "bundle")
    with pytest.raises(OptionError, match="with an encoder are computed by the CPU"):
        load(bundle, **on(torch.device("cpu")))
    with load(bundle, **on(torch.device("cpu"), accelerator_dense="auto")) as engine:
        assert not dense_on_device(engine)


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors that torch made and that are alive: their most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known = set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._known or not size:
            return
        self._known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, place, size)

    def _drop(self, place: int, size: int) -> None:
        self._known.discard(place)
        self.now -= size


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v2"])
@pytest.mark.parametrize("slots", [1, 3])
def test_it_takes_no_more_than_was_kept_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, slots: int
) -> None:
    """Bringing it there, a pass, and decoding side by side: every tensor alive is counted."""
    monkeypatch.setattr("moec.runtime.accelerator.dense.CHUNK_FLOATS", chunk := 60_000)
    monkeypatch.setattr("moec.runtime.accelerator.torch_attention.CHUNK_FLOATS", chunk)
    monkeypatch.setattr("moec.runtime.accelerator.dense.UNPACKED_AT_ONCE", 4096)
    monkeypatch.setattr("moec.runtime.accelerator.torch_attention.UNPACKED_AT_ONCE", 4096)
    bundle = emit_bundle(save_tiny_family(tmp_path / "model", TINY_FAMILIES[family]), tmp_path / "bundle", dense_bits=4)
    manifest = open_bundle(bundle).manifest
    dense = load_dense(open_bundle(bundle), verify=False)
    tokens = longest_pass(manifest.model, slots, CONTEXT)
    kept = dense_bytes(manifest, tokens, slots, CONTEXT)
    rows = np.random.default_rng(0).standard_normal((tokens, manifest.model.hidden_size), np.float32)
    counted = LiveBytes()
    with counted:
        found = dense_on(torch.device("cpu"), manifest.model, dense, slots, CONTEXT, kept)
        held = counted.now
        each = np.arange(tokens // slots, dtype=np.int32)
        longest = TokenPlaces(np.repeat(np.arange(slots, dtype=np.int32), len(each)), np.tile(each, slots))
        single = TokenPlaces(np.arange(slots, dtype=np.int32)[::-1].copy(), np.arange(slots, dtype=np.int32) + 40)
        for places in (longest, single):
            count = len(places.slots)
            for at, block in enumerate(found.part.blocks):
                block(rows[:count], places, found.kv.keys[at], found.kv.values[at])
        found.part.head(rows)
    assert 0 < held < counted.most and kept / 4 < counted.most <= kept - shared_bytes(manifest)


def test_what_an_earlier_sequence_left_is_never_read(bundle: Path, device: torch.device) -> None:
    """A slot whose cache holds something that is no number, from its fifth position on."""
    with load(bundle, **on(device, slots=2)) as engine:
        expected = [engine.logits(TOKENS[:20])[-1], engine.logits(TOKENS[30:35])[-1]]
        used = engine.model.accelerator
        assert used is not None and used.dense is not None
        for array in (*used.dense.kv.keys, *used.dense.kv.values):
            array[1, :, 5:] = torch.nan
        for slot, text in ((0, TOKENS[:19]), (1, TOKENS[30:34])):
            engine.step(text, [slot] * len(text), range(len(text)))
        for order in ([0, 1], [1, 0]):
            tokens, positions = [TOKENS[19], TOKENS[34]], [19, 4]
            found = engine.decode([tokens[at] for at in order], order, [positions[at] for at in order])
            for row, at in zip(found, order, strict=True):
                assert np.abs(row - expected[at]).max() <= 2e-5 * np.abs(expected[at]).max()


def test_many_prompts_and_little_models_decode_there(bundle: Path, device: torch.device) -> None:
    prompts = [TOKENS[:7], TOKENS[7:20], TOKENS[20:22], TOKENS[22:40]]
    for modes in ({}, {"lossy": "big-little gamma=0.5,k=1"}):
        with load(bundle, context=CONTEXT, slots=3, **modes) as engine:
            expected = generate_many(engine, prompts, [[]] * 4, [6] * 4)
        with load(bundle, **on(device, slots=3, **modes)) as engine:
            assert generate_many(engine, prompts, [[]] * 4, [6] * 4) == expected
            assert engine.mode_counts is None or engine.mode_counts.fallback_tokens > 0


def test_a_closed_engine_holds_nothing_there(bundle: Path) -> None:
    engine = load(bundle, **on(torch.device("cpu")))
    used = engine.model.accelerator
    assert used is not None and used.dense is not None
    assert used.to_plain()["used_bytes"] == used.device.used_bytes + used.dense.size_bytes
    parts = [weakref.ref(part) for part in (used.dense.kv, used.dense.part.head)]
    engine.close()
    gc.collect()
    assert [part() for part in parts] == [None, None] and engine.kv is not None


def test_a_context_of_one_position_has_nothing_to_measure(bundle: Path) -> None:
    for place, is_there in (("auto", False), ("device", True)):
        with load(bundle, **on(torch.device("cpu"), context=1, accelerator_dense=place)) as engine:
            assert dense_on_device(engine) == is_there and engine.logits(TOKENS[:1]).shape[0] == 1


def test_a_device_that_is_full_after_all_keeps_experts_alone(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("out of memory.\nMore lines.")

    monkeypatch.setattr("moec.runtime.accelerator.torch_dense.dense_on", full)
    with load(bundle, **on(torch.device("cpu"), accelerator_dense="auto")) as engine:
        assert not dense_on_device(engine)
    with pytest.raises(AcceleratorUnavailable, match=r"does not give the .* of its budget: out of memory"):
        load(bundle, **on(torch.device("cpu")))
