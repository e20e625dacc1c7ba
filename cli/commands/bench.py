"""`moec bench`: the ceiling that the machine sets, the measurement, and the ratio of the two."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import OptionError
from moec.runtime.options.lossy import HALF

from ..lossy_modes.mode_costs import say_mode_cost
from ..lossy_modes.mode_sweep import mode_sweep_option, say_decisions, speed_page, speed_sweep, sweep_options
from ..measuring.decode_speed import DEFAULT_PROMPT, continuation, measure_decode, new_tracer, sequence_of
from ..options.opening import accelerator_facts, bundle_folder, mode_facts, open_engine
from ..options.paths import bundle_argument, file_option, output_option
from ..options.runtime_options import accelerator_options, build_options, mode_options, runtime_options
from ..simulation.traces import recorded_trace, replayed_bundle
from ..terminal import output
from ..terminal.help_sections import SectionCommand
from ..terminal.profile_table import profile_rows, profile_table
from .run import statistics_block

if TYPE_CHECKING:
    from moec.profiles.device import DeviceProfile
    from moec.runtime.bundle.opening import Bundle
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
@click.option("--prompt", default=DEFAULT_PROMPT, metavar="TEXT", help="What the measured sequence starts with.")
@file_option(
    "--text",
    "text_path",
    help="Measure on the tokens of this text, not on a continuation of the prompt.",
)
@click.option("--prompt-tokens", type=int, default=32, show_default=True, metavar="N", help="With `--text`: prefill.")
@click.option(
    "--policies",
    type=click.Choice(("none", "all")),
    default="none",
    show_default=True,
    help="Replay the run's expert trace under every eviction policy, caches of 25, 50 and 75 %.",
)
@output_option(
    "--trace-out",
    help="Write the run's routing trace, and of each token what fewer of its experts say, for `simulate` and `tune`.",
)
@click.option(
    "--trace-little",
    metavar="N|K/2",
    default=HALF,
    show_default=True,
    help="With `--trace-out`: so many experts per token and layer in place of half.",
)
@mode_sweep_option("Measure every lossy mode, or these settings, against the lossless run.")
@click.option("--profile", is_flag=True, help="Show what of a token's time each kernel takes, waiting, and Python.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@runtime_options
@mode_options
@accelerator_options
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

    The bundle first continues the prompt by itself, past any end token; a fresh engine is then timed on exactly those
    tokens, so that every setting computes the same. With --text the tokens come from a file: what a bundle of random
    weights says by itself soon repeats, and every cache serves it. The ceiling is what memory and storage could do at
    best, with the misses that calibration expects; the ratio at the end counts what the run has read.

    \b
    moec bench mixtral-moec --expert-cache 50%
    moec bench mixtral-moec --expert-cache 25% --prefetch off --policies all --json
    moec bench mixtral-moec --memory 4GiB --profile
    """
    from moec.runtime.bundle.opening import open_bundle
    from moec.runtime.kernels.profile import timed_kernels
    from moec.runtime.trace.statistics import reset_peak_memory

    opened, kernels = open_bundle(bundle_folder(bundle)), values["kernels"]
    is_traced = trace_out is not None or policies != "none"
    options = _options(values, bundle, tokens, modes, profile, is_traced)
    _check_little(opened.path, trace_out, trace_little)
    if text_path is None:
        sequence = continuation(bundle, options.lossless(), kernels, prompt, tokens)
    else:
        sequence = sequence_of(opened, text_path, prompt_tokens, tokens)
    prompt_length = len(sequence) - tokens
    if modes is not None:
        _print_sweep(speed_sweep(bundle, modes, options, kernels, sequence, prompt_length), options, as_json)
        return
    gc.collect()  # an engine that made the sequence is not the one that is measured
    host = _measured_host(opened, options.threads)
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
        _write_trace(trace_out, trace, bundle, options, kernels, sequence, prompt_length, trace_little)
    simulated = _simulate(opened, trace) if trace is not None and policies == "all" else []
    _tell(engine, statistics, ceiling, simulated, host, kernel_times, as_json)


