"""Counts over activation paths: which experts follow which. Pure functions of the routes of tokens.

`routes` holds the experts of every token in every layer, [T, L, K], best first. The order within a token has no effect
here. A layer's experts are predicted from the experts of the two layers before it.
Source: EdgeMoE, section on expert preloading (the dictionary of activation paths). Its key is the exact expert sets of
two layers, which is of no use for a top-8 of 64. The pair form counts each pair (a of layer l-2, b of layer l-1)
instead. For a top-1 both forms are one.
Shapes: T tokens, L layers, E experts, K top-k, N keys, P successors of all keys.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Routes = NDArray[np.integer]
PathKeys = Literal["pairs", "best"]
DEFAULT_PATH_KEYS: PathKeys = "best"
LEAST_SEEN = 8
"""Least number of tokens for a key to be trusted.

Otherwise the previous layer alone predicts. If its expert is as rare, popularity predicts.
"""
FREQUENT_SHARE = 0.2
_DENSE_COUNTS = 1 << 24
_TOKENS_PER_SCORE = 4096


@dataclass(frozen=True, eq=False, slots=True)
class PathDictionary:
    """Successors of every observed key.

    keys: int32 [N, 3], sorted rows (layer l, expert a of l-2, expert b of l-1).
        With exact sets [N, 1 + 2K]: layer l, experts of l-2, experts of l-1. Each set ascends.
    offsets: int64 [N+1], start of each key in `experts` and `counts`.
    experts: uint16 [P], ascending within a key.
    counts: uint32 [P].
    """

    keys: NDArray[np.int32]
    offsets: NDArray[np.int64]
    experts: NDArray[np.uint16]
    counts: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PathReport:
    """Quality of predictions of a layer from the two layers before it, on tokens that were not counted.

    accuracy_*: share of tokens whose top candidate was activated, over layers 2 to L-1. The candidates come from the
        pair form, from the exact sets, from the previous layer alone, or from popularity. NaN if none was predicted.
    frequent_paths: share of tokens on the 20 % most frequent observed paths through all layers.
    frequent_windows: the same share for paths through three consecutive layers. NaN if there are none.
    observed_paths: number of distinct paths through all layers.
    """

    accuracy_pairs: float
    accuracy_sets: float
    accuracy_previous: float
    accuracy_popularity: float
    frequent_paths: float
    frequent_windows: float
    observed_paths: int

    def to_json(self) -> dict[str, float]:
        """Return plain values, without those that are NaN."""
        return {name: value for name, value in asdict(self).items() if not math.isnan(value)}


def count_popularity(routes: Routes, experts: int) -> NDArray[np.uint32]:
    """Return the number of tokens that activate each expert, uint32 [L, E]."""
    layers = routes.shape[1]
    counts = [np.bincount(routes[:, layer].ravel(), minlength=experts) for layer in range(layers)]
    return np.array(counts, dtype=np.uint32).reshape(layers, experts)


def count_transitions(routes: Routes, experts: int) -> NDArray[np.uint32]:
    """Return the number of tokens with expert a in layer l and expert b in layer l+1, uint32 [L-1, E, E]."""
    layers = routes.shape[1]
    counts = np.zeros((max(layers - 1, 0), experts, experts), np.uint32)
    for layer in range(layers - 1):
        codes = _pairs(routes[:, layer], routes[:, layer + 1], experts)
        counts[layer] = np.bincount(codes.ravel(), minlength=experts**2).reshape(experts, experts)
    return counts


def count_paths(routes: Routes, experts: int) -> PathDictionary:
    """Return the pair form: for each pair (a of layer l-2, b of layer l-1) the experts of layer l, l = 2 to L-1."""
    layers = [_empty(3)]
    for layer in range(2, routes.shape[1]):
        pairs = _pairs(routes[:, layer - 2], routes[:, layer - 1], experts)
        codes, seen = _count(_pairs(pairs, routes[:, layer], experts), experts**3)
        pair_codes, sizes = np.unique(codes // experts, return_counts=True)
        rows = np.stack([pair_codes // experts, pair_codes % experts], axis=1)
        layers.append(_of_layer(layer, rows, sizes, codes % experts, seen))
    return join_paths(layers)


def count_path_sets(routes: Routes, experts: int) -> PathDictionary:
    """Return the exact-set form: for the expert sets of layers l-2 and l-1 the experts of layer l, l = 2 to L-1.

    Sets of fewer than LEAST_SEEN tokens are left out, because they predict nothing.
    Source: EdgeMoE, section on expert preloading.
    """
    width = 1 + 2 * routes.shape[2]
    layers = [_empty(width)]
    for layer in range(2, routes.shape[1]):
        both = np.sort(routes[:, layer - 2 : layer], axis=2).reshape(-1, width - 1)
        rows, which, seen = np.unique(both, axis=0, return_inverse=True, return_counts=True)
        is_kept = seen >= LEAST_SEEN
        places = np.cumsum(is_kept) - 1
        tokens = is_kept[which.reshape(-1)]
        places_of_tokens = places[which.reshape(-1)[tokens]][:, None]
        codes, counts = _count(_pairs(places_of_tokens, routes[tokens, layer], experts), int(is_kept.sum()) * experts)
        sizes = np.bincount(codes // experts, minlength=int(is_kept.sum()))
        layers.append(_of_layer(layer, rows[is_kept], sizes, codes % experts, counts))
    return join_paths(layers)


def join_paths(parts: Sequence[PathDictionary]) -> PathDictionary:
    """Return the keys of all parts, in order."""
    sizes = [np.diff(paths.offsets) for paths in parts]
    return PathDictionary(
        keys=np.concatenate([paths.keys for paths in parts]),
        offsets=np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64),
        experts=np.concatenate([paths.experts for paths in parts]),
        counts=np.concatenate([paths.counts for paths in parts]),
    )


def keeps_sets(report: PathReport, top_ks: Collection[int]) -> bool:
    """Return whether the exact-set form predicts held-out tokens better, and can be stored.

    top_ks: experts per token of each stack. Sets of several sizes are not stored.
    """
    return len(set(top_ks)) == 1 and max(top_ks) > 1 and report.accuracy_sets > report.accuracy_pairs


def frequent_share(paths: Routes) -> tuple[float, int]:
    """Return the share of tokens on the 20 % most frequent observed paths, and the number of distinct paths.

    paths: [T, l, K], experts of each token in some layers. Without tokens the result is (0, 0).
    """
    if not len(paths):
        return 0.0, 0
    rows = np.sort(paths, axis=2).reshape(len(paths), -1)
    counts = np.sort(np.unique(rows, axis=0, return_counts=True)[1])[::-1]
    top = max(1, round(FREQUENT_SHARE * len(counts)))
    return float(counts[:top].sum() / counts.sum()), len(counts)


def report_paths(counted: Routes, held_out: Routes, experts: int) -> PathReport:
    """Predict the held-out tokens from the counts of the others. Accuracies are NaN if nothing can be predicted."""
    hits = np.zeros(4)
    layers = range(2, counted.shape[1])
    for layer in layers:
        fallback = _Fallback(counted, layer, experts)
        pairs, sets = _pair_scores(counted, held_out, layer, experts), _set_scores(counted, held_out, layer, experts)
        actual = held_out[:, layer]
        for at, (by_pair, by_set) in enumerate(zip(pairs, sets, strict=True)):
            here = slice(at * _TOKENS_PER_SCORE, (at + 1) * _TOKENS_PER_SCORE)
            previous = fallback.scores(held_out[here, layer - 1])
            pair_keys = np.repeat(held_out[here, layer - 1], actual.shape[1], axis=1)
            chosen = (
                np.where(by_pair[1][..., None], by_pair[0], fallback.each(pair_keys)).sum(1),
                np.where(by_set[1][:, None], by_set[0], previous),
                previous,
                fallback.popularity,
            )
            for form, scores in enumerate(chosen):
                top = scores.argmax(-1)
                hits[form] += (actual[here] == np.broadcast_to(top, len(actual[here]))[:, None]).any(1).sum()
    predicted = len(held_out) * len(layers)
    share = hits / predicted if predicted else np.full(4, math.nan)
    everything = np.concatenate([counted, held_out])
    paths, observed = frequent_share(everything)
    windows = [frequent_share(everything[:, layer - 2 : layer + 1])[0] for layer in layers]
    return PathReport(
        accuracy_pairs=float(share[0]),
        accuracy_sets=float(share[1]),
        accuracy_previous=float(share[2]),
        accuracy_popularity=float(share[3]),
        frequent_paths=paths,
        frequent_windows=float(np.mean(windows)) if windows else math.nan,
        observed_paths=observed,
    )


def _empty(width: int) -> PathDictionary:
    """Return a dictionary without keys."""
    return _of_layer(0, np.zeros((0, width - 1), np.int32), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))


def _of_layer(
    layer: int, rows: Routes, sizes: NDArray[np.int64], successors: NDArray[Any], counts: NDArray[Any]
) -> PathDictionary:
    """Return the keys of one layer.

    rows: experts of each key [N, width - 1].
    sizes: successors of each key [N].
    successors, counts: of all keys [P].
    """
    keys = np.empty((len(rows), rows.shape[1] + 1), np.int32)
    keys[:, 0], keys[:, 1:] = layer, rows
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return PathDictionary(keys, offsets, successors.astype(np.uint16), counts.astype(np.uint32))


class _Fallback:
    """Probabilities of a layer's experts from one expert of the previous layer, or from popularity alone."""

    def __init__(self, counted: Routes, layer: int, experts: int) -> None:
        self.popularity = np.bincount(counted[:, layer].ravel(), minlength=experts) / max(1, len(counted))
        seen = np.bincount(counted[:, layer - 1].ravel(), minlength=experts)
        codes = _pairs(counted[:, layer - 1], counted[:, layer], experts)
        follow = np.bincount(codes.ravel(), minlength=experts**2).reshape(experts, experts)
        trusted = (seen >= LEAST_SEEN)[:, None]
        self._table = np.where(trusted, follow / np.maximum(seen, 1)[:, None], self.popularity)

    def each(self, previous: Routes) -> NDArray[np.float64]:
        """Experts of the previous layer [...] -> probabilities [..., E]."""
        return np.asarray(self._table[previous])

    def scores(self, previous: Routes) -> NDArray[np.float64]:
        """[T, K] -> [T, E], summed over K."""
        return np.asarray(self.each(previous).sum(1))


