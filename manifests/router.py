"""Routing: how tokens of a layer are assigned to experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .attention import MAX_POSITIONS, require
from .optional_fields import OPTIONAL

MAX_EXPERTS = 65535


@dataclass(frozen=True, slots=True)
class StaticRouting:
    """Experts that depend on the token alone.

    experts: top_k experts of each token id, best first; those of token t start at t * top_k.
    Source: Hash Layers For Large Sparse Models, section 3.
    """

    experts: tuple[int, ...]

    def check(self, count: int, top_k: int) -> None:
        """Raise ValueError unless this is a whole number of tokens, each with top_k different experts of `count`."""
        require(bool(self.experts) and len(self.experts) % max(top_k, 1) == 0, f"static: expected {top_k} per token")
        is_known = min(self.experts) >= 0 and max(self.experts) < count
        require(is_known, f"static: expected experts from 0 to {count - 1}")
        tokens = zip(*(self.experts[rank::top_k] for rank in range(top_k)), strict=True)
        require(all(len(set(chosen)) == top_k for chosen in tokens), "static: a token names an expert twice")


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """Rule from router logits to experts and weights: scores of all experts, top-k, normalisation, scale.

    scoring: how logits become scores, see below.
    renormalize: whether the weights of the chosen experts are divided by their sum.
    scale: factor of the weights.
    correction: numbers added to the scores for the choice, not for the weights; empty for none.
    groups: number of groups of consecutive experts. The top-k experts come from the best kept_groups groups.
    group_score: a group is rated by its best expert (`max`) or its best two (`top2`).
    has_bias: whether a bias is added to the logits.
    capacity: in an encoder, most tokens of a sequence that an expert computes; later tokens skip it. 0 for no limit.
    margin: see sparsemixer.
    static: experts chosen by the token alone; scores only weigh them.

    Scoring `uniform`: there is no router, and all chosen experts have equal weights. It is for static routing.
    Scoring `sparsemixer`: the two largest logits are chosen one after the other. Each is weighed by a softmax over the
    remaining logits x near the largest remaining logit m: (m - x) / max(|x|, m) <= margin. No other field applies.
    Source of capacity: Switch Transformers, section 2.2.
    Source of sparsemixer: GRIN, SparseMixer-v2.
    """

    scoring: Literal["softmax", "sigmoid", "sparsemixer", "uniform"]
    renormalize: bool
    scale: float = 1.0
    correction: tuple[float, ...] = ()
    groups: int = 1
    kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    has_bias: bool = False
    capacity: int = field(default=0, metadata=OPTIONAL)
    margin: float = field(default=0.0, metadata=OPTIONAL)
    static: StaticRouting | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        require(0 < self.scale <= 1e4, f"router scale out of range: {self.scale}")
        require(0 < self.kept_groups <= self.groups <= MAX_EXPERTS, "kept_groups must be 1 to groups")
        require(all(abs(c) <= 1e4 for c in self.correction), "correction: expected numbers of at most 10,000")
        require(0 <= self.capacity <= MAX_POSITIONS, f"capacity out of range: {self.capacity}")
        require(0 <= self.margin <= 1e4, f"margin out of range: {self.margin}")
        if self.scoring == "sparsemixer":
            others = self.correction or self.groups != 1 or self.has_bias or self.capacity or self.static
            require(not (self.renormalize or self.scale != 1 or others), "sparsemixer takes logits and margin only")
        else:
            require(self.margin == 0, "margin is for sparsemixer")
        if self.static is not None:
            chooses = self.correction or self.groups != 1 or self.capacity
            require(not chooses, "static routing has no correction, groups, capacity")
        if self.scoring == "uniform":
            is_bare = self.static is not None and not self.renormalize and not self.has_bias
            require(is_bare, "uniform is for static routing, without renormalizing and bias")

    @property
    def is_by_logits(self) -> bool:
        """True if the order of the logits alone decides the choice.

        Then an expert with a logit of -inf is never chosen.
        """
        is_alone = not self.correction and self.groups == 1 and self.static is None and not self.capacity
        return is_alone and self.scoring in ("softmax", "sigmoid")

    @property
    def is_plain(self) -> bool:
        """True if scoring is softmax alone, so that scores have the order of the logits."""
        return self.scoring == "softmax" and not self.correction and self.groups == 1 and self.static is None
