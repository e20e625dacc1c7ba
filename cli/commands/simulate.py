"""`moec simulate`: how fast a bundle would decode on a device that nobody has at hand."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import DoesNotFit, OptionError
from moec.runtime.options.runtime import (
    COOPERATIONS,
    POLICIES,
    PREFETCH_RULES,
    PREFETCHERS,
    WEIGHTED_POLICIES,
    parse_cache,
    parse_weights,
)

from ..lossy_modes.mode_sweep import LOSSLESS, decisions_text, mode_sweep_option, settings_of
from ..options.opening import bundle_folder
from ..options.paths import PLACE, bundle_argument, file_option
from ..options.runtime_options import cache_state_option
from ..simulation.lossy_replay import require_scores
from ..simulation.predictions import Row, Simulation, has_static_routers
from ..simulation.simulated_device import device_rates, parse_accelerator, shared_device
from ..simulation.traces import open_traces, replayed_bundle
from ..terminal import output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moec.profiles.device import DeviceProfile
    from moec.runtime.bundle.opening import Bundle
    from moec.runtime.expert_cache.eviction import PolicyScore
    from moec.runtime.options.runtime import Cooperation, Prefetch, PrefetchRule
    from moec.runtime.simulation.accelerator_replay import ReplayedDevice
    from moec.runtime.simulation.timeline import Advice, DeviceRates
    from moec.runtime.trace.trace import Trace

OPTIMUM = "optimum"
DEFAULT_CACHES = ("10%", "25%", "50%", "75%")
DEFAULT_POLICIES = ("lrfu", "hobbit", "edgemoe", "lru", "lfu", OPTIMUM)


@click.command("simulate", short_help="Predict decoding on a device from a routing trace.")
@bundle_argument
@file_option(
    "--trace",
    "trace_path",
    required=True,
    help="What `moec bench --trace-out` recorded.",
)
@click.option(
    "--profile",
    type=PLACE,
    metavar="NAME|FILE",
    help="Device profile, as for `compile --device`.  [default: the recorder]",
)
@click.option(
    "--expert-cache",
    "caches",
    multiple=True,
    metavar="SIZE|PERCENT",
    help="Memory for routed experts; may be repeated.  [default: 10, 25, 50 and 75 %]",
)
@click.option(
    "--policy",
    "policies",
    type=click.Choice((*POLICIES, OPTIMUM)),
    multiple=True,
    help="Which expert goes first; may be repeated.  [default: most of them, and the offline optimum]",
)
@click.option("--policy-weights", metavar="LRU,LFU,LHU,FLD", help="Of `hobbit` and `hobbit-printed`.")
@click.option(
    "--prefetch",
    type=click.Choice(PREFETCHERS),
    help="How the next experts are guessed; `lookahead` must be in the trace.  [default: what was recorded]",
)
@click.option(
    "--prefetch-rule",
    type=click.Choice(PREFETCH_RULES),
    help="With `lookahead`: `first-miss` is decided again, others must be in the trace.  [default: what was recorded]",
)
@cache_state_option
@click.option("--readers", type=int, default=2, show_default=True, metavar="N", help="Expert reads under way at once.")
@click.option("--read-rate", metavar="SIZE", help="Storage bandwidth per second, like `90MB`, over the profile's.")
@click.option("--read-latency", metavar="TIME", help="Of one read, like `150us` or `8ms`, over the profile's.")
@click.option(
    "--accelerator",
    metavar="memory=SIZE,expert=TIME,token=TIME,link=SIZE",
    help="A device that shares the experts: its memory, an expert's time there (and per token), bytes/s to it.",
)
@click.option(
    "--cooperation",
    type=click.Choice(COOPERATIONS),
    default="auto",
    show_default=True,
    help="Which experts that are not on it are copied: by measured times, Twiddler's rule, all, none.",
)
@mode_sweep_option("Predict every lossy mode, or these settings, beside the lossless run.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def simulate_command(bundle: Path, trace_path: Path, as_json: bool, **values: Any) -> None:
    """Replay a trace of the bundle in folder BUNDLE on a device, event by event, and predict its time per token.

    Reads wait in one queue, what a layer needs before what is read ahead, each latency + bytes / bandwidth. Meanwhile
    layers compute as long as they did when the trace was recorded, scaled by the memory bandwidths of both machines.
    The cache starts with what calibration saw most often, or empty. A trace that was recorded under a cache that does
    not hold all experts has the routers' advice in it; the advice of tables is computed again.

    What the lookahead of `--prefetch-rule first-miss` advises depends on what is cached, and is decided again.

    With --modes the trace is decided again under lossy modes, by the code that decides in a run, from the scores that
    routers gave each token and from how sure half of its experts were of the next. Each decision is that of a run as
    far as hidden states are; what a mode costs in quality, `moec eval --modes` measures.

    With --accelerator a device holds the most popular experts, as many as its memory has room for, and shares the
    others with the processor as `run --accelerator cuda` would plan it; its times, and the rate of its link, are the
    ones that the `mode:` line of a run on such a device names. What an expert takes the processor comes from the trace;
    dense weights stay with it.

    \b
    moec bench mixtral-moec --text held-out.txt --expert-cache 50% --trace-out held-out.trace
    moec simulate mixtral-moec --trace held-out.trace --profile raspberry-pi-4b-sd
    moec simulate mixtral-moec --trace held-out.trace --read-rate 90MB --policy lrfu --expert-cache 25%
    moec simulate mixtral-moec --trace held-out.trace --modes "big-little gamma=0.7; dynamic-precision 0.6,1"
    moec simulate mixtral-moec --trace held-out.trace --accelerator memory=8GiB,expert=600us,token=2us,link=12GB
    """
    from moec.profiles.loading import load_profile
    from moec.runtime.bundle.opening import open_bundle

    opened = open_bundle(bundle_folder(bundle))
    (trace,) = open_traces([trace_path], opened)
    profile = load_profile(values["profile"], opened.path) if values["profile"] is not None else None
    rates = device_rates(trace.header, profile, values["readers"], values["read_rate"], values["read_latency"])
    prefetch = values["prefetch"] or trace.header.prefetch
    trace = with_prefetch_rule(trace, trace_path, opened, prefetch, values["prefetch_rule"])
    replayed = replayed_bundle(opened)
    if values["cache_state"] == "cold":
        replayed = replace(replayed, warm=[])
    capacities = [parse_cache(text, replayed.total_bytes) for text in values["caches"] or DEFAULT_CACHES]
    settings = _settings(values["modes"], trace_path, trace, opened)
    policies = _scores(_policies(values["policies"], settings), values["policy_weights"])
    room = None if profile is None else _device_cache_bytes(opened, profile)
    shared = _shared(values["accelerator"], values["cooperation"], opened, trace, rates)
    simulation = Simulation(opened, trace, replayed, rates, prefetch, _advice(opened, trace, prefetch), shared)
    found = simulation.rows(capacities, policies, settings)
    name = profile.name if profile is not None else "the recorder"
    if as_json:
        rows = [each.to_plain() | {"share": each.timeline.capacity_bytes / replayed.total_bytes} for each in found]
        device = {"name": name, **asdict(rates), "cache_bytes": room, "accelerator": _shared_plain(shared)}
        output.data_json({"device": device, "prefetch": prefetch, "recorded": _recorded(trace), "rows": rows})
        return
    heading = _heading(trace, name, rates, prefetch)
    if shared is not None:
        on_it = f"{len(shared.resident)} of {replayed.count} experts on it"
        heading.append(("accelerator", f"{on_it}, cooperation {shared.cooperation}, {shared.latency.to_text()}"))
    if profile is not None:
        left = "too little for this bundle" if room is None else f"leaves {output.human_bytes(room)} for experts"
        heading.append(("memory", left))
    output.data(f"{output.facts(heading)}\n\n{_table(found, replayed.total_bytes)}")


def _shared(
    accelerator: str | None, cooperation: Cooperation, bundle: Bundle, trace: Trace, rates: DeviceRates
) -> ReplayedDevice | None:
    if accelerator is not None:
        return shared_device(bundle, trace, rates, parse_accelerator(accelerator), cooperation)
    if cooperation != "auto":
        raise OptionError("`--cooperation` has no effect without a device", "add `--accelerator`")
    return None


def _shared_plain(shared: ReplayedDevice | None) -> dict[str, Any] | None:
    if shared is None:
        return None
    return {"cooperation": shared.cooperation, "resident": len(shared.resident), "latency": shared.latency.to_plain()}


def with_prefetch_rule(
    trace: Trace, path: Path, bundle: Bundle, prefetch: Prefetch, rule: PrefetchRule | None
) -> Trace:
    """Return the trace as if recorded under a rule of lookahead.

    path: for messages.
    prefetch: the prefetcher that is simulated.
    rule: None keeps the rule of the trace.
    Raises OptionError where it cannot be decided again.
    """
    from moec.runtime.options.lossy import LossyModes
    from moec.runtime.simulation.lossy_replay import missing_scores

    if rule is None or rule == trace.header.prefetch_rule:
        return trace
    if prefetch != "lookahead":
        raise OptionError(f"`--prefetch-rule` decides lookahead again, not the prefetcher `{prefetch}`", "leave it out")
    if has_static_routers(bundle):
        raise OptionError(
            f"`--prefetch-rule {rule}` is decided again from scores, and here experts follow from the token",
            "leave it out",
        )
    if rule != "first-miss" or missing_scores(trace, LossyModes()) is not None:
        raise OptionError(
            f"`{path}` was recorded with the rule `{trace.header.prefetch_rule}` and lacks what `{rule}` would ask",
            f"record it with `moec bench BUNDLE --prefetch-rule {rule} --trace-out FILE`",
        )
    return replace(trace, header=replace(trace.header, prefetch_rule=rule))


def _settings(modes: str | None, path: Path, trace: Trace, bundle: Bundle) -> list[dict[str, str]]:
    """Options of every setting that is asked for, the lossless one first. Raises OptionError where the trace lacks what
    one of them decides by; a sweep leaves that one out.
    """
    from moec.runtime.tuning.mode_records import calibrated_deciles

    found: list[dict[str, str]] = [{}]
    asked = [] if modes is None else settings_of(modes, bundle.manifest, calibrated_deciles(bundle.path))[1:]
    for options in asked:
        try:
            require_scores(path, trace, options)
        except OptionError as refusal:
            if modes != "sweep":
                raise
            output.say(f"left out: {refusal.message}")
            continue
        found.append(options)
    return found


def _policies(asked: Sequence[str], settings: Sequence[dict[str, str]]) -> Sequence[str]:
    if len(settings) == 1:
        return asked or DEFAULT_POLICIES
    if OPTIMUM in asked:
        raise OptionError(
            "`--policy optimum` knows the future, and lossy modes decide without", "leave one of them out"
        )
    return asked or DEFAULT_POLICIES[:1]


def _scores(policies: Sequence[str], weights: str | None) -> dict[str, str | PolicyScore]:
    from moec.runtime.expert_cache.eviction import MultidimensionalScore

    if weights is None:
        return {policy: policy for policy in policies}
    fitted = parse_weights(weights)
    if not set(policies) & set(WEIGHTED_POLICIES):
        raise OptionError("`--policy-weights` has no effect on these policies", "add `--policy hobbit`")
    return {
        policy: MultidimensionalScore(fitted, policy == "hobbit-printed") if policy in WEIGHTED_POLICIES else policy
        for policy in policies
    }


def _advice(bundle: Bundle, trace: Trace, prefetch: Prefetch) -> Advice:
    """What a prefetcher would have said, pass by pass and layer by layer."""
    from moec.runtime.simulation.recorded_advice import recorded_advice, table_advice

    if prefetch == trace.header.prefetch:
        return recorded_advice
    if prefetch == "lookahead":
        raise OptionError(
            f"the trace, recorded with `--prefetch {trace.header.prefetch}`, lacks what routers would have guessed",
            "record it with `moec bench --prefetch lookahead` and a cache that does not hold all experts",
        )
    return table_advice(prefetch, bundle.tables(), bundle.manifest.model, trace)


def _device_cache_bytes(bundle: Bundle, profile: DeviceProfile) -> int | None:
    """What the device's memory leaves for experts at the default context; None if it cannot hold the rest."""
    from moec.profiles.predict import recommended_cache_bytes
    from moec.runtime.memory.budget import nominal_memory

    try:
        fixed = nominal_memory(bundle.manifest)
        return recommended_cache_bytes(profile, fixed, bundle.manifest.cost.expert_padded_bytes)
    except DoesNotFit:
        return None


