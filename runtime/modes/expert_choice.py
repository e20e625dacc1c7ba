"""Change the experts of a pass under the lossy modes: use a cached expert instead, a low version, or none.

Shapes: T tokens, E experts, K ranks. A chosen expert is its number in the layer.
E is added to the number for its low version. NO_EXPERT stands for no expert.
The best expert of a token has the largest weight. A router that corrects its scores may rank another expert first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from moec.manifests.bundle import BundleManifest

from ..layers.routing import (
    NO_EXPERT,
    Routed,
    RoutingRule,
    least_unimportance,
    unimportance_by_expert,
    unimportance_of_token,
)
from ..options.lossy import CacheRouting, DynamicPrecision, LossyModes
from .logical_cache import DecidingCache
from .mode_counts import ModeCounts

ABSENT = -1


class Versions:
    """Stored indices of the high and low versions of experts.

    first_expert: stored index at which each layer's experts begin, [L + 1].
    low_indices: stored index of each expert's low version, ABSENT without one, int [N].
    """

    def __init__(self, first_expert: Sequence[int], low_indices: np.ndarray) -> None:
        self._first, self.low_indices = first_expert, low_indices

    def index(self, layer: int, expert: int) -> int:
        """Return the stored index of a chosen expert, high or low."""
        first, count = self._first[layer], self._count(layer)
        return first + expert if expert < count else int(self.low_indices[first + expert - count])

    def low(self, layer: int, expert: int) -> int | None:
        """Return the low version of an expert as a chosen expert; None without one."""
        return expert + self._count(layer) if self.low_indices[self._first[layer] + expert] != ABSENT else None

    def _count(self, layer: int) -> int:
        return self._first[layer + 1] - self._first[layer]


def low_version_indices(manifest: BundleManifest) -> np.ndarray:
    """Return the stored index of each expert's low version, int [N]; ABSENT without one."""
    place = {entry.key: at for at, entry in enumerate(manifest.low_experts, len(manifest.experts))}
    return np.array([place.get(entry.key, ABSENT) for entry in manifest.experts], np.int64)


def best_cached(
    is_cached: Callable[[int], bool], scores: np.ndarray, row: np.ndarray, experts: np.ndarray
) -> int | None:
    """Return the cached expert with the best score that the token has not chosen, or None.

    scores: [E].
    row: experts that the token has chosen, [K].
    experts: experts to consider.
    """
    for expert in experts[np.argsort(-scores[experts], kind="stable")].tolist():
        if expert not in row and is_cached(expert):
            return int(expert)
    return None


def _unimportance(routed: Routed) -> dict[int, float]:
    """Return the unimportance of each chosen expert for the token that needs it most."""
    if len(routed.chosen) == 1:
        return unimportance_of_token(routed.chosen[0].tolist(), routed.weights[0])
    return unimportance_by_expert(least_unimportance(routed.chosen, routed.weights, routed.logits.shape[1]))


