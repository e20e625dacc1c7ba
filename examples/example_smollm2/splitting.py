"""Division of each feed-forward network into a shared expert and routed experts, and routers in closed form.

Shapes: T tokens, D hidden, W width, N inner values that are divided, E experts.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from example_smollm2.network import Layer, Network, Shape, normed, turns_of

_ROUNDS = 12
_RIDGE = 1e-2
_SLOPE_TOKENS = 2048
_SLOPES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)


@torch.no_grad()
def with_experts(dense: Network, tokens: Tensor, shared: int, experts: int, top_k: int, loss: float) -> Network:
    """Return the network with experts in place of each feed-forward network.

    tokens: calibration text, [B, T].
    shared: width of the shared expert. It takes the inner values that contribute most.
    loss: how much the error of a layer's output may grow, so that routing weights differ more.
    """
    shape = replace(dense.shape, shared=shared, experts=experts, top_k=top_k)
    network = Network(shape).requires_grad_(False)
    network.embedding, network.norm = dense.embedding, dense.norm
    for at, states in enumerate(_layer_inputs(dense, tokens)):
        own, layer = dense.layers[at], network.layers[at]
        for name in ("input_norm", "query", "key", "value", "output", "norm"):
            setattr(layer, name, getattr(own, name))
        _divide(own, layer, states.flatten(0, 1), shape, loss)
    return network


def _layer_inputs(network: Network, tokens: Tensor) -> Iterator[Tensor]:
    """Yield what the feed-forward network of each layer reads, [B, T, D]."""
    states = functional.embedding(tokens, network.embedding)
    turns = turns_of(tokens.shape[1], network.shape)
    for layer in network.layers:
        states = states + layer.attention(normed(states, layer.input_norm, network.shape.epsilon), turns)
        read = normed(states, layer.norm, network.shape.epsilon)
        yield read
        states = states + layer.feed_forward(read)


def _divide(own: Layer, layer: Layer, states: Tensor, shape: Shape, loss: float) -> None:
    """Fill the feed-forward network of a layer. states: what it reads, [T, D]."""
    dense, parts = own.feed_forward, layer.feed_forward
    sizes = dense.inner(states).abs() * dense.down.norm(dim=0)
    ranked = sizes.square().mean(0).argsort(descending=True)
    routed = ranked[shape.shared :]
    groups = balanced_groups(functional.normalize(sizes[:, routed].T, dim=1), shape.experts)
    order = torch.cat([ranked[: shape.shared], *(routed[groups == group] for group in range(shape.experts))])
    parts.gate.data, parts.up.data, parts.down.data = dense.gate[order], dense.up[order], dense.down[:, order]
    _fit_router(layer, states, loss)


def balanced_groups(rows: Tensor, groups: int) -> Tensor:
    """Divide unit rows [N, F] into groups of equal size whose rows resemble each other: the group of each row, [N].

    The rows are assigned in the order of how much more they resemble their best group than the mean group.
    """
    size = len(rows) // groups
    centres = rows[torch.linspace(0, len(rows) - 1, groups).long()]
    assigned = torch.zeros(len(rows), dtype=torch.long)
    for _ in range(_ROUNDS):
        likeness = rows @ centres.T
        gain = likeness.max(1).values - likeness.mean(1)
        room = [size] * groups
        preferences = likeness.argsort(1, descending=True).tolist()
        for row in gain.argsort(descending=True).tolist():
            group = next(group for group in preferences[row] if room[group])
            assigned[row] = group
            room[group] -= 1
        centres = functional.normalize(torch.stack([rows[assigned == group].mean(0) for group in range(groups)]), dim=1)
    return assigned


def _fit_router(layer: Layer, states: Tensor, loss: float) -> None:
    """Fit a router that prefers the experts with the largest outputs, by ridge regression.

    Its slope is the steepest one whose error is at most `loss` above that of equal weights.
    """
    parts, shape = layer.feed_forward, layer.shape
    inner = parts.inner(states)
    pieces = inner[:, shape.shared :].split(shape.expert_width, 1)
    columns = parts.down[:, shape.shared :].split(shape.expert_width, 1)
    norms = torch.stack([(p @ c.T).norm(dim=1) for p, c in zip(pieces, columns, strict=True)], 1)
    targets = norms.clamp(min=1e-6).log()
    targets = targets - targets.mean(1, keepdim=True)
    moments = states.T @ states
    damped = moments + _RIDGE * moments.diagonal().mean() * torch.eye(shape.hidden)
    router = torch.linalg.solve(damped, states.T @ targets).T
    few = slice(_SLOPE_TOKENS)
    wanted = inner[few] @ parts.down.T
    errors = []
    for slope in _SLOPES:
        parts.router.data = router * max(slope, 1e-3)
        errors.append((parts(states[few]) - wanted).square().mean().item())
    steepest = max(at for at, error in enumerate(errors) if error <= (1 + loss) * errors[0])
    parts.router.data = router * max(_SLOPES[steepest], 1e-3)
