"""Budget of the comparisons, counted in items and not in time, so that equal compiles make equal comparisons.

The unit is one item of the task data that passes through the model. The items of the search are known by then. The
maximum for a baseline is known before it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from moec.manifests.model import ModelSpec
from moec.profiles.weight_counts import active_weights

from ..sensitivity.exact import EXACT_ITEMS
from ..sensitivity.trials import Trials

FREE_MULTIPLICATIONS = 5 * 10**13
"""Multiplications that comparisons may always use: minutes on two cores. The example uses a fourth of it at most."""
UNIFORM, PUBLISHED, OURS = "best uniform", "EdgeMoE as published", "EdgeMoE with our quantizer"
BY_POPULARITY = "EdgeMoE with our quantizer, by popularity"
BY_USE = (UNIFORM, OURS, PUBLISHED)
"""Baselines in the order in which they receive budget."""
EDGEMOE_BITWIDTHS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class ItemCounts:
    """Items that pass through the model in one measurement.

    kl: for one mean KL.
    nll: for the importance of one expert.
    answers: for one loss, 0 if the target is no loss.
    """

    kl: int
    nll: int
    answers: int

    @classmethod
    def of(cls, kl: int, first_task: int, validation: int, is_loss: bool) -> ItemCounts:
        """Count from the validation items of the first task and of all tasks."""
        return cls(kl, min(EXACT_ITEMS, first_task), validation if is_loss else 0)


def bisections(count: int) -> int:
    """Return the maximum number of measurements that locate one of `count` places."""
    return count.bit_length()


def baseline_items(model: ModelSpec, formats: int, counts: ItemCounts) -> dict[str, int]:
    """Return the maximum number of items for each baseline, by name.

    formats: number of formats below 16 bits that fit every expert.
    """
    experts = len(model.expert_keys())
    plans = bisections(len(EDGEMOE_BITWIDTHS) + 1) + bisections(experts + 1)
    edgemoe = (1 + experts) * counts.nll + plans * (counts.kl + counts.answers)
    return {
        UNIFORM: formats * counts.kl + bisections(formats) * counts.answers,
        PUBLISHED: edgemoe,
        OURS: edgemoe,
    }


def affordable(needs: dict[str, int], searched: int, multiplications_per_item: float) -> frozenset[str]:
    """Return the baselines to measure: all if they are cheap, else those within half of the search's items.

    needs: items of each baseline.
    searched: items that the search has measured.
    """
    if sum(needs.values()) * multiplications_per_item <= FREE_MULTIPLICATIONS:
        return frozenset(needs)
    left, chosen = searched // 2, set[str]()
    for name in BY_USE:
        if needs[name] <= left:
            left -= needs[name]
            chosen.add(name)
    # EdgeMoE's search takes the group size of the best uniform format.
    return frozenset(chosen if UNIFORM in chosen else ())


def affordable_here(trials: Trials, formats: int, is_loss: bool) -> frozenset[str]:
    """Return the baselines that a compile measures after its search.

    formats: see baseline_items.
    """
    model = trials.store.lowering.model
    validation = [len(data.validation.items) for data in trials.tasks]
    counts = ItemCounts.of(trials.kl_texts, validation[0], sum(validation), is_loss)
    needs = baseline_items(model, formats, counts)
    return affordable(needs, trials.measured_items, trials.tokens_per_text * active_weights(model))
