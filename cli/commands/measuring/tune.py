"""`moec tune`: the fastest options for this bundle on this machine, by measurement."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import OptionError
from moec.profiles.probe import available_threads
from moec.runtime.options.runtime import PREFETCH_RULES

from ...lossy_modes.mode_sweep import modes_of
from ...measuring.decode_speed import DEFAULT_PROMPT, continuation, measure_decode, sequence_of
from ...options.opening import bundle_folder, open_engine
from ...options.paths import bundle_argument, file_option
from ...options.profile_defaults import device_facts, say_device, with_reader_cpus
from ...options.runtime_options import TUNED, build_options, refuse_given, tunable_options
from ...options.tuned_options import made_elsewhere, planned_cache_bytes
from ...simulation.compile_eviction import TRACE_SHARES, PolicyFit, fit_table
from ...simulation.lossy_replay import require_scores
from ...simulation.traces import open_traces, replayed_bundle
from ...terminal import output
from ...terminal.help_sections import SectionCommand
from ...terminal.progress_bar import ProgressBar

if TYPE_CHECKING:
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.options.runtime import RuntimeOptions
    from moec.runtime.trace.trace import Trace

LEAST_GAIN = 0.03
ROUNDS = 3
POLICY_OPTIONS = ("policy", "policy_weights")


@click.command("tune", cls=SectionCommand, short_help="Find the fastest options for a bundle on this machine.")
@bundle_argument
@click.option("--tokens", type=int, default=48, show_default=True, metavar="N", help="Tokens to decode in each run.")
@file_option("--text", "text_path", help="Measure on this text.")
@file_option(
    "--trace",
    "training",
    multiple=True,
    help="Fit the weights of the policy `hobbit` to this trace instead; repeatable.",
)
@file_option("--held-out", multiple=True, help="With `--trace`: compare policies on this trace; repeatable.")
@click.option(
    "--modes",
    metavar="SETTING",
    help="With `--trace`: fit to the decisions of these lossy modes, like `dynamic-precision 0.6,1`. Writes nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the content of the file.")
@tunable_options
def tune_command(
    bundle: Path,
    tokens: int,
    text_path: Path | None,
    training: tuple[Path, ...],
    held_out: tuple[Path, ...],
    modes: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure options on the bundle in folder BUNDLE, within the given memory, and keep the fastest.

    The options are the prefetcher, its rule, its depth and its number of experts, the readers, and the threads. None
    changes a result of an exact run. Each value decodes three times in turn with the best options so far. It is
    kept if the median gain is at least 3 %. The options are written to `BUNDLE.tune.json` next to the bundle, where
    `run`, `generate`, `eval` and `bench` read them. They come before the settings of the device that the bundle is
    for. Close other programs first.

    The file is valid on this machine, while the bundle is on the same storage. The expert cache of a run must be within
    20 % of the size in this measurement. Other runs print a warning and ignore the file.

    With --trace and --held-out nothing is timed. The weights of recency, uses and layer distance in HOBBIT's score are
    fitted to traces of `moec bench --trace-out`, for the fewest bytes read by misses. The held-out traces compare the
    result with other policies and the offline optimum, at 10, 25, 50 and 75 % of the experts and at the size in use.
    The policy is kept if it reads less than the one in use at that size, with 95 % confidence.

    With --modes every replay decides again which experts are high, low, skipped or replaced, because that depends on
    the cache. The third weight, of uses at high precision, is fitted too. The table shows the decisions next to the
    bytes, because fewer bytes may mean more skipped experts. Nothing is written: the weights are valid for that mode
    only.

    \b
    moec tune mixtral-moec --memory 4GiB
    moec tune mixtral-moec --memory 4GiB --trace a.trace --trace b.trace --held-out c.trace --held-out d.trace
    moec tune mixtral-moec --trace a.trace --held-out c.trace --modes "dynamic-precision 0.6,1"
    """
    from moec.runtime.tuning.tune_file import check_tuning

    if bool(training) != bool(held_out):
        raise OptionError("`--trace` and `--held-out` need each other", "record some texts for each")
    if not training and modes is not None:
        raise OptionError("`--modes` has no effect without traces", "add `--trace` and `--held-out`")
    if not training and tokens < 2:
        raise OptionError(f"`--tokens` must be at least 2, found {tokens}", "leave it out for 48")
    folder = bundle_folder(bundle)
    if modes is None:
        check_tuning(folder)
    if training:
        refuse_given(click.get_current_context(), ("tokens", "text_path"), "traces are replayed, not timed")
    options = build_options(values, bundle=folder, is_tuned=False)
    if training:
        fit_policy(folder, options, training, held_out, modes, as_json)
    else:
        _time(folder, options, values["kernels"], tokens, text_path, as_json)


