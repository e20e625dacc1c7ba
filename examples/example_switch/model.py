"""A Switch Transformer for training on two cores.

It has the weights and the results of the module in transformers, and takes less time.
Shapes: B items, S tokens of a prompt, T tokens of an answer, N places, D hidden, F width, E experts, H heads,
V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from example_model.model import LEAST_SHARE, Permute
from torch import Tensor, nn
from torch.nn import functional

Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [B, H, S, head size] of each layer of the decoder, made from the states of the encoder."""

# Switch Transformers do not scale attention scores. Training scales them by about 1 / sqrt(head size), so that one
# learning rate suits all matrices. The scale is a power of two, so multiplying query weights by it is exact.
SCORE_SCALE = 0.25
# The spread of channels, which is 0.9 in the first example. With 0.9, rounding experts to two bits loses 0.3 % of
# Rouge-2; with 1.3 it loses 79 %.
CHANNEL_SPREAD = 1.1
HIDDEN = -1e30


@dataclass(frozen=True)
class SwitchShape:
    """The sizes of the second example. A layer routes to one expert per token.

    encoder_step, decoder_step: distance of the layers that route. Four in the decoder have pairs of layers between
    them, which a dictionary of activation paths is made of.
    """

    vocabulary: int = 1_536
    hidden: int = 256
    layers: int = 4
    encoder_step: int = 2
    decoder_step: int = 1
    heads: int = 6
    head_size: int = 32
    experts: int = 8
    width: int = 128
    capacity: int = 64
    epsilon: float = 1e-6
    buckets: int = 32
    furthest: int = 128
    context: int = 512


def distance_buckets(length: int, buckets: int, furthest: int, both_ways: bool) -> Tensor:
    """Return the bucket of each pair of positions (query, key), int64 [length, length].

    Half of the buckets of a direction are single distances. The others grow logarithmically up to `furthest`.
    Source: T5, section 2.1; transformers, models/switch_transformers.
    """
    ahead = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    side = torch.zeros_like(ahead)
    if both_ways:
        buckets //= 2
        side = (ahead > 0) * buckets
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    exact = buckets // 2
    ratio = (distance.clamp(min=1).float() / exact).log() / math.log(furthest / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return side + torch.where(distance < exact, distance, far)


class FeedForward(nn.Module):
    """The plain layer: two projections and ReLU."""

    def __init__(self, shape: SwitchShape) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(shape.width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.hidden, shape.width))

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and zero as load balancing loss. x: [N, D] -> [N, D]."""
        return (x @ self.up.T).relu() @ self.down.T, x.new_zeros(())


class SwitchExperts(nn.Module):
    """Router and experts of one layer. Every token goes to one expert, weighted by its probability."""

    def __init__(self, shape: SwitchShape) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.up = nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output, and the load balancing loss.

        x: [N, D] -> [N, D].
        real: places that are not padding and count in the loss, [N].
        """
        experts = len(self.router)
        probabilities = (x @ self.router.T).softmax(-1)
        weight, chosen = probabilities.max(-1)
        order = chosen.argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        counts = torch.bincount(chosen, minlength=experts)
        rows: Tensor = Permute.apply(x, order, place)  # type: ignore[no-untyped-call]
        pieces = torch.split_with_sizes(rows, counts.tolist())
        outputs = [
            (piece @ up.T).relu() @ down.T
            for piece, up, down in zip(pieces, self.up.unbind(), self.down.unbind(), strict=True)
        ]
        back: Tensor = Permute.apply(torch.cat(outputs), place, order)  # type: ignore[no-untyped-call]
        if real is not None:
            probabilities, counts = probabilities[real], torch.bincount(chosen[real], minlength=experts)
        balance = experts * (counts / len(probabilities) * probabilities.mean(0)).sum()
        return back * weight.unsqueeze(-1), balance


