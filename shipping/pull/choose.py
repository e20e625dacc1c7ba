"""Choose the bundle of a channel for the present machine, by profile and memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.manifests.errors import BundleError, ChannelRefused, DeviceRefused
from moec.manifests.sizes import limit_bytes, option_bytes
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import decode_device
from moec.profiles.present_machine import first_difference
from moec.profiles.probe import memory_limit_bytes

from ..channel import Channel, ChannelBundle, version_numbers

AUTO = "auto"
_SYSTEM = Path("/")
_MOST_LISTED = 20


def choose_bundle(
    channel: Channel, device: str = AUTO, memory_bytes: int | None = None, system: Path = _SYSTEM
) -> ChannelBundle:
    """Return the bundle of a channel for this machine.

    device: name of a device profile; AUTO: the one that this machine is like, or else a bundle that states no profile.
    memory_bytes: memory of a run; None: all memory of this machine.
    system: root folder of /proc and /sys.
    Raises DeviceRefused with the devices that the channel has.
    """
    memory = memory_limit_bytes(system) if memory_bytes is None else memory_bytes
    if device != AUTO:
        named = [bundle for bundle in channel.bundles if bundle.device == device]
        reasons = {bundle.device: _lack_of_memory(bundle.memory_floor_bytes, memory) for bundle in named}
        if named and reasons[device] is None:
            return named[0]
        why = f": {reasons[device]}" if named else ""
        remedy = _remedy(named, reasons, memory_bytes)
        raise _refused(channel, f"has no bundle for the device `{device[:80]}` here{why}", {}, remedy)
    fitting, reasons = list[tuple[int, ChannelBundle]](), {}
    for bundle in channel.bundles:
        profile, why_not = _profile(channel, bundle)
        why_not = why_not or misfit(profile, bundle.memory_floor_bytes, memory, system)
        reasons[bundle.device] = why_not
        if why_not is None:
            fitting.append((profile.memory_budget_bytes if profile else -1, bundle))
    if not fitting:
        remedy = _remedy(channel.bundles, reasons, memory_bytes)
        raise _refused(channel, "has no bundle for this machine", reasons, remedy)
    return max(fitting, key=lambda item: item[0])[1]


def check_version(channel: Channel, version: str) -> None:
    """Raise DeviceRefused if this moec is older than the channel demands.

    version: version of this moec; one without numbers, of a tree that is not installed, is not compared.
    Raises ChannelRefused if the channel demands no version.
    """
    wanted, present = version_numbers(channel.minimum_moec), version_numbers(version)
    if wanted is None:
        raise ChannelRefused(
            f"channel `{channel.channel}`: minimum_moec: expected a version, found `{channel.minimum_moec[:40]}`",
            "push the channel again",
        )
    if present is not None and present < wanted:
        raise DeviceRefused(
            f"the channel `{channel.channel}` needs moec {channel.minimum_moec}, this is {version}",
            "install a newer moec on this device",
        )


def _profile(channel: Channel, bundle: ChannelBundle) -> tuple[DeviceProfile | None, str | None]:
    """Return the profile of a bundle if it states one, and why it cannot be used."""
    if not bundle.device_json:
        return None, None
    try:
        return decode_device(bundle.device_json.encode(), f"{channel.channel}, {bundle.device}"), None
    except BundleError as error:
        return None, f"its profile cannot be read: {error.message}"
    except UnicodeEncodeError:
        return None, "its profile is no text"


def misfit(profile: DeviceProfile | None, floor_bytes: int, memory_bytes: int, system: Path = _SYSTEM) -> str | None:
    """Return why a bundle is not for this machine, in words, or None.

    profile: of the bundle; None: it states none.
    floor_bytes: least memory of a run.
    memory_bytes: memory that a run may take here.
    """
    difference = None if profile is None else first_difference(profile, system)
    return difference or _lack_of_memory(floor_bytes, memory_bytes)


def _lack_of_memory(floor_bytes: int, memory_bytes: int) -> str | None:
    """Return why the memory does not do for a bundle, in words, or None."""
    if floor_bytes <= memory_bytes:
        return None
    needed, there = option_bytes(floor_bytes, memory_bytes), limit_bytes(memory_bytes)
    return f"it needs {needed} of memory, {there} are there"


def _remedy(bundles: Sequence[ChannelBundle], reasons: dict[str, str | None], memory_bytes: int | None) -> str:
    """Return the remedy: more memory, if a user has bounded it and a bundle lacks nothing else."""
    if memory_bytes is not None and any(
        reasons[bundle.device] == _lack_of_memory(bundle.memory_floor_bytes, memory_bytes) is not None
        for bundle in bundles
    ):
        return "give a larger --memory"
    return "name one of them with --device, or compile for this device"


def _refused(channel: Channel, what: str, reasons: dict[str, str | None], remedy: str) -> DeviceRefused:
    """Return the error, with every device of the channel on a line of its own."""
    listed = [bundle.device for bundle in channel.bundles]
    lines = [f"\n- {name[:80]}" + (f": {reasons[name]}" if reasons.get(name) else "") for name in listed[:_MOST_LISTED]]
    more = f"\n- and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
    return DeviceRefused(
        f"the channel `{channel.channel}` of `{channel.model[:80]}` {what}; it has bundles for:{''.join(lines)}{more}",
        remedy,
    )