def _time(
    folder: Path, options: RuntimeOptions, kernels: str | None, tokens: int, text_path: Path | None, as_json: bool
) -> None:
    """Decode the same tokens with every alternative. Write the fastest options."""
    from moec.runtime.bundle.open_bundle import open_bundle

    say_device(open_bundle(folder), options)
    cache_bytes = planned_cache_bytes(folder, options)
    if text_path is not None:
        sequence = sequence_of(open_bundle(folder), text_path, 16, tokens)
    else:
        sequence = continuation(folder, options, kernels, DEFAULT_PROMPT, tokens)

    def seconds(tried: RuntimeOptions) -> float:
        gc.collect()  # the budget counts memory that the previous engine still holds
        with open_engine(folder, tried, kernels) as engine:
            engine.cache.finish_warming()
            return 1 / (measure_decode(engine, sequence, len(sequence) - tokens).tokens_per_s or 1e-9)

    top_k = max(layer.experts.top_k for layer in open_bundle(folder).manifest.model.layers)
    best, trials = search(options, top_k, seconds)
    tuned = {name: getattr(best, name) for name in TUNED if getattr(best, name) != getattr(options, name)}
    facts, sentence = _write(folder, cache_bytes, POLICY_OPTIONS, tuned, trials)
    if as_json:
        output.data_json({**facts, **device_facts()})
        return
    rows = [(t["option"], t["value"], f"{t['gain']:+.1%}", "kept" if t["kept"] else "") for t in trials]
    output.data(output.table(rows, ("option", "value", "speed", "")))
    output.say(sentence)


def fit_policy(
    folder: Path,
    options: RuntimeOptions,
    training: tuple[Path, ...],
    held_out: tuple[Path, ...],
    modes: str | None,
    as_json: bool,
) -> None:
    """Fit the weights of the policy, print the comparison, and write them if they read less at the size in use."""
    from moec.runtime.bundle.eviction_weights import with_fitted_weights
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.expert_cache.policies import policy_score

    say_device(open_bundle(folder), options)
    in_use = planned_cache_bytes(folder, options)  # before the traces take memory, which a run does not read
    opened = open_bundle(folder)
    options = with_fitted_weights(opened, options)
    replayed = replayed_bundle(opened)
    traces = open_traces(training, opened), open_traces(held_out, opened)
    by_path = dict(zip((*training, *held_out), chain(*traces), strict=True))
    setting = {} if modes is None else _setting(modes, opened, by_path)
    fit = PolicyFit(opened, replayed, *traces, setting)
    capacities = {capacity for share in TRACE_SHARES if (capacity := replayed.capacity_bytes(share)) is not None}
    if in_use < replayed.total_bytes:
        capacities.add(in_use)
    rows = fit.rows(sorted(capacities))
    if setting:
        if as_json:
            output.data_json({"modes": modes_of(setting).to_text(), "rows": rows})
            return
        output.data(fit_table(rows, replayed.total_bytes))
        output.say("nothing is kept: runs with this mode take the weights by `--set policy-weights=...`")
        return
    # Of the policies that read less than the one in use, with 95 % confidence, the one with the largest gain.
    current, most = policy_score(options.policy, options.policy_weights), 0.0
    chosen: dict[str, str | int] = {}
    trials: list[dict[str, Any]] = []
    for row in rows:
        policy, weights = row["policy"], row["weights"]
        if row["capacity_bytes"] != in_use or weights is None:
            continue
        gain, is_certain = fit.gain(in_use, policy_score(policy, weights), current)
        trials.append({"option": "policy", "value": f"{policy} {weights}", "gain": round(gain, 4)})
        if is_certain and gain > most:
            most, chosen = gain, {"policy": policy, "policy_weights": weights}
    for trial in trials:
        trial["kept"] = trial["value"] == " ".join(map(str, chosen.values()))
    facts, sentence = _write(folder, in_use, TUNED, chosen, trials)
    if as_json:
        output.data_json({**facts, "rows": rows, **device_facts()})
        return
    output.data(fit_table(rows, replayed.total_bytes))
    if in_use >= replayed.total_bytes:
        output.say("all experts fit, so no policy is kept; name the size in use with `--expert-cache` or `--memory`")
    output.say(sentence)


