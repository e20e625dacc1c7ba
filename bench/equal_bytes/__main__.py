"""KL and perplexity over bytes: moec, one format for all, one per layer and projection, and other projects.

    python -m bench.equal_bytes MODEL --data FOLDER [--task NAME] --results FOLDER [--items N] [--ggml FILE]

The other projects are llama.cpp, GPTQModel, HQQ and AutoRound. AutoRound trains 200 steps for each layer, and has a row
only if it is asked for. The routed experts are quantized, all other weights keep 16 bits. Calibration of moec and
importance data of llama.cpp come from the same train texts. KL(checkpoint || quantized) and perplexity are measured on
test items that neither side has seen. Weights alone are compared: activations are float32 on all sides. For every
mixture of llama.cpp, moec plans at most the same bytes.

Every row is kept in FOLDER as soon as it is measured, with sums per text, and a second call continues. The table on
stdout has the ratio of mean KL, moec over the other, with a 95 % interval of paired texts. With `--executed`, a second
table compares the KL of own plans with weights alone and in the runtime, which rounds activations to 8 bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from moec.compiler.request.plan import CompilePlan
from moec.compiler.sensitivity.answer_walk import planned_weights
from moec.compiler.walker.memory import LARGE_TEXTS
from moec.compiler.walker.texts import TokenTexts
from moec.manifests.model import PROJECTIONS, UnitKey

from ..example import Example, moments_of
from ..search.grouped_space import by_layer_and_projection
from .llama_quantize import MIXTURES, GgmlBlocks, block_type, importance_of, library_path
from .our_plans import OurPlans, open_executed
from .peer_environment import rounded_by, tuned_by_autoround
from .rows import Quantized, Rows, ratio_text

BITS = (1, 1.6, 2, 3, 4, 5, 6, 8, 16)

AUTOROUND_TEXTS, AUTOROUND_TOKENS = 128, 256
"""Calibration texts of AutoRound and their length. 128 texts is its default."""

HEAD = ("format", "bits", "KL", "perplexity", "moec bits", "moec KL", "moec perplexity", "KL ratio")


class Comparison:
    """Rows of the table. Each is measured once and kept.

    results: folder of the rows.
    items: number of test items.
    """

    def __init__(self, example: Example, plans: OurPlans, results: Path, items: int) -> None:
        self._plans, self.own_plans = plans, dict[str, CompilePlan]()
        self._rows = Rows(example, results, items)
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)

    def add_plan(self, name: str, plan: CompilePlan | None) -> None:
        """Compare a plan of one kind with the searched plan of the same bytes. None: there is no plan."""
        if plan is not None:
            self.own_plans[name] = plan
            self.add(name, lambda: self._planned(plan))

    def add(self, name: str, make: Callable[[], Quantized]) -> int:
        """Print one line. make: makes the weights of the row, if it is not measured yet. Returns its bytes."""
        row = self._rows.row(name, make)
        size: int = row["bytes"]
        plan = self.own_plans.get(f"moec-{size}") or self._plans.within(size)
        if plan is not None:
            self.own_plans[f"moec-{size}"] = plan
            ours = self._rows.row(f"moec-{size}", lambda: self._planned(plan))
            cells = [name, *self._rows.figures(row), *self._rows.figures(ours), ratio_text(ours, row)]
            print(f"| {' | '.join(cells)} |", flush=True)
        return size

    def print_executed(self) -> None:
        """Print the KL of all own plans with weights alone and as executed by the runtime."""
        plain = self._plans.plain
        print(
            "\n| plan | bits | KL, weights alone | KL, executed | standard error |\n|---|---|---|---|---|", flush=True
        )
        with open_executed(self._plans.bundles, plain, self._rows.walk.answers) as executed:
            for name, plan in self.own_plans.items():
                path = self._rows.folder / f"{name}.executed.json"
                if not path.exists():
                    measured_kl = executed.kl(plan, self._plans.store)
                    path.write_text(json.dumps(measured_kl.to_json()) + "\n", encoding="utf-8")
                run = json.loads(path.read_text(encoding="utf-8"))
                alone = self._rows.figures(self._rows.kept(name))
                cells = [name, *alone[:2], f"{run['mean']:.5f}", f"{run['standard_error']:.5f}"]
                print(f"| {' | '.join(cells)} |", flush=True)

    def _planned(self, plan: CompilePlan) -> Quantized:
        return planned_weights(plan, self._plans.store), plan.expert_packed_bytes


def llama_weights(
    example: Example, blocks: GgmlBlocks, importance: Mapping[tuple[int, str], Tensor], mixture: str
) -> Quantized:
    """Return all experts after llama.cpp's quantization, and their bytes."""
    layers = example.model.num_layers

    def rounded(unit: UnitKey) -> tuple[UnitKey, Tensor, int]:
        matrix = example.lowering.unit(unit).float().numpy()
        kind = block_type(mixture, unit.projection, unit.layer, layers)
        values, size = blocks.rounded(matrix, kind, importance[unit.layer, unit.projection][unit.expert].numpy())
        return unit, torch.from_numpy(values).bfloat16(), size

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = list(pool.map(rounded, example.plain.units))
    units = {unit: values for unit, values, _ in parts}
    return lambda name: units[name].float() if name in units else None, sum(size for _, _, size in parts)


def hqq_weights(example: Example, folder: Path, bits: int, group_size: int) -> Quantized:
    """Return all experts after HQQ, and their bytes: codes, and 16 bits for scale and zero point of each group."""
    units = {unit: example.lowering.unit(unit) for unit in example.plain.units}
    rounded = rounded_by("hqq", folder, units, bits, group_size)
    weights = sum(matrix.numel() for matrix in units.values())
    size = weights * bits // 8 + 4 * weights // group_size
    return lambda name: rounded[name].float() if name in rounded else None, size


