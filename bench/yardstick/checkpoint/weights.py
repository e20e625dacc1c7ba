"""The weights of the yardstick. Each tensor follows from a seed and its name, so any of them can be made alone.

Plain random weights route at random: every expert is equally popular, and neighbouring tokens share nothing. Four
choices make the routing similar to that of a trained model, as far as a cache can see it (measured by routing.py):

* All embeddings share a direction u, and routers see a little of it. So some experts are popular.
* Queries and keys map u to one vector, which the rotary embedding turns. So attention falls with distance. The first
  layer then adds a common part of the last few tokens. So neighbouring tokens share experts.
* The outputs of later layers are small. So the next router can be called early.
* Apart from that, routers, norms and projections are independent normal numbers.

Shapes: D hidden, F expert width, E experts, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """The sizes of OLMoE-1B-7B: 6.9 billion weights, 13.8 GB in bfloat16."""

    hidden: int = 2048
    layers: int = 16
    heads: int = 16
    experts: int = 64
    top_k: int = 8
    width: int = 1024
    vocabulary: int = 50_304
    context: int = 4096
    theta: float = 10_000.0
    seed: int = 20_261

    @property
    def deviation(self) -> float:
        """Standard deviation of the weights that keep the length of an input of size D."""
        return float(self.hidden**-0.5)


@dataclass(frozen=True)
class Routing:
    """The choices.

    shared: share of u in the squared length of an embedding.
    seen: share of the length of u in routers.
    attended: length of u in queries and keys before norms.

    sharpness: sharpness of attention.
    first, later, experts: length of the output of the first attention, of a later one and of the experts of a layer,
        relative to an embedding.
    """

    shared: float = 0.6
    seen: float = 1.0
    attended: float = 2.5
    sharpness: float = 6.0
    first: float = 2.5
    later: float = 0.5
    experts: float = 0.25


class Weights:
    """Makes the tensors of one shape, under the names of an OLMoE checkpoint."""

    def __init__(self, shape: Shape | None = None, routing: Routing | None = None) -> None:
        self.shape, self.routing = shape or Shape(), routing or Routing()
        self._direction = self._normal("direction", (self.shape.hidden,))
        self._direction *= self.shape.hidden**0.5 / self._direction.norm()

    def _normal(self, name: str, size: tuple[int, ...]) -> Tensor:
        """Return standard normal numbers. Equal names give equal numbers."""
        digest = hashlib.sha256(f"{self.shape.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return torch.randn(size, generator=generator)

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors, layer by layer."""
        yield "model.embed_tokens.weight"
        for layer in range(self.shape.layers):
            yield from self.layer_names(layer)
        yield "model.norm.weight"
        yield "lm_head.weight"

    def layer_names(self, layer: int) -> Iterator[str]:
        """Yield the names of the tensors of one layer, experts last."""
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
            yield f"{prefix}{name}.weight"
        for name in ("q", "k", "v", "o"):
            yield f"{prefix}self_attn.{name}_proj.weight"
        yield f"{prefix}mlp.gate.weight"
        for expert in range(self.shape.experts):
            for name in ("gate", "up", "down"):
                yield f"{prefix}mlp.experts.{expert}.{name}_proj.weight"

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, float32."""
        shape, routing = self.shape, self.routing
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if "norm" in projection:
            scale = routing.sharpness**0.5 if projection in ("q_norm", "k_norm") else 1.0
            return torch.full((shape.hidden,), scale)
        if projection == "embed_tokens":
            unshared, seen = float((1 - routing.shared) ** 0.5), float(routing.shared**0.5)
            return self._normal(name, (shape.vocabulary, shape.hidden)) * unshared + self._direction * seen
        if projection == "lm_head":
            return self._normal(name, (shape.vocabulary, shape.hidden)) * shape.deviation
        if ".experts." in name:
            return self._expert(name, projection)
        if projection == "gate":
            router = self._normal(name, (shape.experts, shape.hidden)) * shape.deviation
            return router - (1 - routing.seen) * self._along(router)
        square = self._normal(name, (shape.hidden, shape.hidden)) * shape.deviation
        if projection in ("q_proj", "k_proj"):
            gain = routing.attended / shape.hidden
            target = self._normal(name.replace(projection, "shared"), (shape.hidden,))
            return square - self._along(square) + torch.outer(target, self._direction) * gain
        if projection == "v_proj":
            return square - self._along(square)
        return square * (routing.first if ".layers.0." in name else routing.later)

    def _along(self, matrix: Tensor) -> Tensor:
        """Return the part of a matrix [N, D] that reads the shared direction."""
        return torch.outer(matrix @ self._direction, self._direction) / self.shape.hidden

    def _expert(self, name: str, projection: str) -> Tensor:
        shape = self.shape
        if projection == "down_proj":
            # silu(a) b of two standard normal numbers has a mean square of about 0.36. Eight outputs, weighted by a
            # softmax over 64 such logits that is not renormalised, sum to about 0.13 of the length of one output.
            scale = self.routing.experts / 0.13 / float((0.36 * shape.width) ** 0.5)
            return self._normal(name, (shape.hidden, shape.width)) * scale
        return self._normal(name, (shape.width, shape.hidden)) * shape.deviation
