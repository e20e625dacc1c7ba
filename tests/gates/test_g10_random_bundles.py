"""G10: a bundle that `moec verify` accepts can run. Random valid bundles of every kind, and changed ones.

Each bundle is verified, opened and run by engines with random options. That happens in child processes with a limit of
address space and of processor time. `MOEC_FULL_GATES=1` takes 500 bundles instead of the few of the fast suite.

As a program: `python -m tests.gates.test_g10_random_bundles FIRST COUNT ENGINES CHANGES` prints a JSON line per seed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from moec.manifests.bundle import BundleManifest
from moec.manifests.errors import (
    BundleError,
    ContextOverflow,
    ExecutionError,
    KernelUnavailable,
    MemoryBudgetExceeded,
    OptionError,
)
from moec.manifests.model import ModelSpec
from moec.manifests.runtime_limits import IO_MODES
from moec.runtime import kernels, load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.engine.batch import generate_many
from moec.runtime.engine.beam import BeamOptions, beam_search
from moec.runtime.engine.engine import Engine
from moec.runtime.options.runtime import KV_NAMES, POLICIES, PREFETCH_RULES, PREFETCHERS
from moec.runtime.text.sampling import SamplingOptions
from tests.gates.damage import check, plain_manifest, seal
from tests.hostile.bundle_writer import KINDS_OF_WEIGHTS
from tests.hostile.random_bundles import chance, draw_plan, random_model, write_random_bundle
from tests.manifests.examples import get, paths, put

pytestmark = pytest.mark.gate("G10")

IS_FULL = os.environ.get("MOEC_FULL_GATES") == "1"
FIRST, BUNDLES, BUNDLES_PER_CHILD = 20_000, 500 if IS_FULL else 80, 50 if IS_FULL else 40
ENGINES, CHANGES = (4, 12) if IS_FULL else (3, 5)
PATIENCE_S = 1200
ROOT = Path(__file__).parents[2]
ADDRESS_BYTES, CPU_S_PER_SEED = 4 << 30, 60
LOSSY: tuple[dict[str, str], ...] = (
    {"lossy": "dynamic-precision 0,0.4"}, {"lossy": "dynamic-precision 0.6,1"}, {"lossy": "dynamic-precision 0.3,0.3"},
    {"lossy": "big-little gamma=0.9"}, {"lossy": "big-little gamma=0.3,k=1"}, {"lossy": "cache-routing margin=0.9"},
    {"lossy": "cache-routing margin=0.2,drop=0.5 + dynamic-precision 0,1"},
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 5, 16, 64, 2**31, 2**63 - 1, 0.5, -0.0, 1e-300, 1e308, "", "x", "q8g32", "bf16",
    "q0", "sigmoid", "relu", "none", "all", [], [0], {}, ...,
)  # fmt: skip


def random_options(source: random.Random, manifest: BundleManifest) -> dict[str, Any]:
    """Return options of an engine. Most of them fit the bundle."""
    cost = manifest.cost
    cache = source.choice(("100%", "50%", str(cost.minimum_expert_bytes), str(cost.minimum_expert_bytes + 4096)))
    options: dict[str, Any] = {
        "context": min(source.choice((16, 16, 40, 40, 1)), manifest.model.max_positions),
        "policy": source.choice(POLICIES),
        "prefetch": source.choice(PREFETCHERS),
        "prefetch_rule": source.choice(PREFETCH_RULES),
        "prefetch_layers": source.randint(1, 4),
        "prefetch_experts": source.choice((0, 0, 1, 5, 1024)),
        "io": source.choice(IO_MODES),
        "kv": source.choice(KV_NAMES),
        "threads": source.choice((1, 1, 2, 3)),
        "readers": source.choice((1, 2, 5)),
        "slots": source.choice((1, 1, 2, 3)),
        "verify": chance(source, 0.7),
        "cache_state": source.choice(("warm", "cold")),
    }
    options.update({"memory": "3GiB"} if chance(source, 0.2) else {"expert_cache": cache})
    if options["policy"].startswith("hobbit") and chance(source, 0.5):
        options["policy_weights"] = "0.1,0.5,0,0.4"
    routers = [layer.experts.router for layer in manifest.model.layers]
    takes_modes = manifest.model.encoder is None and not any(router.static for router in routers)
    if chance(source, 0.5 if takes_modes else 0.02):
        options.update(source.choice(LOSSY))
    return options


def _generate(engine: Engine, source: random.Random, prompt: list[int]) -> int:
    sampling = SamplingOptions(temperature=0.8, seed=1) if chance(source, 0.3) else None
    return len(list(engine.generate(prompt, max_new_tokens=4, sampling=sampling)))


def _side_by_side(engine: Engine, source: random.Random, prompt: list[int]) -> int:
    prompts = [prompt, prompt[:1], prompt[::-1]]
    drafts = [source.choice(([], prompt[:2])) for _ in prompts]
    return sum(map(len, generate_many(engine, prompts, drafts, [3, 2, 1])))


def _beams(engine: Engine, source: random.Random, prompt: list[int]) -> int:
    return len(beam_search(engine, prompt, 3, BeamOptions(engine.options.slots)))


def _all_logits(engine: Engine, source: random.Random, prompt: list[int]) -> int:
    own = prompt if engine.model.spec.encoder is not None else ()
    return len(engine.logits(prompt, own))


USES: tuple[Callable[[Engine, random.Random, list[int]], int], ...] = (
    _generate,
    _generate,
    _side_by_side,
    _beams,
    _all_logits,
)


def random_prompt(source: random.Random, model: ModelSpec, context: int) -> list[int]:
    """Return token ids of the vocabulary. Most prompts fit into the context."""
    most = context - 4 if chance(source, 0.95) else 100
    return [source.randrange(model.vocab_size) for _ in range(max(1, min(most, source.choice((1, 2, 5, 9)))))]


def run_once(bundle: Path, source: random.Random, manifest: BundleManifest) -> str:
    """Load the bundle with random options, use it, and return the outcome. Raises errors that are not allowed."""
    options = random_options(source, manifest)
    prompt = random_prompt(source, manifest.model, options["context"])
    names = kernels.available()
    kernels.select(source.choice((names[0], names[0], "numpy", source.choice(names))))
    try:
        with load(bundle, **options) as engine:
            for use in source.sample(USES, 2):
                use(engine, source, prompt)
            engine.cache.check_invariants()
        return "tokens"
    except (OptionError, MemoryBudgetExceeded, ContextOverflow, KernelUnavailable) as error:
        return type(error).__name__
    except ExecutionError as error:
        if "NaN or infinity" not in error.message:
            raise
        return "NaN"
    except Exception as error:
        raise AssertionError(f"kernels {kernels.active()}, prompt {prompt}, options {options}") from error


def run_seed(folder: Path, seed: int, engines: int) -> dict[str, int]:
    """Verify the bundle of a seed and run it with several engines. Return the count of each outcome."""
    manifest, source, found = write_random_bundle(folder, seed), random.Random(f"runs of {seed}"), dict[str, int]()
    check(folder)
    for _ in range(engines):
        outcome = run_once(folder, source, manifest)
        found[outcome] = found.get(outcome, 0) + 1
    return found


def run_changed(folder: Path, seed: int, changes: int) -> dict[str, int]:
    """Change one field of the manifest of a seed, several times. Each is refused or runs."""
    write_random_bundle(folder, seed)
    original, source, found = plain_manifest(folder), random.Random(f"changes of {seed}"), dict[str, int]()
    every = paths(original)
    model = [path for path in every if path.startswith("model") and ".static." not in path]
    for _ in range(changes):
        path, plain = source.choice(model if chance(source, 0.8) else every), deepcopy(original)
        same_field = [other for other in model if other.rpartition(".")[2] == path.rpartition(".")[2]]
        value = get(plain, source.choice(same_field)) if same_field and chance(source, 0.4) else source.choice(VALUES)
        put(plain, path, value)
        seal(folder, plain)
        try:
            outcome = _changed_outcome(folder, source)
        except Exception as error:
            raise AssertionError(f"`{path}` is {value!r}") from error
        found[outcome] = found.get(outcome, 0) + 1
    return found


def _changed_outcome(folder: Path, source: random.Random) -> str:
    try:
        check(folder)
        return run_once(folder, source, open_bundle(folder).manifest)
    except BundleError:
        return "refused"


def main(first: int, count: int, engines: int, changes: int) -> None:
    """Run seeds one after the other. A line before each names the seed that would cause a crash."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    warnings.simplefilter("error")
    for seed in range(first, first + count):
        print(json.dumps({"begins": seed}), flush=True)
        limit = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + CPU_S_PER_SEED
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        line: dict[str, Any] = {"seed": seed}
        with tempfile.TemporaryDirectory() as scratch:
            try:
                line["runs"] = run_seed(Path(scratch) / "whole", seed, engines)
                line["changed"] = run_changed(Path(scratch) / "changed", seed, changes)
            except BaseException as error:  # also the panics of the tokenizers library
                if isinstance(error, KeyboardInterrupt):
                    raise
                line["fault"] = traceback.format_exc()
        print(json.dumps(line), flush=True)