def _options(
    values: dict[str, Any], bundle: Path, tokens: int, modes: str | None, profile: bool, is_traced: bool
) -> RuntimeOptions:
    """What is measured. Raises OptionError for what does not go together."""
    if tokens < 2:
        raise OptionError(f"`--tokens` must be at least 2, found {tokens}", "leave it out for 128")
    options = build_options(values, bundle=bundle)
    if modes is not None:
        for name, is_given in (("profile", profile), ("trace-out` or `--policies", is_traced)):
            if is_given:
                raise OptionError(f"`--{name}` is of one run, not of a sweep of modes", "leave out one of the two")
        return sweep_options(options)
    if is_traced:
        _check_lossless(options)
    return options


def _check_little(bundle: Path, trace_out: Path | None, little_k: str) -> None:
    """Refuse a little model that is not there, or nobody will hear of, before anything is measured."""
    from ..simulation.little_model import has_little_model

    if trace_out is not None:
        has_little_model(bundle, little_k)
    elif little_k != HALF:
        raise OptionError("`--trace-little` is what a trace says", "add `--trace-out FILE`")


def _write_trace(path: Path, trace: Trace, *asked: Any) -> None:
    """With what the little model says of every token, where there is one. asked: as for `with_little_model`."""
    from moec.runtime.trace.trace_file import write_trace

    from ..simulation.little_model import with_little_model

    write_trace(path, with_little_model(trace, *asked))


def _tell(
    engine: Engine,
    statistics: RunStatistics,
    ceiling: dict[str, Any],
    simulated: list[dict[str, Any]],
    host: DeviceProfile,
    kernel_times: KernelTimes | None,
    as_json: bool,
) -> None:
    """The measurement for people, or with its conditions as JSON. kernel_times: None where they were not asked for."""
    ceiling["run_ns"] = run_ceiling_ns(ceiling, host, statistics)
    profile = [] if kernel_times is None else profile_rows(kernel_times, statistics)
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
    output.data_json({**told, "tokens": statistics.tokens, "host": host.to_plain()})


def _print_sweep(rows: list[dict[str, Any]], options: RuntimeOptions, as_json: bool) -> None:
    if as_json:
        told = {"expert_cache": options.expert_cache, "memory": options.memory, "cache_state": options.cache_state}
        output.data_json({**told, "policy": options.policy, "prefetch": options.prefetch_text, "rows": rows})
    else:
        output.data(speed_page(rows, options))


def _check_lossless(options: RuntimeOptions) -> None:
    """Refuse a trace of anything but a lossless run. Raises OptionError."""
    if not options.modes.is_lossless:
        raise OptionError("a routing trace is of a lossless run", f"leave out {', '.join(options.modes.parts())}")
    if options.accelerator is not None:
        raise OptionError("a routing trace tells how long the CPU took", "leave out `--accelerator`")


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


def _probed_host(bundle: Bundle) -> DeviceProfile:
    """This machine, its storage by reads of the largest expert's size in the largest file of the bundle.

    Where no file is large enough, in one made beside the bundle.
    """
    from moec.profiles.probe import MIN_SAMPLE_BYTES, probe_host

    largest = max(bundle.manifest.files, key=lambda entry: entry.size_bytes)
    is_large = largest.size_bytes >= MIN_SAMPLE_BYTES
    place = bundle.path / largest.name if is_large else bundle.path.resolve().parent
    return probe_host(place, request_bytes=max(entry.size_bytes for entry in bundle.manifest.experts))