def gptqmodel_weights(
    example: Example, folder: Path, moments: Mapping[tuple[int, str], Tensor], bits: int, group_size: int
) -> Quantized:
    """Return all experts after GPTQModel, and their bytes: codes, 16 bits of scale and a zero point in each group."""
    units = {unit: example.lowering.unit(unit) for unit in example.plain.units}
    rounded = rounded_by("gptqmodel", folder, units, bits, group_size, moments)
    weights = sum(matrix.numel() for matrix in units.values())
    return lambda name: rounded[name].float() if name in rounded else None, with_zero_points(weights, bits, group_size)


def autoround_weights(
    example: Example, model: Path, folder: Path, texts: TokenTexts, bits: int, group_size: int
) -> Quantized:
    """Return all experts after AutoRound, and their bytes as those of GPTQModel.

    texts: laid end to end and cut to AUTOROUND_TEXTS of AUTOROUND_TOKENS tokens.
    """
    wanted = AUTOROUND_TEXTS * AUTOROUND_TOKENS
    tokens = list(itertools.islice(itertools.chain.from_iterable(texts.rows), wanted))
    cut = torch.tensor(tokens[: len(tokens) // AUTOROUND_TOKENS * AUTOROUND_TOKENS]).view(-1, AUTOROUND_TOKENS)
    rounded = tuned_by_autoround(folder, model, cut, example.plain.units, bits, group_size)
    weights = sum(matrix.numel() for matrix in rounded.values())
    return lambda name: rounded[name].float() if name in rounded else None, with_zero_points(weights, bits, group_size)


def with_zero_points(weights: int, bits: int, group_size: int) -> int:
    """Return the bytes of codes, and of 16 bits of scale and a zero point in each group."""
    return (weights * bits + (16 + bits) * weights // group_size) // 8


def add_peers(table: Comparison, example: Example, plans: OurPlans, options: argparse.Namespace) -> None:
    """Compare with llama.cpp, HQQ, GPTQModel and AutoRound. All calibrate on the texts of moec's calibration."""
    blocks = cache(lambda: GgmlBlocks(options.ggml or library_path()))

    def calibration_texts() -> TokenTexts:
        return example.texts(example.splits.train.items).first(LARGE_TEXTS.calibration)

    @cache
    def moments() -> dict[tuple[int, str], Tensor]:
        inputs, _ = example.calibrated(calibration_texts())
        moments = dict[tuple[int, str], Tensor]()
        for layer, seen in enumerate(inputs):
            moments |= {(layer, projection): moments_of(seen, projection) for projection in PROJECTIONS}
        return moments

    @cache
    def importance() -> dict[tuple[int, str], Tensor]:
        return importance_of(example, calibration_texts())

    # Calibration and the library of llama.cpp wait until a row needs them.
    def by_llama(mixture: str) -> Quantized:
        return llama_weights(example, blocks(), importance(), mixture)

    def by_gptqmodel(bits: int, group_size: int) -> Quantized:
        return gptqmodel_weights(example, options.results, moments(), bits, group_size)

    def by_autoround(bits: int, group_size: int) -> Quantized:
        return autoround_weights(example, Path(options.model), options.results, calibration_texts(), bits, group_size)

    for mixture in filter(None, options.mixtures.split(",")):
        size = table.add(mixture, partial(by_llama, mixture))
        table.add_plan(f"layers-{size}", plans.grouped(size, by_layer_and_projection))
    for setting in filter(None, options.hqq.split(",")):
        bits, group_size = map(int, setting.split(":"))
        table.add(f"HQQ-{bits}g{group_size}", partial(hqq_weights, example, options.results, bits, group_size))
    for setting in filter(None, options.gptqmodel.split(",")):
        bits, group_size = map(int, setting.split(":"))
        table.add(f"GPTQModel-{bits}g{group_size}", partial(by_gptqmodel, bits, group_size))
    for setting in filter(None, options.autoround.split(",")):
        bits, group_size = map(int, setting.split(":"))
        table.add(f"AutoRound-{bits}g{group_size}", partial(by_autoround, bits, group_size))


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description="KL and perplexity over bytes.")
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--task", default="perplexity")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--items", type=int, default=200, help="test items")
    parser.add_argument("--mixtures", default=",".join(MIXTURES))
    parser.add_argument("--uniform", default="all", help="formats of uniform plans, such as q4g64b; `all`, or none")
    parser.add_argument("--swaps", type=int, help="swaps of each search; default: those of a compile")
    parser.add_argument("--executed", action="store_true", help="also run own plans in the runtime")
    parser.add_argument("--hqq", default="2:64,3:64,4:64,5:64,6:64,8:64", help="bits:group size of HQQ, repeated")
    parser.add_argument("--gptqmodel", default="2:64,3:64,4:64,4:32,8:64", help="the same of GPTQModel")
    parser.add_argument("--autoround", default="", help="the same of AutoRound; default: none")
    parser.add_argument("--ggml", type=Path, help="libggml-base.so; default: that of llama-cpp-python")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    plans = OurPlans(options.model, options.data, options.task, options.results / "work", BITS, options.swaps)
    example = Example(options.model, options.data, options.task)
    table = Comparison(example, plans, options.results, options.items)
    wanted = options.uniform.split(",")
    for name, plan in plans.uniform().items():
        if name in wanted or options.uniform == "all":
            table.add_plan(f"uniform-{name}", plan)
    add_peers(table, example, plans, options)
    if options.executed:
        table.print_executed()


if __name__ == "__main__":
    main()
