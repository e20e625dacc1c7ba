"""`moec tune`: which options pay for this bundle on this machine, measured side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import InputError, OptionError
from moec.profiles.probe import available_threads

from . import output
from .measurement import DEFAULT_PROMPT, continuation, measure_decode, sequence_of
from .runtime_options import build_options, bundle_folder, open_engine, runtime_options

if TYPE_CHECKING:
    from moec.runtime.options import RuntimeOptions

LEAST_GAIN = 0.03
ROUNDS = 3
TUNED = ("prefetch", "prefetch_layers", "prefetch_experts", "readers", "threads")


@click.command("tune", short_help="Find the options that pay for a bundle on this machine.")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--tokens", type=int, default=48, show_default=True, metavar="N", help="Tokens to decode in each run.")
@click.option("--text", "text_path", type=click.Path(path_type=Path), metavar="FILE", help="Measure on this text.")
@click.option("--json", "as_json", is_flag=True, help="Print the file's content.")
@runtime_options
def tune_command(bundle: Path, tokens: int, text_path: Path | None, as_json: bool, **values: Any) -> None:
    """Try what can be tuned on the bundle in folder BUNDLE, inside the memory that is given.

    That is prefetchers, how far and how much they read ahead, readers, and thread counts. Each is decoded in turn with
    what is best so far, three times; it is kept if it is at least 3 % faster in the median. What is kept goes to
    `BUNDLE.tune.json` beside the bundle, where `run`, `eval` and `bench` find it on this machine. None of these options
    changes a result. Close other programs first.

    \b
    moec tune mixtral-moec --memory 4GiB
    """
    from moec.profiles.probe import machine_sha256
    from moec.runtime.bundle import open_bundle
    from moec.runtime.tuning import Tuning, bundle_sha256, write_tuning

    if tokens < 2:
        raise OptionError(f"`--tokens` must be at least 2, found {tokens}", "leave it out for 48")
    folder, options, kernels = bundle_folder(bundle), build_options(values), values["kernels"]
    if text_path is not None:
        sequence = sequence_of(open_bundle(folder), text_path, 16, tokens)
    else:
        sequence = continuation(folder, options, kernels, DEFAULT_PROMPT, tokens)

    def seconds(tried: RuntimeOptions) -> float:
        with open_engine(folder, tried, kernels) as engine:
            engine.cache.finish_warming()
            return 1 / (measure_decode(engine, sequence, len(sequence) - tokens)[0].tokens_per_s or 1e-9)

    top_k = max(layer.experts.top_k for layer in open_bundle(folder).manifest.model.layers)
    best, trials = search(options, top_k, seconds)
    kept = {name: getattr(best, name) for name in TUNED if getattr(best, name) != getattr(options, name)}
    tuning = Tuning(machine_sha256(), bundle_sha256(folder), kept, trials)
    try:
        path = write_tuning(folder, tuning)
    except OSError as error:
        raise InputError(f"the tuning of `{bundle}` cannot be written: {error.strerror}", "check the folder") from error
    if as_json:
        output.data_json({"path": str(path), "options": kept, "trials": trials})
        return
    rows = [(t["option"], t["value"], f"{t['gain']:+.1%}", "kept" if t["kept"] else "") for t in trials]
    output.data(output.table(rows, ("option", "value", "speed", "")))
    output.say(f"wrote `{path}`")


def alternatives(options: RuntimeOptions, top_k: int) -> Iterator[tuple[str, str | int]]:
    """What is tried, one option after the other."""
    yield from (("prefetch", name) for name in ("lookahead", "path", "off") if name != options.prefetch)
    yield from (("prefetch_layers", count) for count in (1, 3) if count != options.prefetch_layers)
    counts = sorted({max(1, top_k // 4), max(1, top_k // 2), top_k})
    yield from (("prefetch_experts", count) for count in counts if count != options.prefetch_experts)
    yield from (("readers", count) for count in (1, 2, 4) if count != options.readers)
    threads = options.threads or available_threads()
    yield from (("threads", count) for count in sorted({max(1, threads // 2), max(1, threads - 1)}) if count != threads)


def search(
    options: RuntimeOptions, top_k: int, seconds: Callable[[RuntimeOptions], float]
) -> tuple[RuntimeOptions, list[dict[str, Any]]]:
    """Each alternative beside the best so far, in turns; seconds: per token. Returns the best and every trial."""
    best, trials, listed = options, list[dict[str, Any]](), list(alternatives(options, top_k))
    with output.Progress("tuning") as progress:
        for done, (name, value) in enumerate(listed):
            if best.prefetch == "off" and name.startswith("prefetch_"):
                continue  # there is nothing left that it could change
            change: dict[str, Any] = {name: value}
            candidate = replace(best, **change)
            ratios = []
            for turn in range(ROUNDS):
                # The order changes with each turn, so that a drift of the machine favours nobody.
                first, second = (best, candidate) if turn % 2 == 0 else (candidate, best)
                times = {id(tried): seconds(tried) for tried in (first, second)}
                ratios.append(times[id(best)] / times[id(candidate)])
            gain = statistics.median(ratios) - 1
            is_kept = gain >= LEAST_GAIN
            trials.append({"option": name, "value": value, "gain": round(gain, 4), "kept": is_kept})
            best = candidate if is_kept else best
            progress(done + 1, len(listed))
    return best, trials
