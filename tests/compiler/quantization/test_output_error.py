"""The output error from second moments equals the squared error of the outputs."""

from __future__ import annotations

import pytest
import torch

from moec.compiler.quantization.unit_store import output_error, relative_output_error, row_errors


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 12, 32, generator=generator)
    changed = weights + 0.1 * torch.randn(3, 12, 32, generator=generator)
    inputs = torch.randn(3, 50, 32, generator=generator)
    shares = torch.rand(3, 50, 1, generator=generator)
    return weights, changed, inputs * shares


def test_it_is_the_error_of_the_outputs(case):
    weights, changed, inputs = case
    moments = inputs.transpose(1, 2) @ inputs
    outputs = (weights - changed) @ inputs.transpose(1, 2)
    torch.testing.assert_close(output_error(weights, changed, moments), outputs.square().sum((1, 2)), rtol=1e-4, atol=0)
    torch.testing.assert_close(row_errors(weights, changed, moments), outputs.square().sum(2), rtol=1e-4, atol=0)
    for at in range(3):
        single = output_error(weights[at], changed[at], moments[at])
        torch.testing.assert_close(single, output_error(weights, changed, moments)[at])
    relative = outputs.square().sum((1, 2)).sqrt() / (weights @ inputs.transpose(1, 2)).square().sum((1, 2)).sqrt()
    torch.testing.assert_close(relative_output_error(weights, changed, moments), relative, rtol=1e-4, atol=0)


def test_without_moments_it_is_the_weight_error(case):
    weights, changed, _ = case
    expected = (weights - changed).square().sum((1, 2))
    torch.testing.assert_close(output_error(weights, changed, None), expected)
    identity = torch.eye(32).expand(3, 32, 32)
    torch.testing.assert_close(output_error(weights, changed, identity), expected)


def test_nothing_changed_costs_nothing(case):
    weights, _, inputs = case
    moments = inputs.transpose(1, 2) @ inputs
    assert output_error(weights, weights, moments).tolist() == [0.0, 0.0, 0.0]
    zero = torch.zeros_like(weights)
    assert relative_output_error(zero, zero, moments).tolist() == [0.0, 0.0, 0.0]
    assert (row_errors(weights, weights * (1 + 1e-7), -moments * 1e-9) >= 0).all()
