"""Comparison of the present machine with a profile, by cheap facts. Nothing is measured."""

from __future__ import annotations

from pathlib import Path

from moec.manifests.errors import ProfileError

from .device import DeviceProfile, processor_family
from .probe import allowed_processors, memory_limit_bytes
from .processor import instruction_sets, physical_cores

_SYSTEM = Path("/")


def first_difference(profile: DeviceProfile, system: Path = _SYSTEM) -> str | None:
    """Return the first difference of this machine from a profile in words, or None if it is such a device.

    Compared are the threads of this process, the best instruction set, and whether all memory holds the budget of the
    profile. A profile may leave some processors to reading, so all of its cores match too. It may also count cores of
    two threads once.
    system: root folder of /proc and /sys.
    """
    processors, cores = allowed_processors(), profile.cores
    threads, physical = len(processors), physical_cores(processors, system)
    all_stated = () if cores is None else (cores.big + cores.little,)
    if threads not in (profile.threads, *all_stated) and physical != profile.threads:
        on_cores = f" on {physical} cores" if 0 < physical < threads else ""
        return f"it has {threads} threads{on_cores}, the profile {profile.threads}"
    best = instruction_sets(system)[0]
    if best != profile.instruction_sets[0]:
        return f"its best instruction set is {best}, that of the profile {profile.instruction_sets[0]}"
    try:
        memory = memory_limit_bytes(system)
    except ProfileError:
        return "it does not tell how much memory it has"
    if memory < profile.memory_budget_bytes:
        return (
            f"it has {memory >> 20}MiB of memory, the budget of the profile is {profile.memory_budget_bytes >> 20}MiB"
        )
    return None


def slower_kernels(profile: DeviceProfile, system: Path = _SYSTEM) -> str | None:
    """Return why a run is slower than predicted: the processor lacks the assumed instruction set. None: it has it.

    Processors of another family have sets of their own, so nothing is said of them.
    system: root folder of /proc and /sys.
    """
    assumed, sets = profile.instruction_sets[0], instruction_sets(system)
    if assumed in sets or processor_family(sets[0]) not in (None, processor_family(assumed)):
        return None
    return f"its predicted speed assumes {assumed}, which this processor lacks, so a run is slower"
