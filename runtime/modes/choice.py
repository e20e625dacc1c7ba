"""What the experts of a pass become under the lossy modes: cached ones in their place, low versions, none.

Shapes: T tokens, E experts, K ranks. A chosen expert is its number in the layer, plus E where its low version is
meant, or NO_EXPERT. A token's best expert is the one with the largest weight; a router that corrects its scores may
rank another first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from moec.manifests.bundle import BundleManifest

from ..layers.routing import NO_EXPERT, Routed, RoutingRule
from ..options.lossy import CacheRouting, DynamicPrecision, LossyModes
from .logical_cache import LogicalCache

FLAT_SHARE = 1 / 3
"""Of a flat router the lower-ranked half of a token's experts has more than this share of the weight: leaving one out,
or another in its place, costs more than its rank tells. An even router has half.
"""
ABSENT = -1


@dataclass(slots=True)
class ModeCounts:
    """What the modes decided so far. ranks: experts that decode passes chose, over all tokens and layers.

    missed: of these the ones that the logical cache lacked, where a mode reads it.
    replaced, dropped: by cache routing. low, skipped: by dynamic precision; low counts low versions that were cached as
    well. tokens: decoded; fallback_tokens: computed again with all experts. foretold: experts of passes done again that
    the discarded pass had chosen; foretold_right: of these, those that were chosen again. routings: tokens x layers;
    lower_half: summed over them, the share of the weight that the lower-ranked half of the experts has.
    """

    ranks: int = 0
    missed: int = 0
    replaced: int = 0
    dropped: int = 0
    low: int = 0
    skipped: int = 0
    tokens: int = 0
    fallback_tokens: int = 0
    foretold: int = 0
    foretold_right: int = 0
    routings: int = 0
    lower_half: float = 0.0

    def count_weights(self, weights: np.ndarray) -> None:
        """Weights [T, K] that a router gave."""
        ranked, total = np.sort(weights, axis=1), weights.sum(axis=1)
        self.routings += len(weights)
        self.lower_half += float((ranked[:, : weights.shape[1] // 2].sum(axis=1) / np.maximum(total, 1e-20)).sum())

    def to_plain(self) -> dict[str, int | float | None]:
        """For `--json`: the counts, and their shares."""
        plain: dict[str, int | float | None] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("missed", "replaced", "dropped", "low", "skipped"):
            plain[f"{name}_share"] = getattr(self, name) / self.ranks if self.ranks else None
        plain["lower_half_share"] = self.lower_half / self.routings if self.routings else None
        plain["fallback_share"] = self.fallback_tokens / self.tokens if self.tokens else None
        plain["foretold_right_share"] = self.foretold_right / self.foretold if self.foretold else None
        return plain


class Versions:
    """Where the versions of a layer's experts lie among all that are stored.

    first_expert: [L + 1], where each layer's experts begin. low: int [N], the index of each expert's low version,
    ABSENT where it has none.
    """

    def __init__(self, first_expert: Sequence[int], low: np.ndarray) -> None:
        self._first, self._low = first_expert, low

    def index(self, layer: int, expert: int) -> int:
        """Of a chosen expert, high or low."""
        first, count = self._first[layer], self._count(layer)
        return first + expert if expert < count else int(self._low[first + expert - count])

    def low(self, layer: int, expert: int) -> int | None:
        """The low version of an expert, as a chosen one; None where it has none."""
        return expert + self._count(layer) if self._low[self._first[layer] + expert] != ABSENT else None

    def _count(self, layer: int) -> int:
        return self._first[layer + 1] - self._first[layer]


def low_version_indices(manifest: BundleManifest) -> np.ndarray:
    """Where the low version of every expert lies among all that are stored, int [N]; ABSENT where it has none."""
    place = {entry.key: at for at, entry in enumerate(manifest.low_experts, len(manifest.experts))}
    return np.array([place.get(entry.key, ABSENT) for entry in manifest.experts], np.int64)


def best_cached(
    is_cached: Callable[[int], bool], scores: np.ndarray, row: np.ndarray, experts: np.ndarray
) -> int | None:
    """Of some experts the cached one with the best score that the token has not chosen. scores: [E]; row: [K]."""
    for expert in experts[np.argsort(-scores[experts], kind="stable")].tolist():
        if expert not in row and is_cached(expert):
            return int(expert)
    return None


class PassChoice:
    """Of one kind of pass: how many experts a token has, and which of them are computed.

    decides: false for prefill, which is lossless and only tells the logical cache what it asks for. is_little: with as
    many experts as the little model has. recorded: takes the logits [T, E] of every layer that routes. foretold: the
    experts [T, K] of every layer that a discarded pass would have chosen with all K.
    """

    def __init__(
        self,
        modes: LossyModes,
        versions: Versions,
        cache: LogicalCache | None,
        counts: ModeCounts,
        decides: bool = True,
        is_little: bool = False,
        recorded: dict[int, np.ndarray] | None = None,
        foretold: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self._modes, self._versions, self._cache, self._counts = modes, versions, cache, counts
        self._decides, self._is_little = decides, is_little
        self._recorded, self._foretold = recorded, foretold

    def top_k(self, top_k: int) -> int:
        """Experts per token in a layer of so many."""
        if self._is_little and self._modes.big_little is not None:
            return self._modes.big_little.little_top_k(top_k)
        return top_k

    def select(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        """What is computed of the experts that the router chose, [T, K], and with which weights, [T, K].

        Weights are those that the router gives a choice of just these experts.
        """
        if self._recorded is not None:
            self._recorded[routed.layer] = routed.logits
        if not self._decides:
            return routed.chosen, routed.weights
        self._counts.ranks += routed.chosen.size
        if not self._is_little:
            self._counts.count_weights(routed.weights)
        if self._foretold is not None:
            self._count_foretold(self._foretold[routed.layer], routed.chosen)
        if self._cache is None:
            return routed.chosen, routed.weights
        asked = routed.chosen.reshape(-1).tolist()
        self._counts.missed += sum(not self._holds(routed.layer, expert) for expert in asked)
        if self._modes.cache_routing is not None:
            routed = self._with_cached(routed)
        if self._modes.dynamic_precision is not None:
            routed = self._with_versions(routed, self._modes.dynamic_precision)
        return routed.chosen, routed.weights

    def requested(self, layer: int, experts: Sequence[int], advice: Sequence[int]) -> None:
        """Tell the logical cache what a layer asks for, as stored indices, and what is read ahead behind it."""
        if self._cache is not None:
            self._cache.request(layer, experts, advice)

    def index(self, layer: int, expert: int) -> int:
        """The stored index of a chosen expert."""
        return self._versions.index(layer, expert)

    def advised(self, layer: int, scores: np.ndarray, experts: Sequence[int], top_k: int) -> list[int]:
        """Stored indices of the versions that predicted experts ask for, likeliest first; none where a skip is likely.

        scores: [E] of the layer; experts: the likeliest, best first. Source: HOBBIT, layer-level prediction.
        """
        dynamic = self._modes.dynamic_precision
        if dynamic is None or not self._decides:
            return [self._versions.index(layer, expert) for expert in experts]
        total, found = float(np.sort(scores)[-top_k:].sum()) or 1.0, list[int]()
        unimportance = 0.0
        for expert in experts:
            version = self.version(layer, expert, unimportance, dynamic, not self._holds(layer, expert))
            if version != NO_EXPERT:
                found.append(self._versions.index(layer, version))
            unimportance += float(scores[expert]) / total
        return found

    # -- cache routing -----------------------------------------------------------------------------------------------

    def _with_cached(self, routed: Routed) -> Routed:
        """Misses, but for a token's best expert, replaced by cached experts within the margin, or dropped."""
        layer, rule, weights = routed.layer, routed.rule, routed.weights
        found, scores = routed.chosen.copy(), rule.scores(routed.logits)
        for token, row in enumerate(found):
            shares, unimportance = weights[token] / (weights[token].sum() or np.float32(1)), 0.0
            for rank in np.argsort(-shares, kind="stable").tolist():
                is_cached = partial(self._is_cached, layer, unimportance)
                if unimportance and not is_cached(int(row[rank])):
                    row[rank] = self._in_place_of(is_cached, rule, scores[token], row, rank, float(shares[rank]))
                unimportance += float(shares[rank])
        if np.array_equal(found, routed.chosen):
            return routed
        return replace(routed, chosen=found, weights=rule.weigh(scores, found))

    def _in_place_of(
        self,
        is_cached: Callable[[int], bool],
        rule: RoutingRule,
        scores: np.ndarray,
        row: np.ndarray,
        rank: int,
        share: float,
    ) -> int:
        """What a miss becomes: a cached expert, nobody, or what it was."""
        routing, missed = self._modes.cache_routing or CacheRouting(0, 0), int(row[rank])
        stand_in = self.stand_in(is_cached, rule, scores, row, missed, routing.margin)
        if stand_in is not None:
            self._counts.replaced += 1
            return stand_in
        if self.is_dropped(share, routing.drop):
            self._counts.dropped += 1
            return NO_EXPERT
        return missed

    def stand_in(
        self,
        is_cached: Callable[[int], bool],
        rule: RoutingRule,
        scores: np.ndarray,
        row: np.ndarray,
        missed: int,
        margin: float,
    ) -> int | None:
        """The best cached expert that the token has not chosen, within the margin of the one that is missed."""
        least = (1 - margin) * float(scores[missed])
        if not margin or least <= 0:
            return None
        near = np.flatnonzero(rule.allowed(scores) & (scores >= least))
        return best_cached(is_cached, scores, row, near)

    def is_dropped(self, share: float, drop: float) -> bool:
        """Whether a missed expert of this share of the token's weight is left out."""
        return share < drop

    def _is_cached(self, layer: int, unimportance: float, expert: int) -> bool:
        """Whether an expert of this unimportance can be computed without a read: high, or low where low will do."""
        if self._holds(layer, expert):
            return True
        dynamic = self._modes.dynamic_precision
        if dynamic is None or unimportance <= dynamic.low_above:
            return False
        low = self._versions.low(layer, expert)
        return low is not None and self._holds(layer, low)

    def _holds(self, layer: int, version: int) -> bool:
        return self._cache is not None and self._cache.holds(self._versions.index(layer, version))

    # -- dynamic precision -------------------------------------------------------------------------------------------

    def _with_versions(self, routed: Routed, dynamic: DynamicPrecision) -> Routed:
        """High, low or no version of each, by how much weight the experts ranked before it have."""
        layer, chosen = routed.layer, routed.chosen
        found = chosen.copy()
        for row, weights in zip(found, routed.weights, strict=True):
            shares = weights / (weights.sum() or np.float32(1))
            unimportance = 0.0
            for rank in np.argsort(-shares, kind="stable").tolist():
                if row[rank] != NO_EXPERT:
                    expert = int(row[rank])
                    row[rank] = self.version(layer, expert, unimportance, dynamic, not self._holds(layer, expert))
                unimportance += float(shares[rank])
        is_skipped = (found == NO_EXPERT) & (chosen != NO_EXPERT)
        self._counts.low += int((found >= routed.logits.shape[1]).sum())
        self._counts.skipped += int(is_skipped.sum())
        if not is_skipped.any() or not routed.rule.can_weigh:
            return replace(routed, chosen=found)
        kept = np.where(found == NO_EXPERT, np.int32(NO_EXPERT), chosen)
        return replace(routed, chosen=found, weights=routed.rule.weigh(routed.rule.scores(routed.logits), kept))

    def version(self, layer: int, expert: int, unimportance: float, dynamic: DynamicPrecision, is_missed: bool) -> int:
        """Source: HOBBIT, token-level dynamic loading: on a miss, high up to T1, low up to T2, else nothing.

        A low version that is there costs nothing to take, so that nothing cached is skipped.
        """
        if not is_missed or unimportance <= dynamic.low_above:
            return expert
        low = self._versions.low(layer, expert)
        if unimportance <= dynamic.skip_above:
            return expert if low is None else low
        return low if low is not None and self._holds(layer, low) else NO_EXPERT

    def _count_foretold(self, foretold: np.ndarray, chosen: np.ndarray) -> None:
        self._counts.foretold += foretold.size
        self._counts.foretold_right += int((foretold[:, :, None] == chosen[:, None, :]).any(axis=2).sum())