def _recorded(trace: Trace) -> dict[str, Any]:
    """How fast the recording run was."""
    steps = [each.elapsed_ns for each in trace.passes[trace.prompt_passes :]]
    return {"tokens": len(steps) + 1, "tpot_mean_ns": round(sum(steps) / len(steps)) if steps else None}


def _heading(trace: Trace, name: str, rates: DeviceRates, prefetch: str) -> list[tuple[str, object]]:
    return [
        ("trace", f"{trace.header.prompt_tokens} tokens of prompt, {_recorded(trace)['tokens']} decoded"),
        (
            "device",
            f"{name}: storage {output.human_bytes(rates.storage_bytes_per_s)}/s, "
            f"{rates.storage_latency_ns / 1e3:.0f} us a read; computing takes {rates.compute_scale:.2f} x as long",
        ),
        ("prefetch", f"{prefetch}, {rates.readers} readers"),
    ]


def _table(rows: Sequence[Row], total_bytes: int) -> str:
    """Modes, and what they decided, only where there are any."""
    has_modes, lines = any(row.mode for row in rows), list[tuple[str, ...]]()
    for row in rows:
        found = row.timeline
        line: tuple[str, ...] = (
            f"{found.capacity_bytes / total_bytes:.0%}",
            found.policy,
            output.human_ms(found.tpot_mean_ns),
            "-" if found.tokens_per_s is None else f"{found.tokens_per_s:.2f}",
            output.human_share(found.stall),
            output.human_share(found.cache.hit_rate),
            output.human_bytes(found.decode_bytes_read_per_token),
        )
        gain = "-" if row.gain is None else f"{row.gain:.2f}"
        lines.append((row.mode or LOSSLESS, *line, gain, decisions_text(row.decisions)) if has_modes else line)
    header: tuple[str, ...] = ("cache", "policy", "TPOT", "tokens/s", "stalled", "hit rate", "read a token")
    return output.table(lines, ("mode", *header, "x lossless", "decisions") if has_modes else header)
