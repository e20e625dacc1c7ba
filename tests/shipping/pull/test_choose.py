"""The bundle of a channel for a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moec.manifests.errors import ChannelRefused, DeviceRefused
from moec.profiles.device import DeviceProfile
from moec.profiles.device_json import encode_device
from moec.profiles.loading import load_profile
from moec.profiles.probe import allowed_processors, first_difference
from moec.profiles.processor import instruction_sets
from moec.shipping.channel import ChannelBundle
from moec.shipping.pull.choose import check_version, choose_bundle
from tests.shipping.model_bundles import channel_of

HOST = ChannelBundle("host", "", "0" * 64, 10, 1000, 1 << 20, ())


def here(**changes: object) -> DeviceProfile:
    """A profile that the present machine is like."""
    shipped = load_profile("raspberry-pi-4b-sd")
    sets = instruction_sets()
    provenance = {key: text for key, text in shipped.provenance.items() if not key.startswith("cores.")}
    values = {"name": "this-one", "threads": len(allowed_processors()), "memory_budget_bytes": 64 << 20, **changes}
    return replace(shipped, instruction_sets=sets, cores=None, provenance=provenance, **values)


def bundle_for(profile: DeviceProfile, **changes: object) -> ChannelBundle:
    return replace(HOST, device=profile.name, device_json=encode_device(profile).decode(), **changes)


def test_a_profile_like_this_machine_comes_first() -> None:
    other = bundle_for(load_profile("xiaomi-14"))
    small, large = here(name="small"), here(name="large", memory_budget_bytes=128 << 20)
    assert first_difference(small) is None
    channel = channel_of([other, HOST, bundle_for(small), bundle_for(large)])
    assert choose_bundle(channel).device == "large"
    assert choose_bundle(channel_of([other, HOST])).device == "host"
    assert choose_bundle(channel, "xiaomi-14").device == "xiaomi-14"


def test_a_refusal_lists_the_devices() -> None:
    phone, many = load_profile("xiaomi-14"), here(threads=77)
    channel = channel_of([bundle_for(phone), bundle_for(many)])
    with pytest.raises(DeviceRefused, match="no bundle for this machine") as told:
        choose_bundle(channel)
    lines = told.value.message.split("\n- ")[1:]
    assert lines[0].startswith("xiaomi-14: it ") and lines[1].startswith("this-one: it has ")
    assert told.value.exit_code == 4
    with pytest.raises(
        DeviceRefused, match="no bundle for the device `toaster` here; it has bundles for:\n- xiaomi-14"
    ):
        choose_bundle(channel, "toaster")
    several = channel_of([replace(bundle_for(many), device=f"d{at}") for at in range(50)])
    with pytest.raises(DeviceRefused, match="and 30 more"):
        choose_bundle(several)


@pytest.mark.parametrize("device", ["auto", "host"])
def test_memory_is_checked(device: str) -> None:
    hungry = replace(HOST, memory_floor_bytes=3 << 30)
    assert choose_bundle(channel_of([hungry]), device, memory_bytes=3 << 30) == hungry
    with pytest.raises(DeviceRefused, match="it needs 3072MiB of memory, 2GiB are there"):
        choose_bundle(channel_of([hungry]), device, memory_bytes=2 << 30)
    with pytest.raises(DeviceRefused, match="it needs 3222MB of memory, 1500MB are there"):
        choose_bundle(channel_of([hungry]), device, memory_bytes=1_500_000_000)
    with pytest.raises(DeviceRefused, match="it needs 1073741824MiB of memory"):
        choose_bundle(channel_of([replace(HOST, memory_floor_bytes=1 << 50)]), device)


@pytest.mark.parametrize("text", ["{}", '{"format_version": 99}', "no json", "\ud800"])
def test_a_profile_that_cannot_be_read_fits_nothing(text: str) -> None:
    with pytest.raises(DeviceRefused, match="its profile "):
        choose_bundle(channel_of([replace(HOST, device_json=text)]))


@pytest.mark.parametrize(
    ("wanted", "own", "is_old"),
    [
        ("0.2.0", "0.2.0", False),
        ("0.2", "0.2.0", False),
        ("0.2.0", "0.10", False),
        ("0.2.1", "0.2.0", True),
        ("1.0", "0.99.99", True),
        ("0.2.0", "0.2.0.dev3+g1", False),
        ("9", "unknown", False),
    ],
)
def test_versions(wanted: str, own: str, is_old: bool) -> None:
    channel = channel_of([HOST], minimum_moec=wanted)
    if not is_old:
        return check_version(channel, own)
    with pytest.raises(DeviceRefused, match=f"needs moec {wanted}, this is {own}"):
        check_version(channel, own)


def test_a_version_that_is_none() -> None:
    with pytest.raises(ChannelRefused, match="minimum_moec"):
        check_version(channel_of([HOST], minimum_moec="newest"), "0.2.0")
