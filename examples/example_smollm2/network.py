"""The network in torch, dense or with experts. The experts are parts of one wide feed-forward network.

All experts are computed, and experts that are not chosen have a gate of 0. With small experts this is faster on a CPU
than products of every expert.
Shapes: B rows, T tokens of a row, D hidden, W width of the feed-forward network, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of the network.

    width: of the feed-forward network: of the shared expert and of all routed experts together.
    shared: width of the shared expert. Equal to `width` in a dense network.
    experts, top_k: routed experts of a layer, and those of a token. 0 in a dense network.
    """

    layers: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int
    theta: float
    epsilon: float
    shared: int
    experts: int = 0
    top_k: int = 0

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def expert_width(self) -> int:
        return (self.width - self.shared) // self.experts if self.experts else 0


class FeedForward(nn.Module):
    """A gated feed-forward network. Rows of gate and up, and columns of down: the shared expert's, then each expert's.

    A routed expert counts `top_k` times its routing weight, so an expert with a share of 1 / top_k counts once.
    The shared expert counts twice its gate, so an untrained gate of 0.5 counts once.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Parameter(torch.empty(shape.width, shape.hidden))
        self.up = nn.Parameter(torch.empty(shape.width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.hidden, shape.width))
        if shape.experts:
            self.router = nn.Parameter(torch.zeros(shape.experts, shape.hidden))
            self.shared_gate = nn.Parameter(torch.zeros(1, shape.hidden))

    def inner(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., W]: values before the last product."""
        return functional.silu(functional.linear(states, self.gate)) * functional.linear(states, self.up)

    def routing(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] -> weights of the chosen experts [..., K] in float32, which sum to 1, and their indices."""
        with torch.autocast("cpu", enabled=False):
            shares = functional.linear(states.float(), self.router).softmax(-1)
        best, chosen = shares.topk(self.shape.top_k, -1)
        return best / best.sum(-1, keepdim=True), chosen

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        inner = self.inner(states)
        if self.shape.experts:
            inner = inner * self._gates(states).to(inner.dtype)
        return functional.linear(inner, self.down)

    def _gates(self, states: Tensor) -> Tensor:
        """[..., D] -> factor of each inner value, [..., W]."""
        weights, chosen = self.routing(states)
        every = weights.new_zeros(*states.shape[:-1], self.shape.experts).scatter(-1, chosen, weights)
        routed = (every * self.shape.top_k).repeat_interleave(self.shape.expert_width, -1)
        shared = 2 * functional.linear(states, self.shared_gate).float().sigmoid()
        return torch.cat([shared.expand(*states.shape[:-1], self.shape.shared), routed], -1)


class Layer(nn.Module):
    """Attention and feed-forward network, each with a norm before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        key_values = shape.kv_heads * shape.head_size
        self.input_norm = nn.Parameter(torch.ones(shape.hidden))
        self.query = nn.Parameter(torch.empty(shape.hidden, shape.hidden))
        self.key = nn.Parameter(torch.empty(key_values, shape.hidden))
        self.value = nn.Parameter(torch.empty(key_values, shape.hidden))
        self.output = nn.Parameter(torch.empty(shape.hidden, shape.hidden))
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.feed_forward = FeedForward(shape)

    def forward(self, states: Tensor, turns: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        states = states + self.attention(normed(states, self.input_norm, self.shape.epsilon), turns)
        return states + self.feed_forward(normed(states, self.norm, self.shape.epsilon))

    def attention(self, states: Tensor, turns: Tensor) -> Tensor:
        """Causal attention, [B, T, D] -> [B, T, D]."""
        rows, tokens, _ = states.shape

        def heads(weight: Tensor) -> Tensor:
            return functional.linear(states, weight).view(rows, tokens, -1, self.shape.head_size).transpose(1, 2)

        query, key = rotated(heads(self.query), turns), rotated(heads(self.key), turns)
        mixed = functional.scaled_dot_product_attention(
            query, key, heads(self.value), is_causal=True, enable_gqa=self.shape.kv_heads != self.shape.heads
        )
        return functional.linear(mixed.transpose(1, 2).reshape(rows, tokens, -1), self.output)


class Network(nn.Module):
    """Embedding, layers and final norm. The embedding is the head as well."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [B, T] -> final states [B, T, D], before the head."""
        states = functional.embedding(tokens, self.embedding)
        turns = turns_of(tokens.shape[1], self.shape)
        for layer in self.layers:
            states = layer(states, turns)
        return normed(states, self.norm, self.shape.epsilon)

    def logits(self, states: Tensor) -> Tensor:
        """[N, D] -> [N, V]."""
        return functional.linear(states, self.embedding)


def normed(states: Tensor, gain: Tensor, epsilon: float) -> Tensor:
    """RMS norm in float32."""
    wide = states.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gain


def turns_of(tokens: int, shape: Shape) -> Tensor:
    """Return cosines and sines of the rotary embedding, [2, T, head size]."""
    speeds = shape.theta ** -(torch.arange(0, shape.head_size, 2).float() / shape.head_size)
    angles = torch.outer(torch.arange(tokens).float(), speeds).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotated(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, T, head size] by their positions."""
    first, second = heads.chunk(2, -1)
    return heads * turns[0].to(heads.dtype) + torch.cat([-second, first], -1) * turns[1].to(heads.dtype)
