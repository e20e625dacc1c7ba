"""`moec bench`: the ceiling of this machine, the measurement, and the ratio of the two."""

from __future__ import annotations

import gc
from contextlib import nullcontext
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
from ...terminal.run_statistics import statistics_block

if TYPE_CHECKING:
    from moec.profiles.device import DeviceProfile
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.engine.engine import Engine
    from moec.runtime.kernels.profile import KernelTimes
    from moec.runtime.trace.statistics import RunStatistics
    from moec.runtime.trace.trace import Trace

SHARES = (0.25, 0.5, 0.75)
WAITING, PYTHON = "waiting for experts", "Python and numpy"
WAITS = "experts_layer"
"""The kernel that includes a token's waits, if the run uses it."""


@click.command("bench", cls=SectionCommand, short_help="Measure a bundle against the ceiling of this machine.")
@bundle_argument
@click.option("--tokens", type=int, default=128, show_default=True, metavar="N", help="Tokens to decode.")
@click.option("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="Beginning of the measured sequence.")
@file_option("--text", "text_path", help="Measure on the tokens of this text instead of a continuation of the prompt.")
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
    from moec.runtime.kernels.profile import timed_kernels
    from moec.runtime.trace.statistics import reset_peak_memory
    from moec.runtime.trace.trace_file import write_trace

    from ...simulation.little_model import has_little_model, with_little_model

    opened, kernels = open_bundle(bundle_folder(bundle)), values["kernels"]
    is_traced = trace_out is not None or policies != "none"
    if tokens < 2:
        raise OptionError(f"`--tokens` must be at least 2, found {tokens}", "leave it out for 128")
    options = build_options(values, bundle=bundle)
    if modes is not None:
        if profile or is_traced:
            name = "`--profile`" if profile else "`--trace-out` or `--policies`"
            raise OptionError(f"{name} is of one run, not of a sweep of modes", "leave out one of the two")
        options = sweep_options(options)
    elif is_traced:
        check_traceable(options)
    if trace_out is not None:
        has_little_model(opened.path, trace_little)  # refuses a number of experts that the model does not have
    elif trace_little != HALF:
        raise OptionError("`--trace-little` has no effect without a trace", "add `--trace-out FILE`")
    if text_path is None:
        sequence = continuation(bundle, options.exact(), kernels, prompt, tokens)
    else:
        sequence = sequence_of(opened, text_path, prompt_tokens, tokens)
    prompt_length = len(sequence) - tokens
    if modes is not None:
        rows = speed_sweep(bundle, modes, options, kernels, sequence, prompt_length)
        if not as_json:
            output.data(speed_page(rows, options))
            return
        facts = {"expert_cache": options.expert_cache, "memory": options.memory, "cache_state": options.cache_state}
        facts |= {"policy": options.policy, "prefetch": options.prefetch_text, **device_facts()}
        output.data_json({**facts, "rows": rows})
        return
    gc.collect()  # free the engine that made the sequence
    host = measured_host(opened, options.threads)
    reset_peak_memory()
    with open_engine(bundle, options, kernels) as engine:
        say_mode_cost(bundle, engine)
        engine.check_tokens(sequence, room=0)
        engine.cache.finish_warming()
        ceiling = predict(opened, host, engine.decoding_cache_bytes(len(sequence)))
        if not as_json:
            output.data(f"{_ceiling_block(ceiling, host)}\n\n{engine.mode}")
        with timed_kernels() if profile else nullcontext() as kernel_times:
            tracer = new_tracer(engine) if is_traced else None
            statistics = measure_decode(engine, sequence, prompt_length, kernel_times=kernel_times, tracer=tracer)
        trace = None if tracer is None else recorded_trace(engine, tracer, prompt_length, host)
    if trace is not None and trace_out is not None:
        write_trace(
            trace_out, with_little_model(trace, bundle, options, kernels, sequence, prompt_length, trace_little)
        )
    simulated = _simulate(opened, trace) if trace is not None and policies == "all" else []
    ceiling["run_ns"] = run_ceiling_ns(ceiling, host, statistics)
    profiled = [] if kernel_times is None else _profile_rows(kernel_times, statistics)
    _print_result(engine, statistics, ceiling, profiled, simulated, host if as_json else None)


def _print_result(
    engine: Engine,
    statistics: RunStatistics,
    ceiling: dict[str, Any],
    profile: list[dict[str, Any]],
    simulated: list[dict[str, Any]],
    host: DeviceProfile | None,
) -> None:
    """Print the measurement as text, or with its conditions as JSON.

    engine: the engine of the run, which is closed.
    ceiling: see `predict`, with the ceiling of the run.
    profile: rows of `_profile_rows`.
    simulated: rows of `_simulate`.
    host: this machine, for JSON; None for text.
    """
    ratio = None if statistics.tokens_per_s is None else ceiling["run_ns"] * statistics.tokens_per_s / 1e9
    advice, counts, share = engine.model.advice_by_layer(), engine.mode_counts, output.human_share
    if host is not None:
        facts = {"ceiling": ceiling, "measured": statistics.to_plain(), "ratio": ratio, "policies": simulated}
        facts |= mode_facts(engine) | {"memory": engine.memory.to_plain()}
        facts |= {"decisions": None if counts is None else counts.to_plain(), **accelerator_facts(engine)}
        if profile:
            facts["profile"] = profile
        facts["prefetch_by_layer"] = [layer.to_plain() for layer in advice]
        output.data_json({**facts, "tokens": statistics.tokens, "host": host.to_plain()})
        return
    read = output.human_bytes(round(statistics.decode_bytes_read_per_token))
    sentence = f"{share(ratio)} of the ceiling with the {read} that a token read: {output.human_ms(ceiling['run_ns'])}"
    output.data(f"\n{statistics_block(statistics)}\n\nratio  {sentence}")
    if any(layer.read for layer in advice):
        cells = [(layer.layer, layer.read, layer.used, share(layer.precision), share(layer.recall)) for layer in advice]
        output.data(f"\n{output.table(cells, ('layer', 'read ahead', 'used', 'precision', 'recall'))}")
    if simulated:
        least = {row["share"]: row["misses"] for row in simulated if row["policy"] == "optimum"}
        lines = [
            (
                f"{row['share']:.0%}",
                row["policy"],
                row["misses"],
                share(row["hits"] / max(row["lookups"], 1)),
                output.human_bytes(row["bytes_read"]),
                "-" if not least[row["share"]] else f"{row['misses'] / least[row['share']]:.2f}",
            )
            for row in simulated
        ]
        output.data(f"\n{output.table(lines, ('cache', 'policy', 'misses', 'hit rate', 'read', 'x optimum'))}")
    say_decisions(engine)
    if profile:
        kernel_rows = [
            [
                row["part"],
                "" if row["calls_per_token"] is None else f"{row['calls_per_token']:g}",
                f"{row['ns_per_token'] / 1e6:.3f} ms",
                share(row["share"]),
            ]
            for row in profile
        ]
        output.data(f"\n{output.table(kernel_rows, ['of a token', 'calls', 'time', 'share'])}")


def _profile_rows(times: KernelTimes, statistics: RunStatistics) -> list[dict[str, Any]]:
    """Return a row per kernel, longest first, then the wait for experts, then the rest, which is Python.

    The shares add up to 1. Time of an accelerator counts as Python.
    times: times of the tokens after the first.
    """
    shares, rate, tokens = statistics.decode_shares, statistics.tokens_per_s, statistics.tokens - 1
    if shares is None or rate is None:
        return []
    token_ns = 1e9 / rate
    waiting_ns = shares.stall * token_ns
    kernel_ns = {name: elapsed_ns / tokens for name, elapsed_ns in times.elapsed_ns.items()}
    if WAITS in kernel_ns:
        kernel_ns[WAITS] -= waiting_ns
    longest = sorted(kernel_ns, key=lambda name: -kernel_ns[name])
    timed = [(name, times.calls[name] / tokens, kernel_ns[name]) for name in longest]
    left_ns = token_ns - waiting_ns - sum(kernel_ns.values())
    rows = [*timed, (WAITING, None, waiting_ns), (PYTHON, None, left_ns)]
    return [
        {"part": name, "calls_per_token": calls, "ns_per_token": ns, "share": ns / token_ns} for name, calls, ns in rows
    ]


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
    size, time = output.human_bytes, output.human_ms
    alike = "" if ceiling["is_calibrated"] else ", all experts alike without calibration"
    rates = f"{size(host.storage_bytes_per_s)}/s, {host.storage_latency_ns / 1e3:.0f} us a read"
    reads = f"{size(ceiling['missed_bytes_per_token'])} a token expected with a cache of {size(ceiling['cache_bytes'])}"
    pairs = [
        ("memory", f"{size(host.memory_bytes_per_s)}/s ({host.provenance['memory_bytes_per_s']})"),
        ("storage", f"{rates} ({host.provenance['storage_bytes_per_s']})"),
        ("compute", f"{size(ceiling['compute_bytes_per_token'])} a token: {time(ceiling['compute_ns'])}"),
        ("reads", f"{reads}{alike}: {time(ceiling['storage_ns'])}"),
        ("ceiling", f"TPOT {time(ceiling['tpot_ns'])}, {1e9 / ceiling['tpot_ns']:.1f} tokens/s"),
    ]
    return output.facts(pairs)