class PassChoice:
    """Changes to the choice in one kind of pass: how many experts a token has, and which are computed.

    It is the specification of `native/experts/lossy_choice.cpp`, which decides in a pass of native calls.

    modes, versions, cache, counts: what all passes of an engine share. The cache is None if no mode reads it.
    is_prompt: whether the pass computes a prompt. Then only dynamic precision acts.

    is_little: whether the pass uses the number of experts of the little model.
    recorded: receives the logits [T, E] of every layer that routes.

    foretold: by layer, the logits [T, E] of the discarded pass, if these tokens are computed again.
    """

    def __init__(
        self,
        modes: LossyModes,
        versions: Versions,
        cache: DecidingCache | None,
        counts: ModeCounts,
        is_prompt: bool = False,
        is_little: bool = False,
        recorded: dict[int, np.ndarray] | None = None,
        foretold: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        self._modes, self._versions, self._cache, self._counts = modes, versions, cache, counts
        self._is_prompt, self._is_little = is_prompt, is_little
        self._recorded, self.foretold = recorded, foretold

    @property
    def shared_parts(self) -> tuple[LossyModes, Versions, DecidingCache | None]:
        return self._modes, self._versions, self._cache

    @property
    def native_kind(self) -> str | None:
        if type(self) is not PassChoice:  # it decides by other rules
            return None
        if self._is_prompt:
            return "prompt"
        return "little" if self._is_little else "all" if self.foretold is None else "again"

    def take(self, layer: int, logits: np.ndarray) -> None:
        if self._recorded is not None:
            self._recorded[layer] = logits

    def add_counts(self, counts: Sequence[int | float]) -> None:
        self._counts.add(counts)

    @property
    def reads_unimportance(self) -> bool:
        return self._modes.dynamic_precision is not None

    def top_k(self, top_k: int) -> int:
        if self._is_little and self._modes.big_little is not None:
            return self._modes.big_little.little_top_k(top_k)
        return top_k

    def select(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        """Return the experts to compute, [T, K], and their weights, [T, K].

        Weights are those that the router gives to a choice of just these experts.
        """
        if self._is_prompt:
            return self._select_for_prompt(routed)
        self.take(routed.layer, routed.logits)
        self._counts.ranks += routed.chosen.size
        if not self._is_little:
            self._counts.count_weights(routed.weights)
        if self.foretold is not None:
            foretold = routed.rule.route(self.foretold[routed.layer])[0]
            self._counts.foretold += foretold.size
            is_right = (foretold[:, :, None] == routed.chosen[:, None, :]).any(axis=2)
            self._counts.foretold_right += int(is_right.sum())
        if self._cache is None:
            return routed.chosen, routed.weights
        all_chosen = routed.chosen.reshape(-1).tolist()
        self._counts.missed += sum(not self._holds(routed.layer, expert) for expert in all_chosen)
        if self._modes.cache_routing is not None:
            routed = self._with_cached(routed)
        if self._modes.dynamic_precision is not None:
            versions = self.versions_asked_for(routed.layer, _unimportance(routed), self._modes.dynamic_precision)
            if any(version != expert for expert, version in versions.items()):
                before, routed = routed.chosen, self._with_versions(routed, versions)
                self._counts.low += int((routed.chosen >= routed.logits.shape[1]).sum())
                self._counts.skipped += int(((routed.chosen == NO_EXPERT) & (before != NO_EXPERT)).sum())
        return routed.chosen, routed.weights

    def requested(self, layer: int, experts: Sequence[int], advice: Sequence[int]) -> None:
        """Report a layer's requested stored experts to the logical cache, and the experts read ahead after them."""
        if self._cache is not None:
            self._cache.request(layer, experts, advice)

    def index(self, layer: int, expert: int) -> int:
        return self._versions.index(layer, expert)

    def advised(self, layer: int, scores: np.ndarray, experts: Sequence[int], top_k: int) -> list[int]:
        """Return the stored versions that predicted experts need, likeliest first.

        Experts that will be skipped are left out.
        scores: scores of the layer, [E].
        experts: the likeliest experts, best first.
        Source: HOBBIT, layer-level prediction.
        """
        dynamic = self._modes.dynamic_precision
        if dynamic is None:
            return [self._versions.index(layer, expert) for expert in experts]
        total, stored = float(np.sort(scores)[-top_k:].sum()) or 1.0, list[int]()
        unimportance = 0.0
        for expert in experts:
            version = self.version(layer, expert, unimportance, dynamic, not self._holds(layer, expert))
            if version != NO_EXPERT:
                stored.append(self._versions.index(layer, version))
            unimportance += float(scores[expert]) / total
        return stored

    def advised_to_many(self, layer: int, unimportance: np.ndarray | None, experts: Sequence[int]) -> list[int]:
        """Return the stored versions that predicted experts need in a pass over several tokens, likeliest first.

        unimportance: least unimportance of each expert, as foreseen, float32 [E]. An expert that no token was foreseen
            to choose counts as unimportant. If it is None, nothing is read ahead under dynamic precision, because the
            version is not known.
        """
        dynamic = self._modes.dynamic_precision
        if dynamic is None:
            return [self._versions.index(layer, expert) for expert in experts]
        if unimportance is None:
            return []
        foreseen = dict(zip(experts, np.minimum(unimportance[list(experts)], 1).tolist(), strict=True))
        versions = self.versions_asked_for(layer, foreseen, dynamic)
        return [self._versions.index(layer, version) for version in versions.values() if version != NO_EXPERT]

    # -- cache routing -----------------------------------------------------------------------------------------------

    def _with_cached(self, routed: Routed) -> Routed:
        """Replace misses by cached experts within the margin, or drop them. The best expert of a token stays."""
        layer, rule, weights = routed.layer, routed.rule, routed.weights
        chosen, scores = routed.chosen.copy(), rule.scores(routed.logits)
        for token, row in enumerate(chosen):
            shares, unimportance = weights[token] / (weights[token].sum() or np.float32(1)), 0.0
            for rank in np.argsort(-shares, kind="stable").tolist():
                is_cached = partial(self._is_cached, layer, unimportance)
                if unimportance and not is_cached(int(row[rank])):
                    row[rank] = self._in_place_of(is_cached, rule, scores[token], row, rank, float(shares[rank]))
                unimportance += float(shares[rank])
        if np.array_equal(chosen, routed.chosen):
            return routed
        return replace(routed, chosen=chosen, weights=rule.weigh(scores, chosen))

    def _in_place_of(
        self,
        is_cached: Callable[[int], bool],
        rule: RoutingRule,
        scores: np.ndarray,
        row: np.ndarray,
        rank: int,
        share: float,
    ) -> int:
        """Return what replaces a missed expert: a cached expert, NO_EXPERT, or the expert itself."""
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
        """Return the best cached expert within the margin of the missed one that the token has not chosen."""
        least = (1 - margin) * float(scores[missed])
        if not margin or least <= 0:
            return None
        near = np.flatnonzero(rule.allowed(scores) & (scores >= least))
        return best_cached(is_cached, scores, row, near)

    def is_dropped(self, share: float, drop: float) -> bool:
        """Return whether a missed expert with this share of the token's weight is dropped."""
        return share < drop

    def _is_cached(self, layer: int, unimportance: float, expert: int) -> bool:
        """Return whether an expert is computed without a read: as high version, or as low version if that is enough.

        unimportance: weight share of the experts ranked before it.
        """
        if self._holds(layer, expert):
            return True
        dynamic = self._modes.dynamic_precision
        if dynamic is None or unimportance <= dynamic.low_above:
            return False
        low = self._versions.low(layer, expert)
        return low is not None and self._holds(layer, low)

    def _holds(self, layer: int, version: int) -> bool:
        return self._cache is not None and self._cache.is_resident(self._versions.index(layer, version))

    # -- dynamic precision -------------------------------------------------------------------------------------------

    def _select_for_prompt(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        """Return what `select` returns, for a pass over prompts."""
        if self._modes.dynamic_precision is not None:
            routed = self._with_versions(routed, self.prompt_versions(routed.layer, _unimportance(routed)))
        return routed.chosen, routed.weights

    def prompt_versions(self, layer: int, least: Mapping[int, float]) -> dict[int, int]:
        """Return the version of each chosen expert in a pass over prompts, and count the decisions.

        least: unimportance of the chosen experts for the most important token.
        Raises ValueError without dynamic precision.
        """
        if self._modes.dynamic_precision is None:
            raise ValueError("dynamic precision is off")
        counts, versions = self._counts, self.versions_asked_for(layer, least, self._modes.dynamic_precision)
        skipped = sum(version == NO_EXPERT for version in versions.values())
        counts.prompt_experts += len(versions)
        counts.prompt_missed += sum(not self._holds(layer, expert) for expert in versions)
        counts.prompt_low += sum(version != expert for expert, version in versions.items()) - skipped
        counts.prompt_skipped += skipped
        return versions

    def versions_asked_for(self, layer: int, least: Mapping[int, float], dynamic: DynamicPrecision) -> dict[int, int]:
        """Return for each expert the version that its most important token asks for, in the order of `least`.

        All tokens of the pass use this version, so that an expert is read once.
        least: unimportance of the experts for this token.
        """
        return {
            expert: self.version(layer, expert, unimportance, dynamic, not self._holds(layer, expert))
            for expert, unimportance in least.items()
        }

    def _with_versions(self, routed: Routed, versions: Mapping[int, int]) -> Routed:
        """Take high, low or no version of each expert.

        versions: of each chosen expert. Skipped experts have no weight where the rule can weigh.
        """
        chosen = routed.chosen
        table = np.full(routed.logits.shape[1], NO_EXPERT, np.int32)
        table[list(versions)] = list(versions.values())
        version_of_rank = np.where(chosen == NO_EXPERT, np.int32(NO_EXPERT), table[chosen])
        is_skipped = (version_of_rank == NO_EXPERT) & (chosen != NO_EXPERT)
        if not is_skipped.any() or not routed.rule.can_weigh:
            return replace(routed, chosen=version_of_rank)
        computed = np.where(version_of_rank == NO_EXPERT, np.int32(NO_EXPERT), chosen)
        return replace(
            routed, chosen=version_of_rank, weights=routed.rule.weigh(routed.rule.scores(routed.logits), computed)
        )

    def version(self, layer: int, expert: int, unimportance: float, dynamic: DynamicPrecision, is_missed: bool) -> int:
        """Return the version of an expert: on a miss high up to T1, low up to T2, else none.

        A cached low version needs no read, so it is used instead of a skip.
        Source: HOBBIT, token-level dynamic loading.
        """
        if not is_missed or unimportance <= dynamic.low_above:
            return expert
        low = self._versions.low(layer, expert)
        if unimportance <= dynamic.skip_above:
            return expert if low is None else low
        return low if low is not None and self._holds(layer, low) else NO_EXPERT
