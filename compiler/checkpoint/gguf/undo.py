"""Undo what llama.cpp's converter does to the values of tensors.

Functions take the settings of the folder and the tensors of the file, and return a tensor of the folder.
Source: llama.cpp, conversion. The heads of a delta rule have K key heads; R value heads share one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
Undo = Callable[..., Tensor]
"""(settings, one or more tensors) -> tensor."""


def unpermuted(heads_key: str) -> Undo:
    """Return what undoes the order of rows for the older rotary embedding: pairs in adjacent rows."""

    def undo(config: Config, weight: Tensor) -> Tensor:
        rows = weight.view(int(config[heads_key]), -1, 2, *weight.shape[1:])
        return rows.swapaxes(1, 2).reshape(weight.shape)

    return undo


def with_middle_axis(config: Config, weight: Tensor) -> Tensor:
    """Return kernels of a convolution [D, taps] as [D, 1, taps]."""
    return weight.unsqueeze(1)


def as_row(config: Config, weight: Tensor) -> Tensor:
    """Return a vector as a matrix of one row."""
    return weight.reshape(1, -1)


def as_one(config: Config, *weights: Tensor) -> Tensor:
    """Return matrices as one, their rows one after the other."""
    return torch.cat(weights)


def alternating(config: Config, gate: Tensor, up: Tensor) -> Tensor:
    """Return numbers of gate and up [E, width] in turn, [E, 2 width]."""
    return torch.stack([gate, up], -1).flatten(-2)


def less_one(config: Config, weight: Tensor) -> Tensor:
    """Return the weight of a norm that is stored plus one."""
    return weight - 1


def log_rates(config: Config, weight: Tensor) -> Tensor:
    """Return the logarithms of rates that are stored negative."""
    return (-weight).log()


def latent_up(config: Config, keys: Tensor, values: Tensor) -> Tensor:
    """Return what expands the shared vector, [H (plain + value), rank].

    keys: [H, rank, plain].
    values: [H, value, rank].
    """
    return torch.cat([keys.swapaxes(1, 2), values], 1).flatten(0, 1)


def by_key_head(config: Config, query_key_value: Tensor, gate: Tensor) -> Tensor:
    """Return rows of a delta rule so that each key head has its queries, keys, values and gates together."""
    heads = int(config["linear_num_key_heads"])
    keys = heads * int(config["linear_key_head_dim"])
    query, key, value = query_key_value.tensor_split((keys, 2 * keys))
    parts = [part.view(heads, -1, part.shape[1]) for part in (query, key, value, gate)]
    return torch.cat(parts, 1).flatten(0, 1)


def grouped_rows(config: Config, weight: Tensor) -> Tensor:
    """Return rows of value heads in the order [K, R], which the file has as [R, K]."""
    heads, shared = int(config["linear_num_key_heads"]), _shared(config)
    return weight.reshape(shared, heads, -1, *weight.shape[1:]).swapaxes(0, 1).reshape(weight.shape)


def grouped_columns(config: Config, weight: Tensor) -> Tensor:
    """Return columns of value heads in the order of `grouped_rows`."""
    return grouped_rows(config, weight.T).T


def grouped_values(config: Config, weight: Tensor) -> Tensor:
    """Return rows of queries, keys and values, the values in the order of `grouped_rows`."""
    keys = 2 * int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"])
    return torch.cat([weight[:keys], grouped_rows(config, weight[keys:])])


def in_turn(*steps: Undo) -> Undo:
    """Return what undoes one change after the other."""

    def undo(config: Config, weight: Tensor) -> Tensor:
        for step in steps:
            weight = step(config, weight)
        return weight

    return undo


def _shared(config: Config) -> int:
    return int(config["linear_num_value_heads"]) // int(config["linear_num_key_heads"])
