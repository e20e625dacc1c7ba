"""The options that say how a bundle runs, shared by `run`, `eval` and `bench`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from moec.manifests.errors import OptionError
from moec.runtime.options.lossy import CACHE_STATES
from moec.runtime.options.runtime import (
    COOPERATIONS,
    DENSE_PLACES,
    IO_MODES,
    KV_NAMES,
    POLICIES,
    PREFETCH_RULES,
    PREFETCHERS,
    RuntimeOptions,
)

from .opening import bundle_folder

DEFAULT_CACHE = "25%"
"""The expert cache of a sweep of modes, where no size was asked for: one that misses."""

F = TypeVar("F", bound=Callable[..., Any])
OPTION_NAMES = (
    "memory",
    "expert_cache",
    "context",
    "policy",
    "policy_weights",
    "prefetch",
    "prefetch_layers",
    "prefetch_experts",
    "prefetch_rule",
    "io",
    "kv",
    "readers",
    "threads",
    "kernels",
    "no_verify",
)

_OPTIONS = (
    click.option("--memory", metavar="SIZE", help="Budget of the whole process, like `2GiB`.  [default: 7/8 of free]"),
    click.option(
        "--expert-cache", metavar="SIZE|PERCENT", help="Memory for routed experts, like `512MiB` or `50%` of them."
    ),
    click.option(
        "--context",
        type=int,
        default=0,
        metavar="N",
        help="Longest sequence; beyond its original context a longrope model takes its long form throughout.  "
        "[default: the model's, of longrope the original one, at most 4096]",
    ),
    click.option(
        "--policy", type=click.Choice(POLICIES), default="lrfu", show_default=True, help="Which expert goes first."
    ),
    click.option(
        "--policy-weights",
        metavar="LRU,LFU,LHU,FLD",
        help="What recency, uses, uses at high precision and nearness count in `hobbit`; they add up to 1.",
    ),
    click.option(
        "--prefetch",
        type=click.Choice(PREFETCHERS),
        default="lookahead",
        show_default=True,
        help="How the next experts are guessed; never changes a result.",
    ),
    click.option(
        "--prefetch-layers", type=int, default=2, show_default=True, metavar="N", help="Layers guessed ahead, 1 to 4."
    ),
    click.option(
        "--prefetch-experts",
        type=int,
        default=0,
        metavar="N",
        help="Experts of the next layer read ahead for a token, whatever the rule.  [default: as the rule says]",
    ),
    click.option(
        "--prefetch-rule",
        type=click.Choice(PREFETCH_RULES),
        default="likely",
        show_default=True,
        help="Read what is sure enough, a share of each layer's top-k, or that up to the first layer that lacks one.",
    ),
    click.option("--io", type=click.Choice(IO_MODES), default="auto", show_default=True, help="How experts are read."),
    click.option(
        "--kv",
        type=click.Choice(KV_NAMES),
        default="float32",
        show_default=True,
        help="Keys and values; float16 takes half the memory and is LOSSY: they are rounded.",
    ),
    click.option(
        "--readers", type=int, default=2, show_default=True, metavar="N", help="Expert reads under way at once."
    ),
    click.option("--threads", type=int, default=0, metavar="N", help="Threads of a kernel.  [default: all]"),
    click.option("--kernels", metavar="NAME", help="Force an instruction set, like `scalar` or `numpy`."),
    click.option("--no-verify", is_flag=True, help="Do not compare what is read with its digest."),
)


cache_state_option = click.option(
    "--cache-state",
    type=click.Choice(CACHE_STATES),
    default="warm",
    show_default=True,
    help="Start with the most popular experts in memory, or with none.",
)
MODE_NAMES = ("dynamic_precision", "big_little", "cache_routing", "cache_state")

_MODES = (
    click.option(
        "--dynamic-precision",
        metavar="T1,T2",
        help="LOSSY: a missed expert less important than T1 is read in its low version, than T2 not at all. "
        "`auto`: the thresholds measured to read least within `--mode-loss`.",
    ),
    click.option("--mode-loss", default="1%", show_default=True, metavar="SHARE", help="What `auto` may cost."),
    click.option(
        "--big-little",
        metavar="gamma=G,k=N",
        help="LOSSY: decode with N experts per token (`K/2`: half), and again with all where p < G.",
    ),
    click.option(
        "--cache-routing",
        metavar="margin=M,drop=D",
        help="LOSSY: in place of a miss a cached expert scored within M of it, or none if its weight is below D.",
    ),
    cache_state_option,
)


ACCELERATOR_NAMES = ("accelerator", "accelerator_memory", "cooperation", "accelerator_dense")

_ACCELERATOR = (
    click.option(
        "--accelerator",
        metavar="NAME",
        help="Let `cuda` or `cuda:N` compute routed experts beside the CPU; `torch-cpu` only shows that this works.",
    ),
    click.option(
        "--accelerator-memory",
        metavar="SIZE",
        help="Its budget, filled with the most popular experts.  [default: 7/8 of what is free there]",
    ),
    click.option(
        "--cooperation",
        type=click.Choice(COOPERATIONS),
        default="auto",
        show_default=True,
        help="Which of the others are copied there: as many as end a layer first, those that pay alone, all, none.",
    ),
    click.option(
        "--accelerator-dense",
        type=click.Choice(DENSE_PLACES),
        default="auto",
        show_default=True,
        help="Where attention, shared experts and head are computed: where it is measured to be faster, there, here.",
    ),
)


def accelerator_options(command: F) -> F:
    """Add the accelerator to a command that has `runtime_options`."""
    for option in reversed(_ACCELERATOR):
        command = option(command)
    return command


def mode_options(command: F) -> F:
    """Add the lossy modes to a command that has `runtime_options`."""
    for option in reversed(_MODES):
        command = option(command)
    return command


def runtime_options(command: F) -> F:
    """Add the options to a command; they arrive as keyword arguments of these names."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def build_options(values: dict[str, Any], slots: int = 1, bundle: Path | None = None) -> RuntimeOptions:
    """Options of a run from the values of `runtime_options`. Raises OptionError.

    bundle: whose tuning counts where the command line is silent. If there is one, raises as `open_engine`, too.
    """
    if bundle is not None:
        if values.get("dynamic_precision") == "auto":
            if values.get("big_little") is not None or values.get("cache_routing") is not None:
                raise OptionError(
                    "`--dynamic-precision auto` takes thresholds that were measured without other modes",
                    "name them: `--dynamic-precision T1,T2`",
                )
            values = {**values, "dynamic_precision": _chosen_thresholds(bundle, values["mode_loss"])}
        elif _was_given("mode_loss"):
            raise OptionError("`--mode-loss` is what `auto` may cost", "add `--dynamic-precision auto`")
    options = RuntimeOptions(
        memory=values["memory"],
        expert_cache=values["expert_cache"],
        context=values["context"],
        policy=values["policy"],
        policy_weights=values["policy_weights"],
        prefetch=values["prefetch"],
        prefetch_layers=values["prefetch_layers"],
        prefetch_experts=values["prefetch_experts"],
        prefetch_rule=values["prefetch_rule"],
        io=values["io"],
        kv=values["kv"],
        readers=values["readers"],
        threads=values["threads"],
        slots=slots,
        verify=not values["no_verify"],
        **{name: values[name] for name in (*MODE_NAMES, *ACCELERATOR_NAMES) if name in values},
    )
    return options if bundle is None else _with_tuned(options, bundle)