class Attention(nn.Module):
    """Attention with a bias that is added to the scores."""

    def __init__(self, shape: SwitchShape) -> None:
        super().__init__()
        self.heads, self.head_size = shape.heads, shape.head_size
        inner = shape.heads * shape.head_size
        self.query = nn.Parameter(torch.empty(inner, shape.hidden))
        self.key_value = nn.Parameter(torch.empty(2 * inner, shape.hidden))
        self.out = nn.Parameter(torch.empty(shape.hidden, inner))

    def split(self, x: Tensor) -> Tensor:
        """Split the heads: [B, T, H * head size] -> [B, H, T, head size]."""
        return x.view(*x.shape[:2], -1, self.head_size).transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, H, T, head size] of x [B, T, D]."""
        key, value = (x @ self.key_value.T).chunk(2, dim=-1)
        return self.split(key), self.split(value)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        """Return the output of attention. x: [B, T, D] -> [B, T, D]; bias: added to the scores [B, H, T, keys]."""
        scores = self.split(x @ self.query.T) @ key.transpose(2, 3) * SCORE_SCALE + bias
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(*x.shape[:2], -1)
        return mixed @ self.out.T


class Block(nn.Module):
    """One layer of the encoder or of the decoder. A layer of the decoder also attends to the encoder."""

    def __init__(self, shape: SwitchShape, index: int, is_decoder: bool) -> None:
        super().__init__()
        self.epsilon = shape.epsilon
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        self.attention = Attention(shape)
        if is_decoder:
            self.cross_norm = nn.Parameter(torch.ones(shape.hidden))
            self.cross = Attention(shape)
        self.feed_norm = nn.Parameter(torch.ones(shape.hidden))
        step = shape.decoder_step if is_decoder else shape.encoder_step
        is_routed = step == 1 or index % step == 1
        self.feed: SwitchExperts | FeedForward = SwitchExperts(shape) if is_routed else FeedForward(shape)

    @torch.no_grad()
    def spread_channels(self, generator: torch.Generator) -> None:
        """Start routed layers with channels of unequal size, as the first example does (``Layer.spread_channels``)."""
        if isinstance(self.feed, FeedForward):
            return
        gain = torch.exp(CHANNEL_SPREAD * torch.randn(self.feed_norm.shape, generator=generator))
        gain /= gain.square().mean().sqrt()
        self.feed_norm.copy_(gain)
        self.feed.router.div_(gain)
        experts = len(self.feed.router)
        shares = torch.linspace(LEAST_SHARE, 1, experts)[torch.randperm(experts, generator=generator)]
        self.feed.up.div_(gain ** shares[:, None, None])

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x divided by its root mean square, times `weight`."""
        return functional.rms_norm(x, (x.shape[-1],), weight, self.epsilon)

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return x [B, T, D] plus its attention over its own tokens."""
        states = self.normed(x, self.norm)
        return x + self.attention(states, *self.attention.keys_values(states), bias)

    def look(self, x: Tensor, memory: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        """Return x [B, T, D] plus its attention over the encoder."""
        return x + self.cross(self.normed(x, self.cross_norm), *memory, bias)

    def think(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x [..., D] plus its feed-forward output, and the load balancing loss."""
        states, balance = self.feed(self.normed(x, self.feed_norm).view(-1, x.shape[-1]), real)
        return x + states.view_as(x), balance


