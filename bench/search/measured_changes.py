"""The best plan under measured changes of the answers, next to the plan of a compile.

    python -m bench.search.measured_changes MODEL --data FOLDER --task NAME --results FOLDER

Every routed matrix is rounded to every format alone, and the change of the log-probabilities of validation answers is
kept. The changes of a plan's matrices are added, so the KL of every pair and of every plan is known without another
pass, as far as changes add up. A local search then finds the plan of least KL within the bytes of the compile's plan.
It changes single formats at a price per byte, and then exchanges the formats of random pairs. Both plans are measured
on test items that nothing else used. What the plan of the local search saves is what better prices of the same formats
can save.

Shapes: U matrices, S formats, A scored tokens, V the likeliest tokens of the vocabulary, and one place for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moec.compiler.quantization.unit_store import UnitStore
from moec.compiler.request.plan import CompilePlan
from moec.compiler.search.knapsack import ChoiceTable
from moec.compiler.search.space import SearchSpace
from moec.compiler.sensitivity.answer_walk import planned_weights
from moec.compiler.walker.loaded_layer import LoadedLayer, WeightName
from moec.compiler.walker.texts import AnswerTexts, TextStates
from moec.compiler.workspace.parallel import workers

from ..equal_bytes.rows import Row, Rows, ratio_text
from ..example import Example
from .grouped_space import by_layer_and_projection, grouped, with_formats
from .measured_model import floats, measure_model, model_options, model_parser, plan_of_size, say
from .plans import markdown

FORMATS = ("q1g64b", "q1.6s", "q2g64b", "q2g32b", "q3g64b", "q3g32b", "q4g64b", "q5g64b")
KEPT_TOKENS = 24  # of the vocabulary, the likeliest ones
AT_ONCE = 48  # changes whose texts pass the later layers together
PRICES, SWEEPS, PAIRS = 12, 6, 600
FIRST = "compile"
HEAD = ("plan", "bits per weight", "KL of the sum", "KL, validation", "KL, test", "KL over the first (95 %)")


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes of the answers by every choice.

    own: log-probabilities of the unquantized model, float32 [A, V].
    changes: differences from it with matrix u in format s alone, float16 [U, S, A, V].
    kl: KL of every choice alone, nats per token, float64 [U, S].
    """

    own: Tensor
    changes: Tensor
    kl: np.ndarray

    def sum_of(self, choice: np.ndarray) -> Tensor:
        """Return the sum of the changes of a choice [U], float32 [A, V]."""
        total = torch.zeros_like(self.own)
        for unit, spec in enumerate(choice.tolist()):
            total += self.changes[unit, spec]
        return total

    def kl_of_sums(self, sums: Tensor) -> np.ndarray:
        """Return the KL of summed changes [..., A, V] in nats per token, [...]. They are normalized first."""
        p = self.own.exp()
        return ((self.own + sums).logsumexp(-1) - (p * sums).sum(-1)).mean(-1).double().numpy()


class Choices:
    """Formats of the matrices of one space: U matrices in S formats.

    space: its columns with finite costs are the formats.
    """

    def __init__(self, space: SearchSpace) -> None:
        self.space, self.units = space, space.units
        costs = space.size_table().costs[: len(space.units)]
        self._columns = np.flatnonzero(np.isfinite(costs).all(0))
        self.costs: np.ndarray = costs[:, self._columns]
        self.specs = [space.unit_specs[int(column)] for column in self._columns]

    def of_plan(self, plan: CompilePlan) -> np.ndarray:
        """Return the format of each matrix of a plan, [U]."""
        return np.array([self.specs.index(plan.units[unit]) for unit in self.units])

    def plan(self, choice: np.ndarray) -> CompilePlan:
        """Return the plan of a choice [U]. All other weights keep 16 bits."""
        units = {unit: self.specs[int(at)] for unit, at in zip(self.units, choice, strict=True)}
        return replace(self.space.plain, units=units)

    def with_losses(self, losses: np.ndarray) -> SearchSpace:
        """Return the space with other losses, [U, S]."""
        table = self.space.table.losses.copy()
        table[: len(losses), self._columns] = losses
        return replace(self.space, table=ChoiceTable(self.space.table.costs, table))


