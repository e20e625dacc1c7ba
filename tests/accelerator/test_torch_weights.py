"""Unpacking on a torch device gives the kernels' weights and activations bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moec.manifests.quant import QuantSpec
from moec.runtime.accelerator.torch_weights import round_activations, unpack
from moec.runtime.kernels import packed_matrix, reference
from tests.kernels.packer import FORMATS, bits, random_matrix
from tests.kernels.products import by_bits


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