def _setting(text: str, bundle: Bundle, traces: dict[Path, Trace]) -> dict[str, str]:
    """Return the one setting of `--modes`. Raises OptionError if the bundle or a trace lacks data for it."""
    from moec.runtime.modes.decoder import check_modes
    from moec.runtime.options.lossy import parse_mode_list

    settings = [] if text == "sweep" else parse_mode_list(text)
    if len(settings) != 1:
        raise OptionError(f"`--modes {text[:60]}`: weights are fitted to one setting", "name the modes of one run")
    modes = modes_of(settings[0])
    check_modes(modes, bundle.manifest.model, len(bundle.manifest.low_experts))
    if not modes.reads_cache:
        raise OptionError(
            f"`{modes.to_text()}` does not depend on the cache", "fit without `--modes`, or add dynamic precision"
        )
    for path, trace in traces.items():
        require_scores(path, trace, settings[0])
    return settings[0]


def _write(
    folder: Path, cache_bytes: int, others: tuple[str, ...], tuned: dict[str, str | int], trials: list[dict[str, Any]]
) -> tuple[dict[str, Any], str]:
    """Write the tuned options. Return the path and the content for `--json`, and a sentence that says it.

    others: names of options that keep their values from an earlier file, if that file is still valid.
    """
    from moec.profiles.probe import machine_sha256, storage_sha256
    from moec.runtime.tuning.tune_file import Tuning, bundle_sha256, read_tuning, write_tuning

    try:
        before = read_tuning(folder)
    except ValueError:
        before = None
    options, records = tuned, trials
    if before is not None and made_elsewhere(before, folder) is None and before.fits_cache(cache_bytes):
        options = {name: value for name, value in before.options.items() if name in others} | options
        records = [trial for trial in before.trials if trial.get("option") in others] + records
    tuning = Tuning(machine_sha256(), storage_sha256(folder), bundle_sha256(folder), cache_bytes, options, records)
    path = write_tuning(folder, tuning)
    facts = {"path": str(path), "expert_cache_bytes": cache_bytes, "options": options, "trials": trials}
    return facts, f"wrote `{path}`, for an expert cache of {output.human_bytes(cache_bytes)}"


def alternatives(options: RuntimeOptions, top_k: int) -> Iterator[tuple[str, str | int]]:
    """Yield option and value of every alternative, in the order of the measurement."""
    yield from (("prefetch", name) for name in ("lookahead", "path", "off") if name != options.prefetch)
    yield from (("prefetch_rule", rule) for rule in PREFETCH_RULES if rule != options.prefetch_rule)
    yield from (("prefetch_layers", count) for count in (1, 3) if count != options.prefetch_layers)
    counts = sorted({max(1, top_k // 4), max(1, top_k // 2), top_k})
    yield from (("prefetch_experts", count) for count in counts if count != options.prefetch_experts)
    yield from (("readers", count) for count in (1, 2, 4) if count != options.readers)
    threads = options.threads or available_threads()
    yield from (("threads", count) for count in sorted({max(1, threads // 2), max(1, threads - 1)}) if count != threads)


def changed(options: RuntimeOptions, name: str, value: str | int) -> RuntimeOptions:
    """Return the options with one change, and with the changes that it needs to have an effect."""
    change: dict[str, Any] = {name: value}
    if name == "prefetch_experts" and options.prefetch_rule in ("likely", "until-routed"):
        change["prefetch_rule"] = "spread"  # a rule that uses the count
    rule = change.get("prefetch_rule", options.prefetch_rule)
    if rule != "until-routed" or change.get("prefetch") == "off":
        change["reader_cpus"] = None  # processors of a reader that the other rules do not have
    return with_reader_cpus(replace(options, **change), is_trial=True)


def search(
    options: RuntimeOptions, top_k: int, seconds: Callable[[RuntimeOptions], float]
) -> tuple[RuntimeOptions, list[dict[str, Any]]]:
    """Measure each alternative in turn with the best options so far. Return the best options and every trial.

    seconds: measures the seconds per token of some options.
    """
    best, trials, listed = options, list[dict[str, Any]](), list(alternatives(options, top_k))
    with ProgressBar("tuning") as progress:
        for done, (name, value) in enumerate(listed):
            if best.prefetch == "off" and name.startswith("prefetch_"):
                continue  # without prefetch this option has no effect
            candidate = changed(best, name, value)
            ratios = []
            for turn in range(ROUNDS):
                # The order changes with each turn, so that a drift of the machine favours neither.
                first, second = (best, candidate) if turn % 2 == 0 else (candidate, best)
                times = {id(tried): seconds(tried) for tried in (first, second)}
                ratios.append(times[id(best)] / times[id(candidate)])
            gain = statistics.median(ratios) - 1
            is_kept = gain >= LEAST_GAIN
            trials.append({"option": name, "value": value, "gain": round(gain, 4), "kept": is_kept})
            best = candidate if is_kept else best
            progress(done + 1, len(listed))
    return best, trials
