"""Options of a run, common to `run`, `generate`, `eval`, `bench` and `tune`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from moec.manifests.errors import OptionError
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.options.setting import settings_of

from ..terminal.help_sections import SectionOption
from .opening import bundle_folder
from .profile_defaults import note_tuned, profile_defaults, with_reader_cpus

DEFAULT_CACHE = "25%"
"""The expert cache of a sweep of modes without a given size. It is small enough to have misses."""

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS = settings_of(RuntimeOptions)
SECTIONS = {shown.group: "" if shown.group == "common" else shown.group.capitalize() for _, shown in SETTINGS.values()}
"""Group of settings -> section of the help text. The first section has no name."""


def _option(name: str) -> Callable[[F], F]:
    """Return the click option of one field of RuntimeOptions."""
    default, shown = SETTINGS[name]
    values: dict[str, Any] = {"metavar": shown.metavar, "section": SECTIONS[shown.group]}
    text = shown.text
    if shown.choices:
        values["type"] = click.Choice(shown.choices)
    elif isinstance(default, int):
        values["type"] = int
    if default is not None:
        values["default"] = default
    if shown.default_text:
        text += f"  [default: {shown.default_text}]"
    elif default is not None:
        values["show_default"] = True
    return click.option(f"--{name.replace('_', '-')}", cls=SectionOption, help=text, **values)


def _flag(name: str) -> Callable[[F], F]:
    """Return the switch that turns a field of RuntimeOptions off."""
    shown = SETTINGS[name][1]
    flag, section = f"--{shown.flag.replace('_', '-')}", SECTIONS[shown.group]
    return click.option(flag, cls=SectionOption, section=section, is_flag=True, help=shown.flag_text)


def _names(*groups: str) -> tuple[str, ...]:
    """Return the fields of these groups that commands offer under their own names, in the order of the help text."""
    offered = {name: shown.group for name, (_, shown) in SETTINGS.items() if shown.is_on_command_line}
    return tuple(name for group in groups for name in offered if offered[name] == group)


def _add(command: F, options: Iterable[Callable[[F], F]]) -> F:
    for option in reversed(list(options)):
        command = option(command)
    return command


MODE_NAMES = (*_names("lossy modes"), "cache_state")
ACCELERATOR_NAMES = _names("accelerator")
_PLAIN_NAMES = tuple(
    name for name in _names("common", "memory and cache", "reading ahead", "machine") if name not in MODE_NAMES
)
_SWITCHES = ("verify", "learned_routers")
"""Options that are on. Their switches turn them off."""
OPTION_NAMES = (*_PLAIN_NAMES, "kernels", *(f"no_{name}" for name in _SWITCHES))
TUNED = tuple(name for name, (_, shown) in SETTINGS.items() if shown.is_tuned)
"""Options that `moec tune` measures."""
_KERNELS = click.option(
    "--kernels",
    cls=SectionOption,
    section=SECTIONS["machine"],
    metavar="NAME",
    help="Force an instruction set, like `scalar` or `numpy`.",
)
_MODE_LOSS = click.option(
    "--mode-loss",
    cls=SectionOption,
    section=SECTIONS["lossy modes"],
    default="1%",
    show_default=True,
    metavar="SHARE",
    help="Largest measured loss of the thresholds of `--dynamic-precision auto`.",
)
cache_state_option = _option("cache_state")


def accelerator_options(command: F) -> F:
    """Add the accelerator to a command that has `runtime_options`."""
    return _add(command, map(_option, ACCELERATOR_NAMES))


def mode_options(command: F) -> F:
    """Add the lossy modes to a command that has `runtime_options`."""
    return _add(command, [*map(_option, MODE_NAMES), _MODE_LOSS])


def runtime_options(command: F) -> F:
    """Add the options to a command. They are passed as keyword arguments of these names."""
    return _add(command, [*map(_option, _PLAIN_NAMES), _KERNELS, *map(_flag, _SWITCHES)])


def build_options(
    values: dict[str, Any], slots: int = 1, bundle: Path | None = None, *, is_tuned: bool = True
) -> RuntimeOptions:
    """Return the options of a run from the values of `runtime_options`.

    The order is: command line, tuned options, profile of the bundle, built-in default.
    bundle: the bundle whose tuned options and profile count, or None.
    is_tuned: whether tuned options count.
    Raises OptionError; with a bundle also the errors of `open_engine`.
    """
    if bundle is not None:
        if values.get("dynamic_precision") == "published":
            values = {**values, "dynamic_precision": _published_thresholds(bundle)}
        if values.get("dynamic_precision") == "auto":
            if values.get("big_little") is not None or values.get("cache_routing") is not None:
                raise OptionError(
                    "`--dynamic-precision auto` takes thresholds that were measured without other modes",
                    "name them: `--dynamic-precision T1,T2`",
                )
            values = {**values, "dynamic_precision": _chosen_thresholds(bundle, values["mode_loss"])}
        elif _was_given("mode_loss"):
            raise OptionError("`--mode-loss` has no effect without `auto`", "add `--dynamic-precision auto`")
    offered = (*_PLAIN_NAMES, *MODE_NAMES, *ACCELERATOR_NAMES)
    chosen = {name: values[name] for name in offered if name in values}
    chosen |= {name: not values[f"no_{name}"] for name in _SWITCHES}
    options = RuntimeOptions(**chosen, slots=slots)
    if bundle is None:
        return options
    is_sweep = is_tuned and _was_given("modes")
    given = [name for name in chosen if _was_given(name)]
    options = replace(options, **profile_defaults(bundle, given, is_sweep=is_sweep))
    return with_reader_cpus(_with_tuned(options, bundle, is_sweep) if is_tuned else options)


def _with_tuned(options: RuntimeOptions, bundle: Path, is_sweep: bool) -> RuntimeOptions:
    """Return the options with the values of `moec tune`, except those that the command line sets."""
    from .tuned_options import tuned_options

    planned = with_missing_experts(options) if is_sweep else options
    tuned = _without_given(tuned_options(bundle, planned))
    note_tuned(tuned)
    return replace(options, **tuned)


def _without_given(tuned: dict[str, Any]) -> dict[str, Any]:
    """Return the tuned values that the command line does not set. A policy and its weights count as one option."""
    taken = {name for name in tuned if _was_given(name)}
    if _was_given("policy") or _was_given("policy_weights"):
        taken |= {"policy", "policy_weights"}
    return {name: value for name, value in tuned.items() if name not in taken}


def _was_given(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _chosen_thresholds(bundle: Path, text: str) -> str:
    """Return the thresholds of `--dynamic-precision auto`. Raises OptionError if none was measured within the loss."""
    from moec.runtime.bundle.open_bundle import open_bundle
    from moec.runtime.tuning.mode_records import choose_thresholds, low_bytes_share, measured_rows

    match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,6})?)%", text.strip())
    if match is None:
        raise OptionError(f"`--mode-loss {text[:20]}` is not a share", "write it like `1%`")
    rows = measured_rows(bundle)
    share = low_bytes_share(open_bundle(bundle_folder(bundle)).manifest)
    found = choose_thresholds(rows, float(match[1]) / 100, share)
    if found is None:
        remedy = "measure them: moec eval BUNDLE --data DATA --modes sweep" if not rows else "allow more"
        raise OptionError(f"no thresholds were measured to cost at most {text} of `{bundle}`", remedy)
    return found


def _published_thresholds(bundle: Path) -> str:
    """Return the thresholds of `--dynamic-precision published`. Raises OptionError if the bundle has none."""
    from moec.runtime.tuning.mode_records import published_thresholds

    found = published_thresholds(bundle_folder(bundle))
    if found is None:
        raise OptionError(
            f"`{bundle}` does not record the thresholds that HOBBIT's shares have on its calibration",
            "compile it with `--fallback-bits` and `--data`, or write the thresholds: `--dynamic-precision T1,T2`",
        )
    return found


def refuse_given(ctx: click.Context, names: Iterable[str], reason: str) -> None:
    """Raise OptionError if one of these options was given.

    reason: why they have no effect.
    """
    for name in names:
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise OptionError(f"`--{name.replace('_', '-')}` has no effect: {reason}", "leave it out")


def with_missing_experts(options: RuntimeOptions) -> RuntimeOptions:
    """Return the options with DEFAULT_CACHE if no size of the cache is given."""
    if options.memory is None and options.expert_cache is None:
        return replace(options, expert_cache=DEFAULT_CACHE)
    return options
