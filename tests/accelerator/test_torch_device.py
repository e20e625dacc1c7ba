"""Experts on a torch device: weights and activations bit for bit, products against the numpy kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moec.manifests.quant import QuantSpec
from moec.runtime import kernels
from moec.runtime.accelerator.device import COPY_SLOTS
from moec.runtime.accelerator.image import expert_bytes
from moec.runtime.accelerator.torch_weights import round_activations, unpack
from moec.runtime.kernels import packed_matrix, reference
from tests.accelerator.experts import RANKS, TOKENS, computed_by, computed_by_numpy, launched_together, opened
from tests.kernels.packer import FORMATS, bits, random_matrix
from tests.kernels.products import EXPERTS, biases_of, by_bits, expert_of, inputs


@by_bits(FORMATS)
@pytest.mark.parametrize("rows", [1, 16, 33])
def test_every_format_unpacks_to_the_bits_of_the_reference(
    device: torch.device, specs: list[QuantSpec], rows: int
) -> None:
    for spec in specs:
        columns = 384
        data = random_matrix(rows, columns, spec).data
        found = unpack(torch.from_numpy(data).to(device), rows, columns, spec)
        assert found.device.type == device.type and found.dtype == torch.float32
        assert np.array_equal(bits(found.cpu().numpy()), bits(packed_matrix.unpack(data, rows, columns, spec)))


@pytest.mark.parametrize("text", ["q1", "q1.6s", "q2g64", "q3g32s", "q4g128", "q5g32", "q6g64s", "q8", "bf16"])
def test_any_bytes_unpack_as_in_the_reference(device: torch.device, text: str) -> None:
    """Random codes and scales, those that are no numbers left out: what a file can hold, not what quantizers write."""
    spec, rows, columns = QuantSpec.parse(text), 32, 256
    data = np.random.default_rng(5).integers(0, 256, spec.packed_bytes(rows, columns)).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        expected = packed_matrix.unpack(data, rows, columns, spec)
    found = unpack(torch.from_numpy(data).to(device), rows, columns, spec).cpu().numpy()
    is_number = np.isfinite(expected)
    assert is_number.any()
    assert np.array_equal(found[is_number], expected[is_number])


def test_a_matrix_of_another_size_is_refused(device: torch.device) -> None:
    spec = QuantSpec.parse("q4g32")
    data = torch.zeros(spec.packed_bytes(16, 64) + 1, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="expected 640 bytes, found 641"):
        unpack(data, 16, 64, spec)


def test_activations_are_rounded_as_by_the_kernels(device: torch.device) -> None:
    x = np.random.default_rng(2).standard_normal((7, 256)).astype(np.float32)
    x[1] *= np.geomspace(1e-30, 1e30, 256, dtype=np.float32)
    x[2, :32], x[3], x[4, 40] = 0, np.float32(1e-40), np.inf
    x[5, 100] = np.nan
    x[6] = np.repeat(np.arange(8, dtype=np.float32), 32) + np.tile(np.arange(32, dtype=np.float32) / 254, 8)
    with np.errstate(invalid="ignore"):
        expected = reference.round_activations(x)
    found = round_activations(torch.from_numpy(x).to(device)).cpu().numpy()
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.isnan(found[4, 32:64]).all() and not np.isnan(found[4, 64:]).any()


UNIFORM = [
    (96, 64, (text,) * 3)
    for text in ("q1g32", "q2g32", "q3g32", "q4g32", "q4g32s", "q5g32", "q6s", "q8", "mxfp4", "bf16", "fp16")
] + [(128, 64, ("q1.6s",) * 3)]


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "copied"])
@pytest.mark.parametrize(("width", "hidden", "texts"), [*UNIFORM, *EXPERTS], ids=str)
@pytest.mark.parametrize("activation", ["silu", "relu", "clamped_swiglu"])
def test_an_expert_computes_what_numpy_computes(
    device: torch.device, width: int, hidden: int, texts: tuple[str, str, str], activation: str, is_kept: bool
) -> None:
    options: dict[str, Any] = {"activation": activation}
    if activation == "clamped_swiglu":
        options |= {"limit": 1.5, "biases": biases_of(width, hidden)}
    expert, _ = expert_of(width, hidden, texts, **options)
    x = inputs(9, hidden)
    expected, tolerance = computed_by_numpy(expert, x)
    found = computed_by(opened(device, [expert], 1), expert, x, is_kept)
    assert np.abs(expected).max() > 0
    assert np.abs(found - expected).max() <= tolerance
    untouched = np.ones((9, 2), bool)
    untouched[TOKENS, RANKS] = False
    assert (found[untouched] == 0).all()


@pytest.mark.parametrize("texts", [texts for _, _, texts in UNIFORM[:-1]], ids=str)
def test_single_tokens_of_experts_of_one_form(device: torch.device, texts: tuple[str, str, str]) -> None:
    """Each result comes from the bytes of its expert and the row of its token."""
    x = inputs(9, 64)
    first, _ = expert_of(96, 64, texts)
    experts = [first, kernels.Expert(first.up, first.gate, first.down)]
    chosen, parts = opened(device, experts, 1), np.zeros((9, 2, 64), np.float32)
    on_device = [chosen.keep(experts[0]), chosen.copy(experts[1])]
    chosen.begin(x)
    for token, rank in zip(TOKENS, RANKS, strict=True):
        chosen.run(on_device[rank], np.array([token], np.int32), np.array([rank], np.int32))
    chosen.collect(parts)
    for rank, expert in enumerate(experts):
        expected, tolerance = computed_by_numpy(expert, x)
        for token, column in zip(TOKENS, RANKS, strict=True):
            if column == rank:
                assert np.abs(parts[token, rank] - expected[token, rank]).max() <= tolerance


def test_copies_take_turns_in_their_slots(device: torch.device) -> None:
    """More experts than slots, in one layer; each result is that of the expert alone."""
    experts = [expert_of(96, 64, (text,) * 3)[0] for text in ("q2g32", "q4g32", "q8", "bf16", "q3g32", "fp16")]
    x, chosen = inputs(9, 64), opened(device, experts, 0)
    alone = [computed_by(chosen, expert, x, is_kept=False) for expert in experts]
    together = launched_together(chosen, experts, x)
    for rank, single in enumerate(alone):
        assert np.array_equal(together[TOKENS, rank], single[TOKENS, RANKS])


def test_host_bytes_may_go_once_a_copy_has_begun(device: torch.device) -> None:
    expert, _ = expert_of(96, 64, ("q4g32",) * 3)
    own = [
        kernels.PackedMatrix(m.data.copy(), m.rows, m.columns, m.spec)
        for m in (expert.gate, expert.up, expert.down)
        if m
    ]
    moved = kernels.Expert(*own)
    x, chosen = inputs(9, 64), opened(device, [expert], 0)
    expected = computed_by(chosen, expert, x, is_kept=False)
    parts = np.zeros((9, 2, 64), np.float32)
    chosen.begin(x)
    copied = chosen.copy(moved)
    for matrix in own:
        matrix.data[:] = 255
    chosen.run(copied, TOKENS, RANKS)
    chosen.collect(parts)
    assert np.array_equal(parts, expected)


def test_results_of_a_layer_that_was_given_up_are_dropped(device: torch.device) -> None:
    expert, _ = expert_of(96, 64, ("q4g32",) * 3)
    x, chosen = inputs(9, 64), opened(device, [expert], 1)
    kept = chosen.keep(expert)
    chosen.begin(x)
    chosen.run(kept, TOKENS, RANKS)
    chosen.begin(x)
    parts = np.zeros((9, 2, 64), np.float32)
    chosen.collect(parts)
    assert not parts.any()


def test_memory_is_what_was_asked_for(device: torch.device) -> None:
    expert, _ = expert_of(96, 64, ("q4g32",) * 3)
    chosen = opened(device, [expert], 1)
    assert chosen.used_bytes >= (1 + COPY_SLOTS) * expert_bytes(expert)
    chosen.keep(expert)
    with pytest.raises(ValueError, match="target"):
        chosen.keep(expert)
    chosen.close()