def measured_changes(answers: AnswerTexts, slot: LoadedLayer, choices: Choices, store: UnitStore) -> Changes:
    """Round every matrix to every format alone, and measure what it changes.

    store: the quantized weights.
    """
    layers, head = slot.model.num_layers, slot.head()
    shape = len(choices.units), len(choices.specs)

    def scored(texts: TextStates) -> Tensor:
        return head.logits(slot.normed(texts.scored_states(answers.counts))).log_softmax(-1)

    with workers(torch.get_num_threads()) as pool:
        before = [TextStates.begin(answers.texts, slot.embed)]
        for layer in range(layers):
            slot.load(layer)
            before.append(before[-1].copy())
            slot.run([before[-1]], pool)
        own = scored(before.pop())
        tokens = own.topk(KEPT_TOKENS).indices
        first = kept_tokens(own, tokens)
        changes, kl = torch.empty((*shape, *first.shape), dtype=torch.float16), np.empty(shape)
        for layer in range(layers):
            here = [(u, s) for u in range(shape[0]) if choices.units[u].layer == layer for s in range(shape[1])]
            for start in range(0, len(here), AT_ONCE):
                part = here[start : start + AT_ONCE]
                changed = [before[layer].copy() for _ in part]
                for (u, s), texts in zip(part, changed, strict=True):
                    slot.load(layer, one_weight(choices, u, s, store))
                    slot.run([texts], pool)
                for later in range(layer + 1, layers):
                    slot.load(later)
                    slot.run(changed, pool)
                for (u, s), texts in zip(part, changed, strict=True):
                    log_q = scored(texts)
                    changes[u, s] = kept_tokens(log_q, tokens) - first
                    kl[u, s] = float((own.exp() * (own - log_q)).sum(-1).mean())
            say(f"layer {layer + 1} of {layers}: {len(here)} changes")
    return Changes(first, changes, kl)


