"""Turn router logits into experts and their weights.

Shapes: T tokens, E experts, K top-k, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moec.manifests.model import ExpertsSpec, RouterSpec

from .. import kernels
from ..kernels.elementary import exp, sigmoid, softmax
from .norms import Norm

NO_EXPERT = -1
"""Value instead of a chosen expert: this rank of the token is not computed."""
LEAST_SUM = 1e-20
"""Added to the sum of a token's weights before they are divided by it: sigmoids may all be 0."""
NOT_CHOSEN = 2.0
"""Unimportance of an expert that no token of a pass chose. That of a chosen expert is below 1, up to rounding."""


class RoutingRule:
    """The rule that turns a layer's logits into experts, prepared from its ExpertsSpec."""

    def __init__(self, experts: ExpertsSpec, pruned: Sequence[int] = ()) -> None:
        """Prepare the rule.

        pruned: experts that are never chosen.
        """
        self._experts = experts
        self._kept: np.ndarray | None = None
        if pruned:
            self._kept = np.ones(experts.count, bool)
            self._kept[list(pruned)] = False
            self._kept_experts = np.flatnonzero(self._kept).astype(np.int32)
        router = self.spec = experts.router
        self.is_softmax = router.is_plain
        """True if the score of an expert is its softmax share over all experts that are not pruned."""
        self.correction = np.array(router.correction, np.float32) if router.correction else None
        self.expert_scales = np.array(router.expert_scales, np.float32) if router.expert_scales else None
        self.static: np.ndarray | None = None
        """Experts of each token id, int32 [V, K]; set only for static routing."""
        if router.static is not None:
            self.static = np.array(router.static.experts, np.int32).reshape(-1, experts.top_k)

    def route(
        self, logits: np.ndarray, tokens: np.ndarray | None = None, top_k: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose the top-k experts of each token, best first. Of equal scores the lowest expert wins.

        logits: [T, E].
        tokens: token ids, int64 [T]; needed for static routing.
        top_k: experts per token, if not the layer's own number. For sparsemixer the weights remain those of the pair.

        Returns experts, int32 [T, K], and weights, float32 [T, K].
        Raises ValueError for static routing without tokens.
        """
        router, top_k = self._experts.router, top_k or self._experts.top_k
        logits = self._among_kept(logits)
        if router.scoring == "sparsemixer":
            chosen, weights = sparsemixer(logits, router.margin)
            # The kernels take no strides, so both are copied.
            return np.ascontiguousarray(chosen[:, :top_k]), np.ascontiguousarray(weights[:, :top_k])
        if self.is_softmax:
            chosen, weights = kernels.route(logits, top_k, router.renormalize)
            if self._kept is not None:
                self._replace_pruned(self._kept, logits, chosen, weights)
        else:
            chosen, weights = self._by_score(logits, tokens, top_k)
        if router.scale != 1.0:
            weights *= np.float32(router.scale)
        if self.expert_scales is not None:
            weights *= self.expert_scales[chosen]
        return chosen, weights

    def _by_score(self, logits: np.ndarray, tokens: np.ndarray | None, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Compute `route` without the scale of the router, step by step."""
        router, scores = self._experts.router, expert_scores(logits, self._experts.router)
        if self.static is None:
            chosen = self._best(self._ranked(logits if self.spec.corrects_logits else scores), top_k)
        elif tokens is None:
            raise ValueError("static routing needs the tokens")
        else:
            chosen = self.static[tokens]
        if router.scoring == "uniform":
            scores = scores / np.float32(top_k)
        weights = np.take_along_axis(scores, chosen, axis=1)
        if router.renormalize:
            weights /= weights.sum(axis=1, keepdims=True) + np.float32(router.least_sum or LEAST_SUM)
        return chosen, weights

    def _best(self, ranked: np.ndarray, top_k: int) -> np.ndarray:
        """Return the top-k of each token among the experts that are not pruned: [T, E] -> int32 [T, K].

        NaN is ordered after every number.
        """
        if self._kept is None:
            return np.argsort(-ranked, axis=1, kind="stable")[:, :top_k].astype(np.int32)
        order = np.argsort(-ranked[:, self._kept_experts], axis=1, kind="stable")[:, :top_k]
        best: np.ndarray = self._kept_experts[order]
        return best

    def _replace_pruned(self, stored: np.ndarray, logits: np.ndarray, chosen: np.ndarray, weights: np.ndarray) -> None:
        """Choose again for tokens that got a pruned expert, because the logits of the others are NaN or -inf.

        Weights of such tokens are NaN or 0. NaN reaches the logits of the model, where an error names it.
        stored: experts that are not pruned, bool [E].
        logits: [T, E].
        chosen, weights: [T, K], changed in place.
        """
        is_kept = stored[chosen]
        if not is_kept.all():
            is_wrong = ~is_kept.all(axis=1)
            chosen[is_wrong], weights[is_wrong] = self._by_score(logits[is_wrong], None, chosen.shape[1])

    def demand(self, logits: np.ndarray) -> np.ndarray:
        """Return the sum of each expert's scores over all tokens, float32 [E]. Predictions rank experts by it."""
        if self.spec.corrects_logits:
            return np.asarray(sigmoid(self._ranked(logits)).sum(axis=0), np.float32)
        ranked = self._ranked(self.scores(logits))
        return np.asarray(ranked.clip(min=0).sum(axis=0), np.float32)

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """Return the score of each expert, from which its weight is computed: [T, E] -> float32 [T, E]."""
        return expert_scores(self._among_kept(logits), self._experts.router)

    def allowed(self, scores: np.ndarray) -> np.ndarray:
        """Return for each expert whether a token may choose it, by its best groups: scores [E] -> bool [E]."""
        allowed: np.ndarray = self._ranked(scores[None])[0] > -np.inf
        return allowed

    @property
    def can_weigh(self) -> bool:
        """True if a choice that differs from the router's own can be weighed: each expert has a score of its own."""
        return self.static is None and self._experts.router.scoring != "sparsemixer"

    def weigh(self, scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return the weights, float32 [T, K], that the router would give to another choice than its own.

        scores: [T, E].
        chosen: int32 [T, K]; negative for no expert, whose weight is 0.
        """
        weights = np.where(chosen >= 0, np.take_along_axis(scores, np.maximum(chosen, 0), axis=1), np.float32(0))
        if self._experts.router.renormalize:
            weights /= weights.sum(axis=1, keepdims=True) + np.float32(self.spec.least_sum or LEAST_SUM)
        if self.expert_scales is not None:
            weights = weights * self.expert_scales[np.maximum(chosen, 0)]
        return np.asarray(weights * np.float32(self._experts.router.scale), np.float32)

    def _among_kept(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits [T, E] with those of pruned experts set to -inf."""
        return logits if self._kept is None else np.where(self._kept, logits, np.float32(-np.inf))

    def _ranked(self, scores: np.ndarray) -> np.ndarray:
        corrected = scores if self.correction is None else scores + self.correction
        if self._kept is not None:  # a score of 0 does not exclude a pruned expert: sigmoids underflow
            corrected = np.where(self._kept, corrected, np.float32(-np.inf))
        return _without_other_groups(corrected, self._experts.router)


def sparsemixer(logits: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the two largest logits of each token and their weights, see RouterSpec: [T, E] -> int32, float32 [T, 2].

    The second is weighed without the first, so the weights need not sum to 1. Equal logits: the lowest expert wins.
    Source: GRIN, SparseMixer-v2, without its sampling, which is for training.
    """
    rows = np.arange(len(logits))
    chosen = np.empty((len(logits), 2), np.int32)
    left = np.empty((2, *logits.shape), np.float32)  # for the first choice all logits, for the second all but the first
    left[:] = logits
    chosen[:, 0] = logits.argmax(axis=1)
    left[1, rows, chosen[:, 0]] = -np.inf
    chosen[:, 1] = left[1].argmax(axis=1)
    largest = logits[rows, chosen.T][:, :, None]
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0: logits of 0 are not far from each other
        is_far = (largest - logits) / np.maximum(np.abs(logits), largest) > np.float32(margin)
    shares = exp(left - largest)
    shares[is_far] = 0
    # The sum follows the order of experts for any batch. The largest logit has the share exp(0).
    weights = np.float32(1) / np.add.accumulate(shares, axis=2)[:, :, -1]
    return chosen, np.ascontiguousarray(weights.T)


def within_capacity(chosen: np.ndarray, sequences: np.ndarray, capacity: int) -> np.ndarray:
    """Return whether each choice is among the first `capacity` ones of its expert in its sequence, bool [T, K].

    chosen: int32 [T, K].
    sequences: sequence of each token, int [T]; tokens of a sequence are in order.
    Source: Switch Transformers, section 2.2.
    """
    keys = (sequences.astype(np.int64)[:, None] * (int(chosen.max(initial=0)) + 1) + chosen).reshape(-1)
    order = np.argsort(keys, kind="stable")
    _, first, counts = np.unique(keys[order], return_index=True, return_counts=True)
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = np.arange(len(keys)) - np.repeat(first, counts)
    return np.asarray(ranks < capacity).reshape(chosen.shape)


@dataclass(frozen=True, slots=True)
class Routed:
    """The router's choice for the tokens of a pass in one layer.

    layer: its number.
    rule: the rule of its router.
    logits: float32 [T, E].
    chosen: experts, int32 [T, K].
    weights: float32 [T, K].
    """

    layer: int
    rule: RoutingRule
    logits: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray


def least_unimportance(chosen: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Return the unimportance that each expert has for its most important token, float32 [E].

    The unimportance for a token is the weight share of the experts that the token ranks before this one.
    chosen: experts, int32 [T, K]; NO_EXPERT for none.
    weights: float32 [T, K].
    count: E.
    Experts that no token chose have NOT_CHOSEN.
    Source: HOBBIT, token-level dynamic loading.
    """
    total = weights.sum(axis=1, keepdims=True)
    shares = weights / np.where(total == 0, np.float32(1), total)
    order = np.argsort(-shares, axis=1, kind="stable")
    before = np.zeros(shares.shape)
    np.cumsum(np.take_along_axis(shares, order, axis=1)[:, :-1], axis=1, dtype=np.float64, out=before[:, 1:])
    ranked = np.take_along_axis(chosen, order, axis=1)
    least = np.full(count, NOT_CHOSEN, np.float32)
    is_expert = ranked != NO_EXPERT
    np.minimum.at(least, ranked[is_expert], before[is_expert].astype(np.float32))
    return least


def unimportance_by_expert(least: np.ndarray) -> dict[int, float]:
    """Return what `least_unimportance` says of the experts that some token chose."""
    chosen = np.flatnonzero(least != NOT_CHOSEN)
    return dict(zip(chosen.tolist(), least[chosen].tolist(), strict=True))


def unimportance_of_token(chosen: Sequence[int], weights: np.ndarray) -> dict[int, float]:
    """Return `unimportance_by_expert` of one token, for decoding: a few numbers take no arrays.

    chosen: its experts, K.
    weights: float32 [K].
    """
    total = weights.sum()
    shares = (weights / (total or np.float32(1))).tolist()
    unimportance, before = dict[int, float](), 0.0
    for rank in sorted(range(len(shares)), key=shares.__getitem__, reverse=True):
        if chosen[rank] != NO_EXPERT:
            unimportance[chosen[rank]] = float(np.float32(before))
        before += shares[rank]
    return unimportance


class Router:
    """The router of a layer: computes logits from the normed residual stream, and holds the rule for them."""

    def __init__(
        self,
        experts: ExpertsSpec,
        matrix: kernels.PackedMatrix | None,
        bias: np.ndarray | None,
        pruned: Sequence[int] = (),
    ) -> None:
        """Create a router.

        matrix: [E, D]; None if all experts are alike.
        bias: float32 [E].
        pruned: as in RoutingRule.
        """
        self.rule = RoutingRule(experts, pruned)
        self.matrix, self.bias, self._count = matrix, bias, experts.count
        self.bias_among_kept = bias
        """The bias with -inf for pruned experts: float32 [E], or None without a bias and pruned experts."""
        if pruned:
            self.bias_among_kept = np.zeros(experts.count, np.float32) if bias is None else bias.copy()
            self.bias_among_kept[list(pruned)] = -np.inf

    def logits(self, normed: np.ndarray) -> np.ndarray:
        """Return the logits of rows: float32 [T, D] -> [T, E]."""
        if self.matrix is None:
            return np.zeros((len(normed), self._count), np.float32)
        logits = np.empty((len(normed), self.matrix.rows), np.float32)
        kernels.linear(self.matrix, normed, logits)
        if self.bias is not None:
            logits += self.bias
        return logits


def expert_scores(logits: np.ndarray, router: RouterSpec) -> np.ndarray:
    """Return the score of each expert, float32 [T, E], before any correction."""
    if router.scoring == "uniform":
        return np.ones_like(logits)
    if router.scoring == "sigmoid":
        return sigmoid(logits)
    return softmax(logits)


def _without_other_groups(scores: np.ndarray, router: RouterSpec) -> np.ndarray:
    """Return the scores [T, E] with those of experts outside the best groups set to -inf."""
    if router.groups == 1:
        return scores
    grouped = scores.reshape(len(scores), router.groups, -1)
    best = 2 if router.group_score == "top2" else 1
    value = np.sort(grouped, axis=2)[:, :, -best:].sum(axis=2)
    best_groups = np.argsort(-value, axis=1, kind="stable")[:, : router.kept_groups]
    mask = np.zeros(value.shape, bool)
    np.put_along_axis(mask, best_groups, True, axis=1)
    return np.where(mask[:, :, None], grouped, np.float32(-np.inf)).reshape(scores.shape)


@dataclass(frozen=True, slots=True)
class RouterStack:
    """Softmax routers of E experts each, each after the RMS norm of its own layer.

    HOBBIT uses one input for all, which leaves out the norms of the layers ahead.
    Source: HOBBIT, layer-level prediction, stacked gating.
    """

    matrices: list[kernels.PackedMatrix]
    norms: list[np.ndarray]
    biases: list[np.ndarray | None]
    eps: float

    def shares(self, hidden: np.ndarray) -> np.ndarray:
        """Return the softmax share of each expert. float32 [1, D] -> [M, E]."""
        out = np.empty((len(self.matrices), self.matrices[0].rows), np.float32)
        kernels.router_shares(self.matrices, self.norms, self.eps, hidden, out, self.biases)
        return out


def stack_routers(routers: Sequence[Router], norms: Sequence[Norm]) -> RouterStack | None:
    """Combine routers with the norms before them. Returns None unless all are plain softmax routers of one size."""
    matrices = [matrix for router in routers if (matrix := router.matrix) is not None]
    is_plain = all(router.rule.is_softmax for router in routers)
    is_plain = is_plain and all(norm.bias is None and norm.eps == norms[0].eps for norm in norms)
    if not is_plain or not matrices or len(matrices) < len(routers) or len({stored.rows for stored in matrices}) > 1:
        return None
    biases = [router.bias_among_kept for router in routers]
    return RouterStack(matrices, [norm.weight for norm in norms], biases, norms[0].eps)
