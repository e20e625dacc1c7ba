"""`moec bench`: the ceiling of this machine, the measurement, and the ratio of the two."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import OptionError
from moec.runtime.options.lossy import HALF

from ...lossy_modes.mode_costs import say_mode_cost
from ...lossy_modes.mode_sweep import mode_sweep_option, say_decisions, speed_page, speed_sweep, sweep_options
from ...measuring.ceiling import measured_host, predict, run_ceiling_ns
from ...measuring.decode_speed import DEFAULT_PROMPT, continuation, measure_decode, new_tracer, sequence_of
from ...options.opening import accelerator_facts, bundle_folder, mode_facts, open_engine
from ...options.paths import bundle_argument, file_option, json_option, output_option
from ...options.profile_defaults import device_facts
from ...options.runtime_options import build_options, runtime_options
from ...simulation.traces import check_traceable, recorded_trace, replayed_bundle
from ...terminal import output
from ...terminal.help_sections import SectionCommand
from ...terminal.profile_table import profile_rows, profile_table
from ...terminal.run_statistics import statistics_block

if TYPE_CHECKING:
    from moec.profiles.device import DeviceProfile
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.kernels.profile import KernelTimes
    from moec.runtime.options.runtime import RuntimeOptions
    from moec.runtime.prefetch.quality import LayerAdvice
    from moec.runtime.trace.statistics import RunStatistics
    from moec.runtime.trace.trace import Trace

SHARES = (0.25, 0.5, 0.75)


@click.command("bench", cls=SectionCommand, short_help="Measure a bundle against the ceiling of this machine.")
@bundle_argument
@click.option("--tokens", type=int, default=128, show_default=True, metavar="N", help="Tokens to decode.")
@click.option("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="Beginning of the measured sequence.")
@file_option(
    "--text",
    "text_path",
    help="Measure on the tokens of this text instead of a continuation of the prompt.",
)
@click.option(
    "--prompt-tokens", type=int, default=32, show_default=True, metavar="N", help="With `--text`: length of the prompt."
)
@click.option(
    "--policies",
    type=click.Choice(("none", "all")),
    default="none",
    show_default=True,
    help="Replay the run's routing trace under every eviction policy, with caches of 25, 50 and 75 %.",
)
@output_option(
    "--trace-out",
    help="Write the routing trace for `simulate` and `tune`, with the confidence of a little model in each token.",
)
@click.option(
    "--trace-little",
    metavar="N|K/2",
    default=HALF,
    show_default=True,
    help="With `--trace-out`: experts per token and layer of the little model.",
)
@mode_sweep_option
@click.option("--profile", is_flag=True, help="Divide the time of a token among kernels, waiting and Python.")
@json_option
@runtime_options
def bench_command(
    bundle: Path,
    tokens: int,
    prompt: str,
    text_path: Path | None,
    prompt_tokens: int,
    policies: str,
    trace_out: Path | None,
    trace_little: str,
    modes: str | None,
    profile: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure the bundle in folder BUNDLE: ceiling, measurement, ratio.

    The bundle first continues the prompt, past any end token. Then a new engine is timed on exactly those tokens, so
    that every setting computes the same.

    With --text the tokens come from a file. A bundle of random weights needs it: its own continuation soon repeats,
    and then every cache holds all the experts.

    The ceiling is the best speed of this memory and this storage, with the misses that calibration predicts. The ratio
    at the end counts the bytes that the run has read.

    \b
    moec bench mixtral-moec --expert-cache 50%
    moec bench mixtral-moec --expert-cache 25% --set prefetch=off --policies all --json
    moec bench mixtral-moec --memory 4GiB --profile
    """
    from moec.runtime.bundle.open_bundle import open_bundle

    opened, kernels = open_bundle(bundle_folder(bundle)), values["kernels"]
    is_traced = trace_out is not None or policies != "none"
    options = _options(values, bundle, tokens, modes, profile, is_traced)
    _check_little(opened.path, trace_out, trace_little)
    if text_path is None:
        sequence = continuation(bundle, options.lossless(), kernels, prompt, tokens)
    else:
        sequence = sequence_of(opened, text_path, prompt_tokens, tokens)
    run = BenchRun(bundle, options, kernels, sequence, len(sequence) - tokens)
    if modes is not None:
        rows = speed_sweep(bundle, modes, options, kernels, sequence, run.prompt_length)
        _print_sweep(rows, options, as_json)
        return
    measured = _measure(run, opened, profile, is_traced, as_json)
    if measured.trace is not None and trace_out is not None:
        _write_trace(trace_out, measured.trace, run, trace_little)
    simulated = _simulate(opened, measured.trace) if measured.trace is not None and policies == "all" else []
    _print_result(measured, simulated, as_json)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The run that is measured.

    kernels: instruction set, or None for the best one.
    sequence: token ids: the prompt, then the decoded tokens.
    prompt_length: number of tokens of the prompt.
    """

    bundle: Path
    options: RuntimeOptions
    kernels: str | None
    sequence: list[int]
    prompt_length: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a run.

    engine: the engine of the run, which is closed.
    host: this machine.
    ceiling: see `predict`.
    kernel_times: time of each kernel, or None without `--profile`.
    trace: routing trace, or None if none was recorded.
    """

    engine: Engine
    host: DeviceProfile
    ceiling: dict[str, Any]
    statistics: RunStatistics
    kernel_times: KernelTimes | None
    trace: Trace | None