def kept_tokens(log_p: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of some tokens, and of all others together. [A, vocabulary] -> [A, V]."""
    found = log_p.gather(1, tokens)
    rest = log_p.scatter(1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([found, rest], 1)


def one_weight(choices: Choices, unit: int, spec: int, store: UnitStore) -> Callable[[WeightName], Tensor | None]:
    """Return what replaces one matrix by its quantized weights."""
    changed = choices.units[unit]
    return lambda name: store.weight(changed, choices.specs[spec]) if name == changed else None


class LocalSearch:
    """Changes formats of a plan as long as the KL of the summed changes falls."""

    def __init__(self, choices: Choices, changes: Changes, budget: float) -> None:
        self._costs, self._changes, self._budget = choices.costs, changes, budget
        self._draw = np.random.default_rng(0)

    def best(self, start: np.ndarray) -> np.ndarray:
        """Return the choice [U] of least KL within the budget that is found from a start."""
        low, high, found = 1e-12, 1e-5, start  # nats per byte
        for _ in range(PRICES):
            price = float(np.sqrt(low * high))
            found = self._at_price(found, price)
            low, high = (low, price) if self._size(found) <= self._budget else (price, high)
        return self._exchanged(self._at_price(found, high))

    def _size(self, choice: np.ndarray) -> float:
        return float(self._costs[np.arange(len(choice)), choice].sum())

    def _at_price(self, choice: np.ndarray, price: float) -> np.ndarray:
        """Change one format after the other until none lowers the KL plus the price of the bytes."""
        choice, total = choice.copy(), self._changes.sum_of(choice)
        for _ in range(SWEEPS):
            before = choice.copy()
            for unit in self._draw.permutation(len(choice)):
                others = total - self._changes.changes[unit, choice[unit]]
                sums = others + self._changes.changes[unit].float()
                best = int((self._changes.kl_of_sums(sums) + price * self._costs[unit]).argmin())
                choice[unit], total = best, sums[best]
            if np.array_equal(before, choice):
                break
        return choice

    def _exchanged(self, choice: np.ndarray) -> np.ndarray:
        """Try all formats of random pairs of matrices within the budget."""
        choice, total = choice.copy(), self._changes.sum_of(choice)
        formats = self._costs.shape[1]
        for _ in range(PAIRS):
            one, other = self._draw.choice(len(choice), 2, replace=False).tolist()
            free = self._budget - self._size(choice)
            free += self._costs[one, choice[one]] + self._costs[other, choice[other]]
            pairs = [
                (first, second)
                for first in range(formats)
                for second in range(formats)
                if self._costs[one, first] + self._costs[other, second] <= free
            ]
            rest = total - self._changes.changes[one, choice[one]] - self._changes.changes[other, choice[other]]
            firsts, seconds = (self._changes.changes[unit].float() for unit in (one, other))
            sums = torch.stack([rest + firsts[first] + seconds[second] for first, second in pairs])
            at = int(self._changes.kl_of_sums(sums).argmin())
            (choice[one], choice[other]), total = pairs[at], sums[at]
        return choice


def plans_of(choices: Choices, changes: Changes, bits: float) -> dict[str, CompilePlan]:
    """Return plans within some bits per weight."""
    space = choices.space
    budget = bits * space.plain.expert_weights / 8
    found = {
        FIRST: plan_of_size(space, budget),
        "one format per layer and projection": plan_of_size(grouped(space, by_layer_and_projection), budget),
        "measured alone": plan_of_size(choices.with_losses(changes.kl), budget),
    }
    plans = {name: plan for name, plan in found.items() if plan is not None}
    if FIRST not in plans:
        raise SystemExit(f"no plan has {bits:g} bits per weight")
    best = LocalSearch(choices, changes, budget).best(choices.of_plan(plans[FIRST]))
    return plans | {"measured together": choices.plan(best)}


def kept(path: Path, make: Callable[[], Changes]) -> Changes:
    """Return measured changes. They are measured once."""
    if not path.exists():
        found = make()
        new = path.with_suffix(".new")
        save_file({"own": found.own, "changes": found.changes, "kl": torch.from_numpy(found.kl)}, new)
        new.rename(path)
    data = load_file(path)
    return Changes(data["own"], data["changes"], data["kl"].numpy())


def measured_row(rows: Rows, name: str, plan: CompilePlan, store: UnitStore) -> Row:
    """Return the row of a plan on test items. It is measured once."""
    return rows.row(name, lambda: (planned_weights(plan, store), plan.expert_packed_bytes))


def main() -> None:
    """Read the command line, measure and print."""
    parser = model_parser("The best plan under measured changes of the answers.")
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats of the plans, with commas")
    parser.add_argument("--budgets", type=floats, default=(2.0, 2.5, 3.0, 3.5), help="bits per weight")
    parser.add_argument("--items", type=int, default=200, help="items of validation, and of the test")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    measured = measure_model(given.model, model_options(given, 0.02), given.work or given.results / "work")
    single, store = measured.space.without_pruning(), measured.measured.store
    names = [str(spec) for spec in single.unit_specs]
    choices = Choices(with_formats(single, lambda column: names[column] in given.formats.split(",")))
    example = Example(given.model, given.data, given.task)
    seen = example.walk(example.splits.validation.items[: given.items])
    changes = kept(
        given.results / "changes.safetensors", lambda: measured_changes(seen.answers, example.slot, choices, store)
    )
    rows, lines = Rows(example, given.results, given.items), []
    for bits in given.budgets:
        own: Row | None = None
        for name, plan in plans_of(choices, changes, bits).items():
            row = measured_row(rows, f"{bits:g}-{name.replace(' ', '-')}", plan, store)
            own = own or row
            size, kl, _ = rows.figures(row)
            validation = seen.measure(planned_weights(plan, store)).kl.mean()
            summed = float(changes.kl_of_sums(changes.sum_of(choices.of_plan(plan))))
            ratio = "" if name == FIRST else ratio_text(row, own)
            lines.append([name, size, f"{summed:.6f}", f"{validation:.6f}", kl, ratio])
            say(" | ".join(lines[-1]))
    print(markdown(HEAD, lines))


if __name__ == "__main__":
    main()
