"""How much of a compile comparisons may take: counted, not timed, so that equal compiles compare equally.

The unit is one item of the task data that passes through the model. What the search has measured is known then; what a
baseline needs at most is known before it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moec.manifests.model import ModelSpec

from ..sensitivity.exact import EXACT_ITEMS
from ..sensitivity.trials import Trials

FREE_MULTIPLICATIONS = 5 * 10**13
"""What comparisons may take of any model: minutes on two cores. Those of the example take a fourth of it at most."""
UNIFORM, PUBLISHED, OURS = "best uniform", "EdgeMoE as published", "EdgeMoE with our quantizer"
BY_USE = (UNIFORM, OURS, PUBLISHED)
"""Baselines in the order in which they are given what may be measured."""
EDGEMOE_BITWIDTHS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class ItemCounts:
    """Items that measurements pass through the model.

    kl: of one mean KL.
    nll: of one measurement of an expert's importance.
    answers: of one loss; 0 where the target is no loss.
    """

    kl: int
    nll: int
    answers: int

    @classmethod
    def of(cls, kl: int, first_task: int, validation: int, is_loss: bool) -> ItemCounts:
        """first_task, validation: validation items of the first task and of all."""
        return cls(kl, min(EXACT_ITEMS, first_task), validation if is_loss else 0)


def bisections(count: int) -> int:
    """Measurements at most that find a place among so many."""
    return count.bit_length()


def baseline_items(model: ModelSpec, formats: int, counts: ItemCounts) -> dict[str, int]:
    """Items that each baseline needs at most, by name. formats: below 16 bits that fit every expert."""
    experts = len(model.expert_keys())
    plans = bisections(len(EDGEMOE_BITWIDTHS) + 1) + bisections(experts + 1)
    edgemoe = (1 + experts) * counts.nll + plans * (counts.kl + counts.answers)
    return {
        UNIFORM: formats * counts.kl + bisections(formats) * counts.answers,
        PUBLISHED: edgemoe,
        OURS: edgemoe,
    }


def affordable(needs: dict[str, int], searched: int, multiplications_per_item: float) -> frozenset[str]:
    """The baselines to measure: all where they take little, else those that half of the search's items suffice for.

    needs: items of each baseline. searched: items that the search has measured.
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
    """The baselines that a compile measures after its search. formats: as in baseline_items."""
    model = trials.store.lowering.model
    validation = [len(data.validation.items) for data in trials.tasks]
    counts = ItemCounts.of(trials.kl_texts, validation[0], sum(validation), is_loss)
    needs = baseline_items(model, formats, counts)
    return affordable(needs, trials.measured_items, trials.tokens_per_text * active_weights(model))


def active_weights(model: ModelSpec) -> int:
    """Weights that one token is multiplied with, those of the logits included."""
    head = prod(model.dense_shapes()[model.head_name])
    return head + sum(active_layer_weights(model, layer) for layer in range(model.num_layers))


def active_layer_weights(model: ModelSpec, layer: int) -> int:
    """Weights of one layer that one token is multiplied with."""
    experts, prefix = model.layers[layer].experts, f"layers.{layer}."
    dense = sum(prod(shape) for name, shape in model.dense_shapes().items() if name.startswith(prefix))
    one = sum(prod(model.unit_shape(layer, projection)) for projection in experts.projections) if experts.count else 0
    return dense + one * experts.top_k