def _measure(run: BenchRun, opened: Bundle, is_profiled: bool, is_traced: bool, as_json: bool) -> Measured:
    """Decode the sequence with a new engine. Print the ceiling before that, unless as_json is set."""
    from moec.runtime.kernels.profile import timed_kernels
    from moec.runtime.trace.statistics import reset_peak_memory

    gc.collect()  # free the engine that made the sequence
    host = measured_host(opened, run.options.threads)
    reset_peak_memory()
    with open_engine(run.bundle, run.options, run.kernels) as engine:
        say_mode_cost(run.bundle, engine)
        engine.check_tokens(run.sequence, room=0)
        engine.cache.finish_warming()
        ceiling = predict(opened, host, engine.decoding_cache_bytes(len(run.sequence)))
        if not as_json:
            output.data(f"{_ceiling_block(ceiling, host)}\n\n{engine.mode}")
        with timed_kernels() if is_profiled else nullcontext() as kernel_times:
            tracer = new_tracer(engine) if is_traced else None
            statistics = measure_decode(
                engine, run.sequence, run.prompt_length, kernel_times=kernel_times, tracer=tracer
            )
        trace = None if tracer is None else recorded_trace(engine, tracer, run.prompt_length, host)
    return Measured(engine, host, ceiling, statistics, kernel_times, trace)


def _options(
    values: dict[str, Any], bundle: Path, tokens: int, modes: str | None, profile: bool, is_traced: bool
) -> RuntimeOptions:
    """Return the options of the run. Raises OptionError if options exclude each other."""
    if tokens < 2:
        raise OptionError(f"`--tokens` must be at least 2, found {tokens}", "leave it out for 128")
    options = build_options(values, bundle=bundle)
    if modes is not None:
        for name, is_given in (("profile", profile), ("trace-out` or `--policies", is_traced)):
            if is_given:
                raise OptionError(f"`--{name}` is of one run, not of a sweep of modes", "leave out one of the two")
        return sweep_options(options)
    if is_traced:
        check_traceable(options)
    return options


def _check_little(bundle: Path, trace_out: Path | None, little_k: str) -> None:
    """Refuse a little model that does not exist or has no effect, before anything is measured. Raises OptionError."""
    from ...simulation.little_model import has_little_model

    if trace_out is not None:
        has_little_model(bundle, little_k)
    elif little_k != HALF:
        raise OptionError("`--trace-little` has no effect without a trace", "add `--trace-out FILE`")


def _write_trace(path: Path, trace: Trace, run: BenchRun, little_k: str) -> None:
    """Write a trace, with the confidence of the little model if the bundle has one."""
    from moec.runtime.trace.trace_file import write_trace

    from ...simulation.little_model import with_little_model

    scored = with_little_model(trace, run.bundle, run.options, run.kernels, run.sequence, run.prompt_length, little_k)
    write_trace(path, scored)


def _print_result(measured: Measured, simulated: list[dict[str, Any]], as_json: bool) -> None:
    """Print the measurement as text, or with its conditions as JSON.

    simulated: rows of `_simulate`.
    """
    engine, statistics, ceiling = measured.engine, measured.statistics, measured.ceiling
    ceiling["run_ns"] = run_ceiling_ns(ceiling, measured.host, statistics)
    profile = [] if measured.kernel_times is None else profile_rows(measured.kernel_times, statistics)
    ratio = None if statistics.tokens_per_s is None else ceiling["run_ns"] * statistics.tokens_per_s / 1e9
    advice, counts = engine.model.advice_by_layer(), engine.mode_counts
    if not as_json:
        _print_measurement(statistics, ratio, ceiling["run_ns"], advice, simulated)
        say_decisions(engine)
        if profile:
            output.data(f"\n{profile_table(profile)}")
        return
    told = {"ceiling": ceiling, "measured": statistics.to_plain(), "ratio": ratio, "policies": simulated}
    told |= mode_facts(engine) | {"memory": engine.memory.to_plain()}
    told |= {"decisions": None if counts is None else counts.to_plain(), **accelerator_facts(engine)}
    if profile:
        told["profile"] = profile
    told["prefetch_by_layer"] = [each.to_plain() for each in advice]
    output.data_json({**told, "tokens": statistics.tokens, "host": measured.host.to_plain()})


