"""Plans of equal KL by other costs of a byte: popularity, misses of a simulated cache, and room in it.

Run in the root of the repository, after the measurements of `bench.search.gain` in the folder WORK:

    PYTHONPATH=build/links python bench/results/2026-11-27-natural-reads/weights.py WORK
"""

import argparse
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np

import moec.compiler.stages.planning as planning
from bench.example import Example
from bench.search.gain import ALL, Gain
from bench.search.measured_model import BITS, model_options, say
from bench.search.reads import Routes
from moec.compiler.request.objective import ByteWeights
from moec.compiler.request.targets import Target
from moec.compiler.search.bisect import search
from moec.compiler.search.swaps import NO_SWAPS
from moec.evaluation.divergence import divergence_bound

MODEL, DATA, TASK, ITEMS = "build/example-smollm2/model", "build/example-smollm2/data/prose", "perplexity", 32
given = argparse.Namespace(data=DATA, task=TASK, bits=BITS, limit=ITEMS)
gain = Gain(MODEL, model_options(given, 0.02), Path(sys.argv[1]))
layers, experts = gain.popularity.shape
example = Example(MODEL, DATA, TASK)
test = Routes(example, example.splits.test.items[:ITEMS], gain.popularity)
train = Routes(example, example.splits.train.items[:64], gain.popularity)
first = gain.within(ALL, 3.5 * gain.expert_weights / 8)
cache = first.expert_packed_bytes // 2
kl = divergence_bound(gain.measured.trials.kl(first, ALL))


def lru(accesses, room):
    """Return uses and misses of each expert, with room for some experts of equal size."""
    held, uses, misses = OrderedDict(), np.zeros(layers * experts), np.zeros(layers * experts)
    for _, chosen in accesses:
        for expert in chosen:
            uses[expert] += 1
            if expert in held:
                held.move_to_end(expert)
                continue
            misses[expert] += 1
            if len(held) >= room:
                held.popitem(last=False)
            held[expert] = None
    return uses, misses


def by_misses(routes):
    """A byte is read at each miss of its expert. While it is held, it takes room: reads that another byte saves."""
    room = layers * experts // 2
    uses, misses = lru(routes._accesses, room)
    _, fewer = lru(routes._accesses, int(1.05 * room))
    saved = (misses.sum() - fewer.sum()) / (0.05 * room)
    return misses + saved * (1 - misses / np.maximum(uses, 1))


def by_che(share):
    """The same from popularity alone. An expert is absent with probability exp(-p t), and t fills half of the cache."""
    low, high = 0.0, 1e6
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if (1 - np.exp(-share * t)).mean() < 0.5 else (low, t)
    absent = np.exp(-share * t)
    return share * absent + (share**2 * absent).sum() / (share * absent).sum() * (1 - absent)


def print_plan(name, weights, size_share=0.1):
    weights = (1 - size_share) * weights / weights.mean() + size_share
    planning.byte_weights = lambda *_: ByteWeights(weights.reshape(layers, experts), 1.0)
    space = planning.open_space(gain._prepared, gain.measured).without_pruning()
    plan = search(space, gain.measured.trials, Target("kl", kl), say, NO_SWAPS)
    read, hits = test.bytes_per_token(plan, cache)
    whole, _ = test.bytes_per_token(first, cache)
    found = gain.measured.trials.kl(plan, name).mean
    print(f"| {name} | {plan.expert_packed_bytes:,} | {plan.bits_per_weight:.3f} | {found:.5f} | {hits:.3f} | "
          f"{read:,.0f} | {read / whole:.3f} |", flush=True)  # fmt: skip


share = (gain.popularity / gain.popularity.sum(axis=1, keepdims=True) * experts).reshape(-1)
print_plan("size", np.ones(layers * experts))
print_plan("popularity", share)
print_plan("popularity and the probability to be absent", by_che(share))
print_plan("misses on train texts", by_misses(train))
print_plan("misses on the test texts", by_misses(test))
print_plan("misses on the test texts, without the tenth for size", by_misses(test), 0.001)
train_misses, test_misses = (lru(routes._accesses, layers * experts // 2)[1] for routes in (train, test))
print("use over its mean, 5 % and 95 %:", np.percentile(share, [5, 95]).round(2))
print(
    "misses on the test texts over their mean, 5 % and 95 %:",
    np.percentile(test_misses / test_misses.mean(), [5, 95]).round(2),
)
print("correlation of use and misses:", np.corrcoef(share, test_misses)[0, 1].round(2))
print("correlation of misses, train and test:", np.corrcoef(train_misses, test_misses)[0, 1].round(2))