def _measured_host(bundle: Bundle, threads: int | None) -> DeviceProfile:
    """This machine, its memory by as many threads reading as will decode. threads: None for all processors."""
    from moec.runtime.memory.bandwidth import buffer_bytes, read_bytes_per_s

    host = _probed_host(bundle)
    threads = threads or host.threads
    size = buffer_bytes(sum(entry.size_bytes for entry in bundle.manifest.files))
    told = f"measured: {threads} threads reading {size} bytes, best of three"
    return replace(
        host,
        memory_bytes_per_s=read_bytes_per_s(size, threads),
        provenance={**host.provenance, "memory_bytes_per_s": told},
    )


def predict(bundle: Bundle, host: DeviceProfile, cache_bytes: int) -> dict[str, Any]:
    """The ceiling of decoding: bytes that one token moves, over bandwidth.

    compute_bytes: dense weights (of the embedding one row) and the chosen experts. missed_bytes: of a cache that holds
    what calibration saw most often; a bundle without calibration counts all experts alike.
    """
    from moec.profiles.predict import compute_ns, expected_misses, storage_ns

    manifest = bundle.manifest
    model, popularity = manifest.model, bundle.tables().popularity
    experts, expert_bytes = [], 0.0
    for entry in manifest.experts:
        layer = model.layers[entry.layer].experts
        seen = int(popularity[entry.layer].sum())
        share = int(popularity[entry.layer, entry.expert]) / seen if seen else 1 / layer.count
        reads_per_token = share * model.reads_per_token(entry.layer)
        experts.append((entry.size_bytes, reads_per_token))
        expert_bytes += entry.size_bytes * reads_per_token
    compute_bytes = round(_dense_bytes_per_token(bundle) + expert_bytes)
    missed_bytes, reads = expected_misses(experts, cache_bytes)
    compute, storage = compute_ns(host, compute_bytes), storage_ns(host, missed_bytes, reads)
    return {
        "is_calibrated": bool(popularity.any()),
        "compute_bytes_per_token": compute_bytes,
        "missed_bytes_per_token": round(missed_bytes),
        "reads_per_token": reads,
        "compute_ns": compute,
        "storage_ns": storage,
        "tpot_ns": max(compute, storage),
        "cache_bytes": cache_bytes,
    }


def run_ceiling_ns(ceiling: dict[str, Any], host: DeviceProfile, statistics: RunStatistics) -> int:
    """The least time per token for what a run has read, waste included: computing or storage, whichever is longer.

    Storage gives what the probe found, or what it gave while the run read if that is more: virtual disks may answer a
    process that only reads at half the rate.
    """
    read, shares, rate = statistics.decode_bytes_read_per_token, statistics.decode_shares, host.storage_bytes_per_s
    if shares is not None and shares.storage_busy and statistics.tokens_per_s:
        rate = max(rate, int(read * statistics.tokens_per_s / shares.storage_busy))
    return max(int(ceiling["compute_ns"]), math.ceil(read / rate * 1e9))


def _dense_bytes_per_token(bundle: Bundle) -> int:
    total, model = 0, bundle.manifest.model
    for entry in bundle.manifest.dense:
        if not model.is_decoded_with(entry.name):
            continue
        rows = 1 if len(entry.shape) == 1 else entry.shape[0]
        if entry.name == "embedding" and not model.tie_embeddings:
            rows = 1
        total += round(rows * entry.spec.row_bytes(entry.shape[-1]))
    return total


def _simulate(bundle: Bundle, trace: Trace) -> list[dict[str, Any]]:
    """The run's trace under every policy at every share of the experts, prefetch off."""
    from moec.runtime.expert_cache.eviction import SCORES
    from moec.runtime.simulation.replay import OPTIMUM, POPULARITY, replay

    replayed, accesses, rows = replayed_bundle(bundle), trace.accesses(), list[dict[str, Any]]()
    for share in SHARES:
        capacity = replayed.capacity_bytes(share)
        if capacity is None:
            continue
        for policy in (*SCORES, POPULARITY, OPTIMUM):
            counts = replay(accesses, replayed.cache_spec(capacity), policy, replayed.warm)
            rows.append({"share": share, "policy": policy, "capacity_bytes": capacity, **counts.counts()})
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