def _print_sweep(rows: list[dict[str, Any]], options: RuntimeOptions, as_json: bool) -> None:
    if as_json:
        told = {"expert_cache": options.expert_cache, "memory": options.memory, "cache_state": options.cache_state}
        told |= {"policy": options.policy, "prefetch": options.prefetch_text, **device_facts()}
        output.data_json({**told, "rows": rows})
    else:
        output.data(speed_page(rows, options))


def _print_measurement(
    statistics: RunStatistics,
    ratio: float | None,
    ceiling_ns: int,
    advice: list[LayerAdvice],
    simulated: list[dict[str, Any]],
) -> None:
    read = output.human_bytes(round(statistics.decode_bytes_read_per_token))
    told = (
        f"{output.human_share(ratio)} of the ceiling with the {read} that a token read: {output.human_ms(ceiling_ns)}"
    )
    output.data(f"\n{statistics_block(statistics)}\n\nratio  {told}")
    if any(each.read for each in advice):
        output.data(f"\n{_advice_table(advice)}")
    if simulated:
        output.data(f"\n{_policies_table(simulated)}")


def _simulate(bundle: Bundle, trace: Trace) -> list[dict[str, Any]]:
    """Replay the trace under every policy, with caches of every share in SHARES, without prefetch."""
    from moec.runtime.bundle.eviction_weights import FITTED_POLICY, fitted_weights
    from moec.runtime.expert_cache.policies import SCORES, policy_score
    from moec.runtime.simulation.replay import OPTIMUM, POPULARITY, replay

    replayed, accesses, rows = replayed_bundle(bundle), trace.accesses(), list[dict[str, Any]]()
    scores = {FITTED_POLICY: policy_score(FITTED_POLICY, fitted_weights(bundle))}
    for share in SHARES:
        capacity = replayed.capacity_bytes(share)
        if capacity is None:
            continue
        for policy in (*SCORES, POPULARITY, OPTIMUM):
            score = scores.get(policy, policy)
            counts = replay(accesses, replayed.cache_spec(capacity), score, replayed.warm)
            rows.append({"share": share, "policy": policy, "capacity_bytes": capacity, **counts.replayable_counts()})
    return rows


def _ceiling_block(ceiling: dict[str, Any], host: DeviceProfile) -> str:
    size = output.human_bytes
    alike = "" if ceiling["is_calibrated"] else ", all experts alike without calibration"
    return output.facts(
        [
            ("memory", f"{size(host.memory_bytes_per_s)}/s ({host.provenance['memory_bytes_per_s']})"),
            (
                "storage",
                f"{size(host.storage_bytes_per_s)}/s, {host.storage_latency_ns / 1e3:.0f} us a read "
                f"({host.provenance['storage_bytes_per_s']})",
            ),
            (
                "compute",
                f"{size(ceiling['compute_bytes_per_token'])} a token: {output.human_ms(ceiling['compute_ns'])}",
            ),
            (
                "reads",
                f"{size(ceiling['missed_bytes_per_token'])} a token expected with a cache of "
                f"{size(ceiling['cache_bytes'])}{alike}: {output.human_ms(ceiling['storage_ns'])}",
            ),
            ("ceiling", f"TPOT {output.human_ms(ceiling['tpot_ns'])}, {1e9 / ceiling['tpot_ns']:.1f} tokens/s"),
        ]
    )


def _advice_table(advice: list[LayerAdvice]) -> str:
    share = output.human_share
    rows = [(each.layer, each.read, each.used, share(each.precision), share(each.recall)) for each in advice]
    return output.table(rows, ("layer", "read ahead", "used", "precision", "recall"))


def _policies_table(rows: list[dict[str, Any]]) -> str:
    least = {row["share"]: row["misses"] for row in rows if row["policy"] == "optimum"}
    lines = [
        (
            f"{row['share']:.0%}",
            row["policy"],
            row["misses"],
            output.human_share(row["hits"] / max(row["lookups"], 1)),
            output.human_bytes(row["bytes_read"]),
            "-" if not least[row["share"]] else f"{row['misses'] / least[row['share']]:.2f}",
        )
        for row in rows
    ]
    return output.table(lines, ("cache", "policy", "misses", "hit rate", "read", "x optimum"))
