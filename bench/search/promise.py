"""Simulated compiles to a loss on recorded answers: how often the promise is supported, and how often it is false.

    moec eval CHECKPOINT --task gsm8k --data FRESH.jsonl --per-item FOLDER/checkpoint.jsonl
    moec eval BUNDLE --task gsm8k --data FRESH.jsonl --per-item FOLDER/NAME.jsonl      (for each plan)
    python -m bench.search.promise FOLDER NAME=BUNDLE ... [--target 0.02] [--draws N] [--items N] [--certified N]

The answers must be those to items that no compile has read. `NAME` is the stem of a plan's file in `FOLDER`.
The recorded run had 8,000 items of `example_model.items.draw_new` with the seed 54054, none of them in the splits. Its
plans were the shipped bundle and compiles of the example with `--swaps 0 --no-comparisons` to a KL of 0.0008, 0.0012,
0.0018, 0.0026, 0.0036 and 0.005, and `--draws 60`.
Each draw takes validation and held-out items of their own from all recorded ones. The search and the certificate judge
as in a compile, with plans of a fixed grid. A promise is false if the plan loses more than the target on all items.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from moec.compiler.search.loss_by_kl import LossByKl, MeasuredPlan
from moec.compiler.search.loss_search import MAX_GENERATED
from moec.compiler.sensitivity.acceptance import LEVELS, TRIAL_RESAMPLES, Level
from moec.evaluation.statistics import ERROR, judge, relative_loss


def scores_of(path: Path) -> np.ndarray:
    """Return the score of each item."""
    return np.array([json.loads(line)["score"] for line in path.read_text().splitlines()])


def main() -> None:
    """Print one row for the list of plans, and one for its first plan alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("plans", nargs="+", metavar="NAME=BUNDLE")
    parser.add_argument("--target", type=float, default=0.02)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--certified", type=int, default=4000)
    options = parser.parse_args()
    baseline = scores_of(options.folder / "checkpoint.jsonl")
    rows = []
    for name, bundle in (plan.split("=", 1) for plan in options.plans):
        quality = json.loads((Path(bundle) / "quality.json").read_text())
        (task,) = quality["tasks"].values()
        rows.append(
            (task["kl"]["mean"], quality["sizes"]["expert_packed_bytes"], scores_of(options.folder / f"{name}.jsonl"))
        )
    rows.sort(key=lambda row: row[0])
    kls, sizes, scores = [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]
    true_losses = [1 - plan_scores.mean() / baseline.mean() for plan_scores in scores]
    for kl, size, loss in zip(kls, sizes, true_losses, strict=True):
        print(f"KL {kl:.5f}, {size:,} bytes of experts, loss on all {len(baseline):,} items {loss:.2%}")
    print("plans  supported  false  tested  answered  mean log bytes")
    for levels in (LEVELS, (Level(1.2816, 1.0),)):
        draws = [simulated(seed, options, levels, baseline, kls, scores, true_losses) for seed in range(options.draws)]
        supported, false, tested, answered = np.array([draw[:4] for draw in draws], float).mean(axis=0)
        mean_bytes = np.mean([np.log(sizes[draw[4]]) for draw in draws])
        print(f"{len(levels):5d}  {supported:9.3f}  {false:5.3f}  {tested:6.2f}  {answered:8.2f}  {mean_bytes:14.3f}")


def simulated(
    seed: int,
    options: argparse.Namespace,
    levels: tuple[Level, ...],
    baseline: np.ndarray,
    kls: list[float],
    scores: list[np.ndarray],
    true_losses: list[float],
) -> tuple[bool, bool, int, int, int]:
    """Return of one compile: supported, false promise, tested plans, plans that answered, index of the plan."""
    order = np.random.default_rng(seed).permutation(len(baseline))
    validation, held_out = order[: options.items], order[options.items :][: options.certified]
    relation = LossByKl(options.target, {"task": options.certified})
    answered, kept, at = set[int](), list[int](), len(kls) // 2
    while at not in answered and len(answered) < MAX_GENERATED:
        answered.add(at)
        loss = relative_loss(baseline[validation], scores[at][validation], resamples=TRIAL_RESAMPLES)
        plan = MeasuredPlan(kls[at], {"task": loss})
        relation.add(plan)
        kept += [at] if relation.bound_of(plan, "task", levels[0]) <= options.target else []
        at = plan_within(kls, relation.used_up(levels[0]))
    first = max(kept, default=0)
    places = [first]
    for level in levels[1:]:
        places.append(min(plan_within(kls, relation.used_up(level)), max(places[-1] - 1, 0)))
    for tested, (place, level) in enumerate(zip(dict.fromkeys(places), levels, strict=False), 1):
        error = round(ERROR * level.share, 12)
        loss = relative_loss(baseline[held_out], scores[place][held_out], error=error)
        if judge(loss, options.target).supported:
            return True, true_losses[place] > options.target, tested, len(answered), place
    return False, False, tested, len(answered), first


def plan_within(kls: list[float], limit: float) -> int:
    """Return the plan of most KL within a limit, or that of least KL."""
    return max((at for at, kl in enumerate(kls) if kl <= limit), default=0)


if __name__ == "__main__":
    main()
