"""Random bundles, verified, opened and run by several engines with random options, in a child process.

`python -m tests.hostile.random_runs FIRST COUNT` prints a JSON line per seed. Allowed outcomes: tokens, the error about
NaN in the logits, an error about options or memory. A changed manifest may also be refused.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

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
from tests.hostile.random_bundles import write_random_bundle
from tests.hostile.random_models import chance
from tests.manifests.examples import get, paths, put

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


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