def _with_tuned(options: RuntimeOptions, bundle: Path) -> RuntimeOptions:
    """With what `moec tune` found, where the command line is silent."""
    from .tuned_options import tuned_options

    planned = with_missing_experts(options) if _was_given("modes") else options
    return replace(options, **_without_given(tuned_options(bundle, planned)))


def _without_given(tuned: dict[str, Any]) -> dict[str, Any]:
    """What the command line leaves open; a policy and its weights are one choice."""
    taken = {name for name in tuned if _was_given(name)}
    if _was_given("policy") or _was_given("policy_weights"):
        taken |= {"policy", "policy_weights"}
    return {name: value for name, value in tuned.items() if name not in taken}


def _was_given(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _chosen_thresholds(bundle: Path, text: str) -> str:
    """Those of `--dynamic-precision auto`. Raises OptionError where none was measured to be within the loss."""
    from moec.runtime.bundle.opening import open_bundle
    from moec.runtime.tuning.mode_records import choose_thresholds, measured_rows

    match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)%", text.strip())
    if match is None:
        raise OptionError(f"`--mode-loss {text[:20]}` is not a share", "write it like `1%`")
    cost = open_bundle(bundle_folder(bundle)).manifest
    low = sum(entry.size_bytes for entry in cost.low_experts) / max(cost.cost.expert_padded_bytes, 1)
    rows = measured_rows(bundle)
    found = choose_thresholds(rows, float(match[1]) / 100, low)
    if found is None:
        remedy = "measure them: moec eval BUNDLE --data DATA --modes sweep" if not rows else "allow more"
        raise OptionError(f"no thresholds were measured to cost at most {text} of `{bundle}`", remedy)
    return found


def refuse_given(ctx: click.Context, names: Iterable[str], reason: str) -> None:
    """Raise OptionError if one of these options was given where it has no effect."""
    for name in names:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise OptionError(f"`--{name.replace('_', '-')}` has no effect: {reason}", "leave it out")


def with_missing_experts(options: RuntimeOptions) -> RuntimeOptions:
    """The cache of a sweep: one that misses, where no size was asked for."""
    if options.memory is None and options.expert_cache is None:
        return replace(options, expert_cache=DEFAULT_CACHE)
    return options