@pytest.mark.slow
@pytest.mark.in_ci
@pytest.mark.parametrize("first", range(FIRST, FIRST + BUNDLES, BUNDLES_PER_CHILD))
def test_what_is_accepted_runs(first: int) -> None:
    """A run gives tokens, an error that names NaN, or an error about options or memory.

    A changed manifest may also be refused.
    """
    numbers = map(str, (first, BUNDLES_PER_CHILD, ENGINES, CHANGES))
    child = subprocess.run(
        [sys.executable, "-m", "tests.gates.test_g10_random_bundles", *numbers],
        capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"{lines[-1:]} ended with {child.returncode}: {child.stderr[-2000:]}"
    done = [line for line in lines if "seed" in line]
    assert [line["seed"] for line in done] == list(range(first, first + BUNDLES_PER_CHILD))
    faults = [f"seed {line['seed']}: {line['fault']}" for line in done if "fault" in line]
    assert not faults, f"{len(faults)} faults, the first:\n{faults[0]}"
    runs, changed = (sum((Counter(line[name]) for line in done), Counter[str]()) for name in ("runs", "changed"))
    assert min(runs["tokens"], runs["NaN"], changed["refused"], changed["tokens"]) > 0, f"{runs}, {changed}"


HAS: dict[str, Callable[[ModelSpec], Any]] = {
    "latent attention": lambda model: any(layer.attention.latent for layer in model.layers),
    "an encoder": lambda model: model.encoder,
    "a relative bias": lambda model: any(layer.attention.relative_bias for layer in model.layers),
    "windows": lambda model: any(layer.attention.sliding_window for layer in model.layers),
    "sinks": lambda model: any(layer.attention.sinks for layer in model.layers),
    "norms of heads": lambda model: any(layer.attention.query_key_norm != "none" for layer in model.layers),
    "biases of attention": lambda model: any(layer.attention.bias != "none" for layer in model.layers),
    "long rotary forms": lambda model: any(
        layer.attention.rope and layer.attention.rope.long for layer in model.layers
    ),
    "groups": lambda model: any(layer.experts.router.groups > 1 for layer in model.layers),
    "corrections": lambda model: any(layer.experts.router.correction for layer in model.layers),
    "sigmoids": lambda model: any(layer.experts.router.scoring == "sigmoid" for layer in model.layers),
    "sparsemixer": lambda model: any(layer.experts.router.scoring == "sparsemixer" for layer in model.layers),
    "static routing": lambda model: any(layer.experts.router.static for layer in model.layers),
    "uniform routing": lambda model: any(layer.experts.router.scoring == "uniform" for layer in model.layers),
    "capacities": lambda model: any(layer.experts.router.capacity for layer in model.layers),
    "router biases": lambda model: any(layer.experts.router.has_bias for layer in model.layers),
    "experts with biases": lambda model: any(layer.experts.has_bias for layer in model.layers),
    "clamped experts": lambda model: any(layer.experts.activation == "clamped_swiglu" for layer in model.layers),
    "experts without a gate": lambda model: any(layer.experts.activation == "relu" for layer in model.layers),
    "shared experts": lambda model: any(layer.shared and layer.experts.count for layer in model.layers),
    "weighed shared experts": lambda model: any(layer.shared and layer.shared.has_gate for layer in model.layers),
    "dense layers": lambda model: any(not layer.experts.count for layer in model.layers),
    "layer norms": lambda model: model.norm == "layer",
    "a head bias": lambda model: model.has_head_bias,
    "tied embeddings": lambda model: model.tie_embeddings,
    "many experts": lambda model: any(layer.experts.count > 32 for layer in model.layers),
}


def test_every_kind_of_model_is_drawn() -> None:
    """The bundles of the fast suite have every kind."""
    models = [random_model(random.Random(seed)) for seed in range(FIRST, FIRST + BUNDLES)]
    assert not [kind for kind, has in HAS.items() if not any(map(has, models))]


def test_every_kind_of_weight_is_drawn() -> None:
    """Every bitwidth, `mxfp4`, experts left out, low versions, and NaN."""
    plans, formats = [draw_plan(seed) for seed in range(FIRST, FIRST + BUNDLES)], set[str]()
    for plan, _ in plans:
        for specs in (plan.dense, *plan.experts.values(), *plan.low.values()):
            formats |= {str(spec).partition("g")[0].rstrip("sb") for spec in specs.values()}
    assert formats == {"bf16", "fp16", "mxfp4", "q0", "q1", "q1.6", "q2", "q3", "q4", "q5", "q6", "q8"}
    assert any(plan.low for plan, _ in plans) and any(plan.tables for plan, _ in plans)
    assert {weights.kind for _, weights in plans} == set(KINDS_OF_WEIGHTS)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
