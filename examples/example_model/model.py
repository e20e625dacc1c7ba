"""A Mixtral for training on two cores.

It has the weights and the results of MixtralForCausalLM of transformers, and takes less time.
Shapes: B items, T tokens, D hidden, F expert width, E experts, K top-k, H heads, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Cache = list[tuple[Tensor, Tensor]]
# Initial gains of the experts' norm: standard deviation of their logarithm, and the least share of a gain that the
# columns of an expert compensate for. With 0.6 and 0, two bits rounded to nearest cost only 5 % after training.
CHANNEL_SPREAD, LEAST_SHARE = 0.9, 0.3


@dataclass(frozen=True)
class Shape:
    """The sizes of the example model."""

    vocabulary: int = 1_536
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    experts: int = 8
    top_k: int = 2
    width: int = 256
    epsilon: float = 1e-5
    theta: float = 10_000.0
    context: int = 512


class Gather(torch.autograd.Function):
    """Copy every token once for each of its experts, in the order of the experts. The backward pass is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        """Gather the rows of x.

        x: [T, D].
        order: pairs of token and rank, sorted by expert, [T*K].
        place: inverse of `order`, [T*K].
        k: experts of each token.
        """
        ctx.save_for_backward(place)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the gradients of the K copies."""
        (place,) = ctx.saved_tensors
        copies = grads[0].index_select(0, place)
        return copies.view(-1, ctx.k, copies.shape[-1]).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Bring rows into another order. The backward pass is a gather with the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        """Return rows in which row i is row ``there[i]`` of x. back: inverse of `there`."""
        ctx.save_for_backward(back)
        return x.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Undo the permutation."""
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class Experts(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.gate_up = nn.Parameter(torch.empty(shape.experts, 2 * shape.width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the probabilities of all experts [T, E], and weights and numbers of the chosen ones [T, K]."""
        probabilities = (x @ self.router.T).softmax(-1)
        weights, chosen = probabilities.topk(self.shape.top_k, dim=-1)
        return probabilities, weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the chosen experts, and the load balancing loss. x: [T, D] -> [T, D]."""
        experts, k = self.shape.experts, self.shape.top_k
        probabilities, weights, chosen = self.route(x)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        counts = torch.bincount(flat, minlength=experts)
        balance = experts * (counts / len(x) * probabilities.mean(0)).sum()
        outputs = []
        rows: Tensor = Gather.apply(x, order, place, k)  # type: ignore[no-untyped-call]
        pieces = torch.split_with_sizes(rows, counts.tolist())
        for piece, gate_up, down in zip(pieces, self.gate_up.unbind(), self.down.unbind(), strict=True):
            gate, up = (piece @ gate_up.T).chunk(2, dim=-1)
            outputs.append((functional.silu(gate) * up) @ down.T)
        back: Tensor = Permute.apply(torch.cat(outputs), place, order)  # type: ignore[no-untyped-call]
        return (back.view(len(x), k, -1) * weights.unsqueeze(-1)).sum(1), balance


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply the rotary position embedding, in which halves are paired. x: [..., T, head size]."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class Layer(nn.Module):
    """Attention, then experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        attended, shared = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Parameter(torch.empty(attended + 2 * shared, shape.hidden))
        self.out = nn.Parameter(torch.empty(shape.hidden, attended))
        self.experts_norm = nn.Parameter(torch.ones(shape.hidden))
        self.experts = Experts(shape)

    @torch.no_grad()
    def spread_channels(self, generator: torch.Generator) -> None:
        """Start with channels of unequal size, as large models have. Experts compensate for it unequally.

        The experts' norm multiplies channel j by a gain c_j, log-normal with mean square 1. Expert e divides the
        columns of gate and up by c_j ** m_e. Over the experts, in random order, m_e runs from LEAST_SHARE to 1. At
        m_e = 1 the results of an expert are those without gains, but its weights are harder to round.
        """
        gain = torch.exp(CHANNEL_SPREAD * torch.randn(self.shape.hidden, generator=generator))
        gain /= gain.square().mean().sqrt()
        self.experts_norm.copy_(gain)
        self.experts.router.div_(gain)
        order = torch.randperm(self.shape.experts, generator=generator)
        shares = torch.linspace(LEAST_SHARE, 1, self.shape.experts)
        for expert, share in zip(order.tolist(), shares.tolist(), strict=True):
            self.experts.gate_up[expert].div_(gain**share)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x divided by its root mean square, times `weight`."""
        return functional.rms_norm(x, (x.shape[-1],), weight, self.shape.epsilon)

    def attend(
        self, x: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor | None, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output of attention [B, T, D], and all keys and values so far. x: [B, T, D]."""
        shape = self.shape
        batch, length, _ = x.shape
        states = (self.norm(x, self.attention_norm) @ self.qkv.T).view(batch, length, -1, shape.head_size)
        parts = (shape.heads, shape.kv_heads, shape.kv_heads)
        query, key, value = torch.split_with_sizes(states.transpose(1, 2), parts, dim=1)
        query, key = rotate(query, *angles), rotate(key, *angles)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        groups = shape.heads // shape.kv_heads
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        return mixed.transpose(1, 2).reshape(batch, length, -1) @ self.out.T, (key, value)


class ExampleModel(nn.Module):
    """The whole model. ``forward`` is for training, ``step`` for decoding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden))
        self.blocks = [Layer(shape) for _ in range(shape.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        rates = shape.theta ** -(torch.arange(0, shape.head_size, 2).float() / shape.head_size)
        angles = torch.outer(torch.arange(shape.context).float(), rates).repeat(1, 2)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def initialise(self, generator: torch.Generator, has_spread_channels: bool = True) -> None:
        """Draw the weights. Attention and experts add nothing at first, because their output matrices start at zero.

        has_spread_channels: see `Layer.spread_channels`.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("out", "down")):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                scale = 0.02 if "router" in name else 0.0625
                nn.init.normal_(parameter, std=scale, generator=generator)
        for layer in self.blocks if has_spread_channels else ():
            layer.spread_channels(generator)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the positions."""
        cosine, sine = self.get_buffer("cosine"), self.get_buffer("sine")
        return cosine[positions], sine[positions]

    def forward(self, tokens: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] of the wanted places, and the mean load balancing loss of all layers.

        tokens: [B, T], padded on the right, where the causal mask hides the padding.
        wanted: places in the flat batch, [N]. The experts of the last layer see only these.
        """
        angles = self.angles(torch.arange(tokens.shape[1]))
        x = functional.embedding(tokens, self.embed)
        balances = []
        for index, layer in enumerate(self.blocks):
            x = x + layer.attend(x, angles, None, None)[0]
            flat = x.view(-1, x.shape[-1])
            if index == len(self.layers) - 1:
                flat = flat.index_select(0, wanted)
            mixed, balance = layer.experts(layer.norm(flat, layer.experts_norm))
            x = (flat + mixed).view(*x.shape) if index < len(self.layers) - 1 else flat + mixed
            balances.append(balance)
        normed = functional.rms_norm(x, (x.shape[-1],), self.norm, self.shape.epsilon)
        return normed @ self.embed.T, torch.stack(balances).mean()

    def step(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None) -> tuple[Tensor, Cache]:
        """Return the logits [B, V] of the last place, and the grown cache. tokens: [B, T], after those in the cache."""
        cosine, sine = self.angles(positions)
        angles = cosine.unsqueeze(1), sine.unsqueeze(1)
        x = functional.embedding(tokens, self.embed)
        grown: Cache = []
        for index, layer in enumerate(self.blocks):
            mixed, states = layer.attend(x, angles, mask, cache[index] if cache else None)
            grown.append(states)
            x = x + mixed
            flat = x.view(-1, x.shape[-1])
            x = x + layer.experts(layer.norm(flat, layer.experts_norm))[0].view(*x.shape)
        normed = functional.rms_norm(x[:, -1], (x.shape[-1],), self.norm, self.shape.epsilon)
        return normed @ self.embed.T, grown

    def to_disk(self) -> dict[str, Tensor]:
        """Return the weights under the names of a Mixtral checkpoint on disk."""
        shape = self.shape
        widths = (shape.heads * shape.head_size, shape.kv_heads * shape.head_size, shape.kv_heads * shape.head_size)
        tensors: dict[str, Tensor] = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.norm,
            "lm_head.weight": self.embed,
        }
        for index, layer in enumerate(self.blocks):
            prefix = f"model.layers.{index}."
            tensors[prefix + "input_layernorm.weight"] = layer.attention_norm
            tensors[prefix + "post_attention_layernorm.weight"] = layer.experts_norm
            for name, part in zip("qkv", torch.split_with_sizes(layer.qkv, widths), strict=True):
                tensors[f"{prefix}self_attn.{name}_proj.weight"] = part
            tensors[prefix + "self_attn.o_proj.weight"] = layer.out
            tensors[prefix + "block_sparse_moe.gate.weight"] = layer.experts.router
            for expert in range(shape.experts):
                inner = f"{prefix}block_sparse_moe.experts.{expert}."
                gate, up = layer.experts.gate_up[expert].chunk(2)
                tensors[inner + "w1.weight"], tensors[inner + "w3.weight"] = gate, up
                tensors[inner + "w2.weight"] = layer.experts.down[expert]
        return tensors

    @torch.no_grad()
    def from_disk(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights of a checkpoint on disk into the model."""
        for name, view in self.to_disk().items():
            view.copy_(tensors[name])
