"""Options of a run, common to `run`, `chat`, `generate`, `serve`, `eval`, `lm-eval`, `bench` and `tune`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import click

from moec.manifests.errors import OptionError
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.options.setting import settings_of

from ..terminal.help_sections import SectionOption, add_options
from .opening import bundle_folder
from .profile_defaults import note_tuned, profile_defaults, with_reader_cpus
from .set_option import RUN_SETTINGS, set_option
from .systems import as_option, prescribed

DEFAULT_CACHE = "25%"
"""The expert cache of a sweep of modes without a given size. It is small enough to have misses."""

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS = settings_of(RuntimeOptions)
TUNED = tuple(name for name, (_, shown) in SETTINGS.items() if shown.is_tuned)
"""Options that `moec tune` measures."""
_OPTIONS = [name for name, (_, shown) in SETTINGS.items() if shown.place == "option"]
_NOT_TUNED_WITH = ("lossy modes", "accelerator")


def _option(name: str) -> Callable[[F], F]:
    """Return the click option of one field of RuntimeOptions."""
    default, shown = SETTINGS[name]
    section = "" if shown.group == "common" else shown.group.capitalize()
    values: dict[str, Any] = {"metavar": shown.metavar, "section": section}
    text = shown.text
    if name == "lossy":
        values |= {"multiple": True, "callback": lambda ctx, parameter, texts: " + ".join(texts) or None}
    elif shown.choices:
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


def runtime_options(command: F) -> F:
    """Add the options to a command. They are passed as keyword arguments, named as the fields of RuntimeOptions."""
    return add_options(command, [as_option(), *map(_option, _OPTIONS), set_option(RUN_SETTINGS)])


def tunable_options(command: F) -> F:
    """Add the options that a measurement of exact runs on the CPU has."""
    names = [name for name in _OPTIONS if SETTINGS[name][1].group not in _NOT_TUNED_WITH]
    table = {name: entry for name, entry in RUN_SETTINGS.items() if entry[1].group not in _NOT_TUNED_WITH}
    return add_options(command, [*map(_option, names), set_option(table)])


def build_options(
    values: dict[str, Any], slots: int = 1, bundle: Path | None = None, *, is_tuned: bool = True
) -> RuntimeOptions:
    """Return the options of a run from the values of `runtime_options`.

    The order is: command line, system of `--as`, tuned options, profile of the bundle, built-in default.
    bundle: the bundle whose tuned options and profile count, or None.
    is_tuned: whether tuned options count.
    Raises OptionError; with a bundle also the errors of `open_engine`.
    """
    from moec.runtime.tuning.mode_records import recorded_setting

    from .tuned_options import tuned_options

    given = {name for name in SETTINGS if _was_given(name)}
    chosen = {
        name: values[name] for name, (_, shown) in SETTINGS.items() if shown.place != "internal" and name in values
    }
    if values.get("preset") is not None:
        system = prescribed(values["preset"], given, bundle)
        chosen, given = chosen | system, given | set(system)
    if bundle is not None and chosen.get("lossy") is not None:
        chosen["lossy"] = recorded_setting(bundle_folder(bundle), chosen["lossy"])
    options = RuntimeOptions(**chosen, slots=slots)
    if bundle is None:
        return options
    is_sweep = is_tuned and _was_given("modes")
    options = replace(options, **profile_defaults(bundle, given, is_sweep=is_sweep))
    if is_tuned:
        planned = with_missing_experts(options) if is_sweep else options
        policy = {"policy", "policy_weights"}  # they count as one option
        given |= policy if policy & given else set()
        tuned = {name: value for name, value in tuned_options(bundle, planned).items() if name not in given}
        note_tuned(tuned)
        options = replace(options, **tuned)
    return with_reader_cpus(options)


def _was_given(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


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
