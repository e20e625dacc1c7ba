"""`moec simulate`: the predicted speed of a bundle on a device that is not available."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import DoesNotFit, OptionError
from moec.runtime.options.runtime import POLICIES, WEIGHTED_POLICIES, parse_cache, parse_weights

from ...lossy_modes.mode_sweep import EXACT, mode_sweep_option, settings_of
from ...options.opening import bundle_folder
from ...options.paths import PLACE, bundle_argument, file_option, json_option
from ...options.set_option import RUN_SETTINGS, Table, set_option
from ...options.systems import as_option, prescribed
from ...simulation.lossy_replay import require_scores
from ...simulation.predictions import (
    Row,
    Simulation,
    has_static_routers,
    joules_text,
    power_text,
    token_joules,
)
from ...simulation.simulated_device import device_rates, parse_accelerator, shared_device
from ...simulation.traces import open_traces, replayed_bundle
from ...terminal import output
from ...terminal.run_statistics import decisions_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moec.profiles.device import DeviceProfile
    from moec.profiles.device_parts import Power
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.expert_cache.policies import PolicyScore
    from moec.runtime.options.runtime import Prefetch, PrefetchRule
    from moec.runtime.simulation.timeline import Advice
    from moec.runtime.trace.trace import Trace

OPTIMUM = "optimum"
DEFAULT_CACHES = ("10%", "25%", "50%", "75%")
_FROM_TRACE = ("policy", "policy_weights", "prefetch", "prefetch_rule", "prefetch_layers")
SIMULATED: Table = {
    **{name: (None, replace(RUN_SETTINGS[name][1], default_text="that of the trace")) for name in _FROM_TRACE},
    **{name: RUN_SETTINGS[name] for name in ("cache_state", "readers", "cooperation")},
    "policy": (None, replace(RUN_SETTINGS["policy"][1], choices=(), metavar="NAME,...")),
}
"""Settings of a simulation. Several policies are compared."""
DEFAULT_POLICIES = ("lrfu", "hobbit", "edgemoe", "lru", "lfu", OPTIMUM)


@click.command("simulate", short_help="Predict decoding on a device from a routing trace.")
@bundle_argument
@file_option("--trace", "trace_path", required=True, help="Trace that `moec bench --trace-out` wrote.")
@click.option(
    "--profile",
    type=PLACE,
    metavar="NAME|FILE",
    help="Device profile, as for `compile --device`.  [default: the machine of the trace]",
)
@click.option(
    "--expert-cache",
    "caches",
    multiple=True,
    metavar="SIZE|PERCENT",
    help="Memory for routed experts; repeatable.  [default: 10, 25, 50 and 75 %]",
)
@click.option(
    "--read-rate", metavar="SIZE", help="Storage bandwidth per second, like `90MB`.  [default: the profile's]"
)
@click.option(
    "--read-latency", metavar="TIME", help="Latency of one read, like `150us` or `8ms`.  [default: the profile's]"
)
@click.option(
    "--accelerator",
    metavar="memory=SIZE,expert=TIME,token=TIME,link=SIZE",
    help="Accelerator: its memory, the fixed time of an expert, its time per token, and the link in bytes/s.  "
    "[default of memory and link: the GPU of the profile]",
)
@as_option()
@set_option(SIMULATED)
@mode_sweep_option
@json_option
def simulate_command(bundle: Path, trace_path: Path, as_json: bool, **values: Any) -> None:
    """Replay a trace of the bundle in folder BUNDLE on a device, event by event. Predict the time per token.

    Reads wait in one queue. Experts that a layer needs come before experts that are read ahead. A read takes its
    latency, and its bytes over the bandwidth. Layers compute as long as in the trace, scaled by the memory bandwidths
    of both machines. The cache starts with the most popular experts, or empty.

    --set takes policy (several, with commas, also `optimum`), policy-weights, prefetch, prefetch-rule, prefetch-layers,
    cache-state, readers and cooperation. A trace holds the advice of lookahead if its run had a cache that does not
    hold all experts. The advice of tables is computed again, and so is that of the rule `first-miss`.

    With --modes the trace is decided again under lossy modes, by the same code as in a run. The decisions come from
    the router scores of each token and from the confidence of the little model. They are those of a run with equal
    hidden states. `moec eval --modes` measures the cost in quality.

    With --accelerator a device holds the most popular experts that fit into its memory. The other experts are divided
    between device and CPU as `run --accelerator cuda` does. The `mode:` line of such a run names the times of the
    device and the rate of its link. The CPU's time of an expert comes from the trace. Dense weights stay on the CPU.

    If the profile states a power draw, each row has the energy of a token: that draw times the predicted time. The
    profile says which parts of the device the draw covers. With --accelerator the GPU counts as always busy.

    \b
    moec bench mixtral-moec --text held-out.txt --expert-cache 50% --trace-out held-out.trace
    moec simulate mixtral-moec --trace held-out.trace --profile raspberry-pi-4b-sd
    moec simulate mixtral-moec --trace held-out.trace --read-rate 90MB --set policy=lrfu --expert-cache 25%
    moec simulate mixtral-moec --trace held-out.trace --modes "big-little gamma=0.7; dynamic-precision 0.6,1"
    moec simulate mixtral-moec --trace held-out.trace --accelerator memory=8GiB,expert=600us,token=2us,link=12GB
    """
    from moec.profiles.loading import load_profile
    from moec.profiles.predict import recommended_cache_bytes
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.memory.budget import nominal_memory

    opened = open_bundle(bundle_folder(bundle))
    _apply_system(values, opened.path)
    profile = load_profile(values["profile"], opened.path) if values["profile"] is not None else None
    power = None if profile is None else profile.power
    simulation = _simulation(opened, trace_path, profile, values)
    trace, rates, shared = simulation.trace, simulation.rates, simulation.shared
    total_bytes = simulation.replayed.total_bytes
    capacities = [parse_cache(text, total_bytes) for text in values["caches"] or DEFAULT_CACHES]
    settings = _settings(values["modes"], trace_path, trace, opened)
    rows = simulation.rows(
        capacities, _policies(values["policy"], values["policy_weights"], settings, opened), settings
    )
    cache_bytes = None
    if profile is not None:
        with suppress(DoesNotFit):
            fixed, experts_bytes = nominal_memory(opened.manifest), opened.manifest.cost.expert_padded_bytes
            cache_bytes = recommended_cache_bytes(profile, fixed, experts_bytes)
    name = profile.name if profile is not None else "the recorder"
    times = [step.elapsed_ns for step in trace.passes[trace.prompt_passes :]]
    if as_json:
        device: dict[str, Any] = {"name": name, **asdict(rates), "cache_bytes": cache_bytes, "accelerator": None}
        if shared is not None:
            device["accelerator"] = {
                "cooperation": shared.cooperation, "resident": len(shared.resident),
                "latency": shared.latency.to_plain(),
            }  # fmt: skip
        device["power"] = None if power is None else power.to_plain()
        recorded = {"tokens": len(times) + 1, "tpot_mean_ns": round(sum(times) / len(times)) if times else None}
        plain = [
            {
                **row.to_plain(),
                "share": row.timeline.capacity_bytes / total_bytes,
                "joules_per_token": token_joules(power, row.timeline),
            }
            for row in rows
        ]
        output.data_json({"device": device, "prefetch": simulation.prefetch, "recorded": recorded, "rows": plain})
        return
    storage = f"{output.human_bytes(rates.storage_bytes_per_s)}/s, {rates.storage_latency_ns / 1e3:.0f} us a read"
    heading = [
        ("trace", f"{trace.header.prompt_tokens} tokens of prompt, {len(times) + 1} decoded"),
        ("device", f"{name}: storage {storage}; computing takes {rates.compute_scale:.2f} x as long"),
        ("prefetch", f"{simulation.prefetch}, {rates.readers} readers"),
    ]
    if shared is not None:
        resident = f"{len(shared.resident)} of {simulation.replayed.count} experts on it"
        heading.append(("accelerator", f"{resident}, cooperation {shared.cooperation}, {shared.latency.to_text()}"))
    if profile is not None:
        fits = "too little for this bundle" if cache_bytes is None else f"leaves {output.human_bytes(cache_bytes)}"
        heading.append(("memory", fits + " for experts" * (cache_bytes is not None)))
    if power is not None and (draws := power_text(power, shared is not None)) is not None:
        heading.append(("power", draws))
    output.data(f"{output.facts(heading)}\n\n{_table(rows, total_bytes, power)}")


def _simulation(bundle: Bundle, trace_path: Path, profile: DeviceProfile | None, values: dict[str, Any]) -> Simulation:
    """Return the simulation of the trace on the device of the options."""
    from moec.runtime.simulation.recorded_advice import recorded_advice, table_advice

    (recorded,) = open_traces([trace_path], bundle)
    rates = device_rates(recorded.header, profile, values["readers"], values["read_rate"], values["read_latency"])
    prefetch, cooperation = values["prefetch"] or recorded.header.prefetch, values["cooperation"]
    trace = with_prefetch_rule(recorded, trace_path, bundle, prefetch, values["prefetch_rule"])
    trace = with_prefetch_layers(trace, trace_path, bundle, prefetch, values["prefetch_layers"])
    replayed = replayed_bundle(bundle)
    if values["cache_state"] == "cold":
        replayed = replace(replayed, warm=[])
    shared = None
    if values["accelerator"] is not None:
        accelerator = parse_accelerator(values["accelerator"], None if profile is None else profile.gpu)
        shared = shared_device(bundle, trace, rates, accelerator, cooperation)
    elif cooperation != "auto":
        raise OptionError("`cooperation` has no effect without a device", "add `--accelerator`")
    if prefetch == recorded.header.prefetch and (prefetch == "lookahead" or trace is recorded):
        advice: Advice = recorded_advice
    elif prefetch == "lookahead":
        raise OptionError(
            f"the trace, recorded with `prefetch={trace.header.prefetch}`, lacks what routers would have guessed",
            "record it with `moec bench --set prefetch=lookahead` and a cache that does not hold all experts",
        )
    else:
        advice = table_advice(prefetch, bundle.tables(), bundle.manifest.model, trace)
    return Simulation(bundle, trace, replayed, rates, prefetch, advice, shared)


def _apply_system(values: dict[str, Any], bundle: Path) -> None:
    """Set what the system of `--as` prescribes for a simulation, except what the command line sets."""
    from moec.runtime.tuning.mode_records import recorded_setting

    if values["preset"] is None:
        return
    source, context = click.core.ParameterSource.COMMANDLINE, click.get_current_context()
    given = {name for name in SIMULATED if context.get_parameter_source(name) is source}
    given |= {"lossy"} if values["modes"] is not None else set()
    chosen = prescribed(values["preset"], given, bundle, (*SIMULATED, "lossy"))
    if "lossy" in chosen:
        values["modes"] = recorded_setting(bundle, chosen.pop("lossy"))
    values |= chosen


def with_prefetch_rule(
    trace: Trace, path: Path, bundle: Bundle, prefetch: Prefetch, rule: PrefetchRule | None
) -> Trace:
    """Return the trace as if recorded under a rule of lookahead.

    path: for messages.
    prefetch: the prefetcher that is simulated.
    rule: None keeps the rule of the trace.
    Raises OptionError if the trace cannot be decided again.
    """
    from moec.runtime.options.lossy import LossyModes
    from moec.runtime.simulation.lossy_replay import missing_scores

    if rule is None or rule == trace.header.prefetch_rule:
        return trace
    if prefetch in ("path", "popularity") and rule != "first-miss":  # the advice of tables is computed again
        return replace(trace, header=replace(trace.header, prefetch_rule=rule))
    if prefetch != "lookahead":
        raise OptionError(f"`prefetch-rule={rule}` is not for the prefetcher `{prefetch}`", "leave it out")
    if has_static_routers(bundle):
        raise OptionError(
            f"`prefetch-rule={rule}` is decided again from scores, and here experts follow from the token",
            "leave it out",
        )
    if rule != "first-miss" or missing_scores(trace, LossyModes()) is not None:
        raise OptionError(
            f"`{path}` was recorded with the rule `{trace.header.prefetch_rule}` and lacks what `{rule}` would ask",
            f"record it with `moec bench BUNDLE --set prefetch-rule={rule} --trace-out FILE`",
        )
    return replace(trace, header=replace(trace.header, prefetch_rule=rule))


def with_prefetch_layers(trace: Trace, path: Path, bundle: Bundle, prefetch: Prefetch, layers: int | None) -> Trace:
    """Return the trace as if lookahead had asked so many layers; None keeps it.

    path: for messages.
    Raises OptionError if the trace of a lookahead lacks what would have been asked.
    """
    from moec.runtime.options.lossy import LossyModes
    from moec.runtime.simulation.lossy_replay import missing_scores

    recorded = trace.header.prefetch_layers
    if layers is None or layers == recorded:
        return trace
    # The rule `first-miss` is decided again from scores. Other rules recorded the advice of just so many layers.
    is_decided_again = trace.header.prefetch_rule == "first-miss" and missing_scores(trace, LossyModes()) is None
    if prefetch == "lookahead" and (layers > recorded or not is_decided_again or has_static_routers(bundle)):
        raise OptionError(
            f"`{path}` was recorded with {recorded} layers of lookahead by the rule `{trace.header.prefetch_rule}`, "
            f"and lacks what {layers} would ask",
            f"record it with `moec bench BUNDLE --set prefetch-layers={layers} --trace-out FILE`",
        )
    return replace(trace, header=replace(trace.header, prefetch_layers=layers))


def _settings(modes: str | None, path: Path, trace: Trace, bundle: Bundle) -> list[dict[str, str]]:
    """Return the options of every setting in `--modes`, the exact one first.

    A setting may need scores that the trace lacks. A sweep leaves it out.
    Raises OptionError if `--modes` names such a setting.
    """
    from moec.runtime.tuning.mode_records import calibrated_deciles

    if modes is None:
        return [{}]
    settings: list[dict[str, str]] = [{}]
    for options in settings_of(modes, bundle.manifest, calibrated_deciles(bundle.path))[1:]:
        try:
            require_scores(path, trace, options)
        except OptionError as refusal:
            if modes != "sweep":
                raise
            output.say(f"left out: {refusal.message}")
            continue
        settings.append(options)
    return settings


def _policies(
    names: str | None, weights: str | None, settings: Sequence[dict[str, str]], bundle: Bundle
) -> dict[str, str | PolicyScore]:
    """Return the policies of a list with commas, or the default ones, with their scores. Raises OptionError."""
    from moec.runtime.bundle.eviction_weights import FITTED_POLICY, fitted_weights
    from moec.runtime.expert_cache.policies import MultidimensionalScore, policy_score

    policies = [] if names is None else [name.strip() for name in names.split(",")]
    for name in policies:
        if name not in (*POLICIES, OPTIMUM):
            raise OptionError(f"unknown policy `{name[:40]}`", f"choose from {', '.join((*POLICIES, OPTIMUM))}")
    if len(settings) > 1 and OPTIMUM in policies:
        raise OptionError("`policy=optimum` knows the future, and lossy modes decide without", "leave one of them out")
    policies = policies or list(DEFAULT_POLICIES if len(settings) == 1 else DEFAULT_POLICIES[:1])
    scores: dict[str, str | PolicyScore] = {policy: policy for policy in policies}
    if weights is None:
        fitted = fitted_weights(bundle) if FITTED_POLICY in scores else None
        return scores if fitted is None else scores | {FITTED_POLICY: policy_score(FITTED_POLICY, fitted)}
    parsed = parse_weights(weights)
    weighted = [policy for policy in policies if policy in WEIGHTED_POLICIES]
    if not weighted:
        raise OptionError("`policy-weights` has no effect on these policies", "add `--set policy=hobbit`")
    return scores | {policy: MultidimensionalScore(parsed, policy == "hobbit-printed") for policy in weighted}


def _table(rows: Sequence[Row], total_bytes: int, power: Power | None) -> str:
    """Return the table of predictions. It has columns of energy, modes and decisions if a row has them."""
    has_modes, lines = any(row.mode for row in rows), list[tuple[str, ...]]()
    has_energy = any(token_joules(power, row.timeline) is not None for row in rows)
    for row in rows:
        predicted = row.timeline
        line: tuple[str, ...] = (
            f"{predicted.capacity_bytes / total_bytes:.0%}",
            predicted.policy,
            output.human_ms(predicted.tpot_mean_ns),
            "-" if predicted.tokens_per_s is None else f"{predicted.tokens_per_s:.2f}",
            output.human_share(predicted.stall),
            output.human_share(predicted.cache.hit_rate),
            output.human_bytes(predicted.decode_bytes_read_per_token),
            *((joules_text(token_joules(power, predicted)),) if has_energy else ()),
        )
        gain = "-" if row.gain is None else f"{row.gain:.2f}"
        lines.append((row.mode or EXACT, *line, gain, decisions_text(row.decisions)) if has_modes else line)
    header: tuple[str, ...] = ("cache", "policy", "TPOT", "tokens/s", "stalled", "hit rate", "read a token")
    header += ("energy",) if has_energy else ()
    return output.table(lines, ("mode", *header, "x exact", "decisions") if has_modes else header)
