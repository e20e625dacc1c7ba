"""Defaults of a run from the profile of the device that the bundle was compiled for.

The order is: command line, tuned options, profile, built-in default. The profile counts where this machine is such a
device. Elsewhere the values of this machine count, and that is said.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from moec.manifests.errors import ChecksumMismatch
from moec.manifests.sizes import exact_bytes

from ..terminal import output
from .set_option import as_arguments

if TYPE_CHECKING:
    from moec.profiles.device import DeviceProfile
    from moec.runtime.bundle.open_bundle import Bundle
    from moec.runtime.options.runtime import RuntimeOptions

_META = "moec.device"


@dataclass(slots=True)
class DeviceRun:
    """The profile of a bundle in one command.

    difference: the first difference of this machine from the profile, in words; None: it is such a device.
    slower: why a run is slower than the prediction for the profile, in words, or None.
    options: options of this run that the profile decides.
    free_budget_bytes: the budget that replaces that of the profile, because less memory is free; None: not replaced.
    lacks_little_cores: whether a reader would run on little cores, which this machine does not tell.
    suggestion: lossy modes that were suggested, or None.
    is_said: whether the line was printed.
    """

    profile: DeviceProfile
    difference: str | None
    slower: str | None
    options: dict[str, Any] = field(default_factory=dict)
    free_budget_bytes: int | None = None
    lacks_little_cores: bool = False
    suggestion: str | None = None
    is_said: bool = False

    @property
    def applies(self) -> bool:
        """True if this machine is such a device."""
        return self.difference is None

    def to_plain(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        names = ("difference", "slower", "options", "free_budget_bytes", "lacks_little_cores", "suggestion")
        return {"profile": self.profile.name, **{name: getattr(self, name) for name in names}}


def profile_defaults(bundle: Path, given: Collection[str], *, is_sweep: bool = False) -> dict[str, Any]:
    """Return the options of a run that the profile of a bundle decides; none without a profile, or on another device.

    The command remembers them for `say_device` and `device_facts`.
    given: names of options that the command line sets.
    is_sweep: whether lossy modes are swept. A sweep has a small cache of its own, which must have misses.
    Raises BundleError, StorageReadFailed.
    """
    from moec.profiles.probe import first_difference, slower_kernels
    from moec.runtime.bundle.device_file import stated_device
    from moec.runtime.memory.budget import default_budget_bytes

    profile = stated_device(bundle)
    if profile is None:
        return {}
    run = DeviceRun(profile, first_difference(profile), slower_kernels(profile))
    if run.applies:
        run.options = {name: value for name, value in run_settings(profile).items() if name not in given}
        if is_sweep or "expert_cache" in given:
            run.options.pop("memory", None)
        if "memory" in run.options and (free := default_budget_bytes()) < profile.memory_budget_bytes:
            del run.options["memory"]
            run.free_budget_bytes = free
        run.options = payable_threads(run.options)
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta[_META] = run
    return dict(run.options)


def with_reader_cpus(options: RuntimeOptions, *, is_trial: bool = False) -> RuntimeOptions:
    """Return the options with the little cores of the profile for a reader of its own, unless its processors are set.

    The other options must be final, because the rule decides whether there is such a reader.
    is_trial: whether they are those of a trial, of which the command remembers nothing.
    """
    from moec.profiles.probe import allowed_processors
    from moec.profiles.processor import little_processors

    run = device_run()
    if run is None or not run.applies or run.profile.cores is None:
        return options
    if not options.has_own_reader or options.reader_cpus is not None:
        return options
    cpus = ",".join(map(str, little_processors(run.profile.cores, allowed_processors())))
    if not is_trial:
        run.lacks_little_cores = not cpus
        run.options |= {"reader_cpus": cpus} if cpus else {}
    return replace(options, reader_cpus=cpus or None)


def run_settings(profile: DeviceProfile) -> dict[str, Any]:
    """Return the options of a run that a profile states, by name."""
    from moec.runtime.options.runtime import MAX_THREADS

    stated = {} if profile.run is None else profile.run.stated()
    memory = exact_bytes(profile.memory_budget_bytes)
    return {"memory": memory, "threads": min(profile.threads, MAX_THREADS), **stated}


def run_text(settings: Mapping[str, Any], cache_bytes: int) -> str:
    """Return options as on a command line, with the expert cache that they leave if they set the memory."""
    text = as_arguments(settings)
    return f"{text} (expert cache {output.human_bytes(cache_bytes)})" if "memory" in settings else text


def payable_threads(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a profile or of `moec tune` without `threads`, if a quota of processor time pays for fewer."""
    from moec.profiles.control_group import processor_quota

    most = max(1, processor_quota())
    return {name: value for name, value in options.items() if name != "threads" or value <= most}


def note_tuned(names: Collection[str]) -> None:
    """Remember that tuned options replace those of the profile."""
    if (run := device_run()) is not None:
        run.options = {name: value for name, value in run.options.items() if name not in names}


def device_run() -> DeviceRun | None:
    """Return the profile in this command; None without one."""
    context = click.get_current_context(silent=True)
    return None if context is None else context.meta.get(_META)


def device_facts() -> dict[str, Any]:
    """Return what the profile decides, for `--json`; no entry for a bundle without a profile."""
    run = device_run()
    return {} if run is None else {"device": run.to_plain()}


def say_device(bundle: Bundle, options: RuntimeOptions) -> None:
    """Print once what the profile of the opened bundle decides. Print nothing for a bundle without a profile.

    The profile was read before the manifest, and is compared with it here.
    Raises BundleError, StorageReadFailed.
    """
    from moec.runtime.bundle.device_file import device_of
    from moec.runtime.memory.budget import nominal_memory

    run = device_run()
    if run is None or run.is_said:
        return
    if device_of(bundle, verify=options.verify) != run.profile:
        raise ChecksumMismatch(f"the profile of `{bundle.path}` changed while it was opened", "run the command again")
    run.is_said = True
    name, budget_bytes = run.profile.name, run.profile.memory_budget_bytes
    if run.difference is not None:
        slower = f"; {run.slower}" if run.slower else ""
        output.say(
            f"device: compiled for {name}; this machine differs ({run.difference}), "
            f"so its own memory, threads and I/O apply{slower}"
        )
        return
    # What the budget leaves for experts next to one sequence, by the manifest alone; 0 if it is too small.
    fixed_bytes = nominal_memory(bundle.manifest, replace(options, slots=1)).fixed_bytes
    cache_bytes = max(0, min(bundle.manifest.cost.expert_padded_bytes, budget_bytes - fixed_bytes))
    settings = run_text(run.options, cache_bytes) or "other options replace its settings"
    if run.free_budget_bytes is not None:
        settings += (
            f"; its budget of {output.human_bytes(budget_bytes)} exceeds 7/8 of the free memory, so "
            f"{output.human_bytes(run.free_budget_bytes)} apply"
        )
    if run.lacks_little_cores:
        settings += "; this machine does not tell which of its processors are little, so its own reader runs on any"
    output.say(f"device: {name}, for which the bundle was compiled: {settings}")