class Stack(nn.Module):
    """Encoder or decoder: its layers, and the table of biases by distance that they share."""

    def __init__(self, shape: SwitchShape, is_decoder: bool) -> None:
        super().__init__()
        self.distance = nn.Parameter(torch.empty(shape.buckets, shape.heads))
        self.blocks = [Block(shape, index, is_decoder) for index in range(shape.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.Parameter(torch.ones(shape.hidden))
        buckets = distance_buckets(shape.context, shape.buckets, shape.furthest, not is_decoder)
        self.register_buffer("buckets", buckets, persistent=False)

    def bias(self, length: int) -> Tensor:
        """Return the biases of the scores by distance, [1, H, length, length]."""
        return functional.embedding(self.get_buffer("buckets")[:length, :length], self.distance).permute(2, 0, 1)[None]


class SwitchModel(nn.Module):
    """The whole model. ``forward`` is for training; decoding calls ``encode`` and ``decode``."""

    def __init__(self, shape: SwitchShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Parameter(torch.empty(shape.vocabulary, shape.hidden))
        self.encoder = Stack(shape, is_decoder=False)
        self.decoder = Stack(shape, is_decoder=True)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights.

        The outputs of all layers start at zero, except for the attention over the encoder. Its values and its output
        are an orthogonal matrix and its transpose. A token that is attended to is therefore likelier to be written
        from the first step on. The embeddings are small, and the logits are divided by the root of D. The gain of the
        last norm compensates for it.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("out", "down")):
                nn.init.zeros_(parameter)
            elif name.endswith("distance"):
                nn.init.normal_(parameter, generator=generator)
            elif "norm" not in name:
                scale = 0.02 if "router" in name else 0.0625
                nn.init.normal_(parameter, std=scale, generator=generator)
        for block in self.decoder.blocks:
            inner = self.shape.heads * self.shape.head_size
            passing = torch.linalg.qr(torch.randn(self.shape.hidden, inner, generator=generator)).Q
            block.cross.key_value[inner:] = passing.T
            block.cross.out.copy_(0.0625 * passing)
        for block in (*self.encoder.blocks, *self.decoder.blocks):
            block.spread_channels(generator)
        self.decoder.norm.fill_(math.sqrt(self.shape.hidden))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x divided by its root mean square, times `weight`."""
        return functional.rms_norm(x, (x.shape[-1],), weight, self.shape.epsilon)

    def encode(self, tokens: Tensor, is_real: Tensor) -> tuple[Memory, Tensor, Tensor]:
        """Return keys and values for the decoder, the bias of their padding [B, 1, 1, S], and the load balancing loss.

        tokens: prompts [B, S], padded on the right.
        is_real: places that are not padding, bool [B, S].
        """
        hidden = torch.zeros(is_real.shape).masked_fill_(~is_real, HIDDEN)[:, None, None]
        bias = self.encoder.bias(tokens.shape[1]) + hidden
        x, real, balances = functional.embedding(tokens, self.embed), is_real.flatten(), []
        for block in self.encoder.blocks:
            x, balance = block.think(block.attend(x, bias), real)
            balances.append(balance)
        states = self.normed(x, self.encoder.norm)
        memory = [block.cross.keys_values(states) for block in self.decoder.blocks]
        return memory, hidden, torch.stack(balances).sum()

    def decode(self, tokens: Tensor, memory: Memory, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] of the wanted places, and the load balancing loss.

        tokens: answers so far, [B, T].
        memory, hidden: results of `encode`.
        wanted: places in the flat batch, [N].
        """
        length = tokens.shape[1]
        bias = self.decoder.bias(length) + torch.full((length, length), HIDDEN).triu(1)
        x, balances = functional.embedding(tokens, self.embed), []
        for block, seen in zip(self.decoder.blocks, memory, strict=True):
            x, balance = block.think(block.look(block.attend(x, bias), seen, hidden), wanted)
            balances.append(balance)
        states = self.normed(x.view(-1, x.shape[-1])[wanted], self.decoder.norm)
        return states * self.shape.hidden**-0.5 @ self.embed.T, torch.stack(balances).sum()

    def forward(self, prompts: Tensor, is_real: Tensor, answers: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, V] of the wanted places, and the mean load balancing loss.

        prompts: [B, S]; is_real: their places that are not padding.
        answers: [B, T]; wanted: places in the flat batch, [N].
        """
        memory, hidden, encoder_balance = self.encode(prompts, is_real)
        logits, balance = self.decode(answers, memory, hidden, wanted)
        return logits, (encoder_balance + balance) / len(self.routed_layers())

    def routed_layers(self) -> list[SwitchExperts]:
        """Return the layers that hold experts, those of the encoder first."""
        blocks = (*self.encoder.blocks, *self.decoder.blocks)
        return [block.feed for block in blocks if isinstance(block.feed, SwitchExperts)]

    def to_disk(self) -> dict[str, Tensor]:
        """Return the weights under the names of a Switch Transformer on disk, not yet multiplied by `query_scale`."""
        tensors: dict[str, Tensor] = {"shared.weight": self.embed}
        for kind, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            tensors[f"{kind}.final_layer_norm.weight"] = stack.norm
            first = f"{kind}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            tensors[first] = stack.distance
            for index, block in enumerate(stack.blocks):
                tensors |= _block_to_disk(f"{kind}.block.{index}.layer.", block, kind == "decoder")
        return tensors

    @torch.no_grad()
    def from_disk(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the weights of a checkpoint on disk into the model."""
        for name, view in self.to_disk().items():
            view.copy_(tensors[name] / query_scale(name))


def query_scale(name: str) -> float:
    """Return the factor of a tensor when it is written to disk."""
    return SCORE_SCALE if name.endswith("Attention.q.weight") else 1.0


def _block_to_disk(prefix: str, block: Block, is_decoder: bool) -> dict[str, Tensor]:
    tensors = {f"{prefix}0.layer_norm.weight": block.norm}
    attentions = {f"{prefix}0.SelfAttention.": block.attention}
    feed = f"{prefix}{2 if is_decoder else 1}."
    if is_decoder:
        tensors[f"{prefix}1.layer_norm.weight"] = block.cross_norm
        attentions[f"{prefix}1.EncDecAttention."] = block.cross
    for inner, attention in attentions.items():
        key, value = attention.key_value.chunk(2)
        parts = {"q": attention.query, "k": key, "v": value, "o": attention.out}
        tensors |= {f"{inner}{letter}.weight": part for letter, part in parts.items()}
    tensors[f"{feed}layer_norm.weight"] = block.feed_norm
    if isinstance(block.feed, FeedForward):
        return tensors | {f"{feed}mlp.wi.weight": block.feed.up, f"{feed}mlp.wo.weight": block.feed.down}
    tensors[f"{feed}mlp.router.classifier.weight"] = block.feed.router
    for expert, (up, down) in enumerate(zip(block.feed.up, block.feed.down, strict=True)):
        inner = f"{feed}mlp.experts.expert_{expert}."
        tensors |= {f"{inner}wi.weight": up, f"{inner}wo.weight": down}
    return tensors