def _pair_scores(
    counted: Routes, held_out: Routes, layer: int, experts: int
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Yield, per piece of tokens, probabilities given each pair [t, K*K, E], and whether the pair is trusted [t, K*K].

    Pair i of a token combines its expert i // K of layer l-1 with its expert i % K of layer l-2.
    """
    codes = _pairs(counted[:, layer - 1], counted[:, layer - 2], experts)
    table, seen = _table(codes, counted[:, layer], experts**2, experts)
    wanted = _pairs(held_out[:, layer - 1], held_out[:, layer - 2], experts)
    for start in range(0, len(wanted), _TOKENS_PER_SCORE):
        piece = wanted[start : start + _TOKENS_PER_SCORE]
        yield table[piece], seen[piece] >= LEAST_SEEN


def _set_scores(
    counted: Routes, held_out: Routes, layer: int, experts: int
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
    """Yield, per piece of tokens, probabilities given the exact sets of two layers [t, E], and whether trusted [t]."""
    both = np.sort(np.concatenate([counted, held_out])[:, layer - 2 : layer], axis=2)
    keys = np.unique(both.reshape(len(both), -1), axis=0, return_inverse=True)[1].reshape(-1)
    table, seen = _table(keys[: len(counted), None], counted[:, layer], int(keys.max(initial=0)) + 1, experts)
    wanted = keys[len(counted) :]
    for start in range(0, len(wanted), _TOKENS_PER_SCORE):
        piece = wanted[start : start + _TOKENS_PER_SCORE]
        yield table[piece], seen[piece] >= LEAST_SEEN


def _table(
    keys: NDArray[np.int64], successors: Routes, size: int, experts: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the probability of each expert given a key [size, E], and the number of tokens with that key [size].

    keys: [T, n].
    """
    seen = np.bincount(keys.ravel(), minlength=size)
    follow = np.zeros((size, experts))
    codes, counts = _count(_pairs(keys, successors, experts), size * experts)
    follow.reshape(-1)[codes] = counts
    return follow / np.maximum(seen, 1)[:, None], seen


def _pairs(first: NDArray[np.integer], second: NDArray[np.integer], experts: int) -> NDArray[np.int64]:
    """Return codes first * E + second of all pairs of a token: [T, n], [T, m] -> [T, n*m]. `second` varies fastest."""
    codes = first.astype(np.int64)[:, :, None] * experts + second.astype(np.int64)[:, None, :]
    return codes.reshape(len(first), first.shape[1] * second.shape[1])


def _count(codes: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the codes that occur, ascending, and their counts."""
    if size > _DENSE_COUNTS:
        present, counts = np.unique(codes, return_counts=True)
        return present, counts
    dense = np.bincount(codes.ravel(), minlength=size)
    present = np.flatnonzero(dense)
    return present, dense[present]
