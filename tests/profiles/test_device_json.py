"""`device.json`: what is written is read as the same profile, and everything else is refused with its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import BundleError, ManifestInvalid, UnknownFormatVersion
from moec.manifests.files.limits import MAX_DEVICE_BYTES, MAX_TOML_BYTES
from moec.profiles.device import CONTENT, DeviceProfile
from moec.profiles.device_json import decode_device, encode_device
from moec.profiles.device_parts import Run
from moec.profiles.loading import list_profiles, load_profile

NAMED = [name for name in list_profiles() if name != "host"]
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.mark.parametrize("name", NAMED)
def test_a_shipped_profile_survives(name: str) -> None:
    profile = load_profile(name)
    data = encode_device(profile)
    copy = decode_device(data, "device.json")
    assert copy == profile and copy.provenance == profile.provenance and copy.sha256 == profile.sha256
    assert len(data) < 8192


@given(
    numbers=st.lists(st.integers(1, (1 << 60) - 1), min_size=4, max_size=4),
    threads=st.integers(1, 4096),
    block=st.integers(9, 24),
    run=st.none() | st.builds(Run, st.sampled_from(["auto", "direct", "mmap"]), st.none() | st.integers(1, 32)),
    data=st.data(),
)
def test_any_profile_survives(
    numbers: list[int], threads: int, block: int, run: Run | None, data: st.DataObject
) -> None:
    budget, memory, storage, latency = numbers
    keys = () if run is None else (f"run.{key}" for key in run.stated())
    profile: DeviceProfile = replace(
        load_profile("laptop"),
        memory_budget_bytes=budget,
        memory_bytes_per_s=max(memory, storage),
        storage_bytes_per_s=min(memory, storage),
        storage_latency_ns=latency,
        storage_block_bytes=1 << block,
        threads=threads,
        run=run,
        provenance={key: "estimate" + data.draw(texts) for key in (*CONTENT, *keys)},
    )
    copy = decode_device(encode_device(profile), "device.json")
    assert copy == profile and copy.provenance == profile.provenance


def test_the_longest_profile_fits() -> None:
    """Every character of a TOML file takes at most four times its bytes in JSON."""
    assert 4 * MAX_TOML_BYTES <= MAX_DEVICE_BYTES
    profile = load_profile("laptop")
    longest = "estimate" + "\x01" * (MAX_TOML_BYTES // 2)
    large = replace(profile, provenance={**profile.provenance, "threads": longest})
    assert decode_device(encode_device(large), "device.json").provenance["threads"] == longest


def changed(edit: Callable[[dict[str, Any]], object]) -> bytes:
    plain = json.loads(encode_device(load_profile("jetson-tx2-hdd")))
    edit(plain)
    return (json.dumps(plain, indent=1) + "\n").encode()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is not strict JSON"),
        (b"[]\n", "expected an object, found a list"),
        (b"{}\n", "`format_version`: expected a number, found None"),
        (b"[" * 100_000, "is not strict JSON"),
        (b'{"a": 1, "a": 2}\n', "a field occurs twice"),
        (b'{"a": NaN}\n', "is not a number"),
        (b"\xff{}", "is not strict JSON"),
        (b" " * (MAX_DEVICE_BYTES + 1), "more than the limit"),
        (changed(lambda plain: plain.update(threads="4")), "`threads`: expected a whole number, found '4'"),
        (changed(lambda plain: plain.update(threads=True)), "`threads`: expected a whole number, found 'True'"),
        (changed(lambda plain: plain.update(threads=0)), "`threads`: expected a positive number, found 0"),
        (changed(lambda plain: plain.update(name="host")), "is the probed profile"),
        (changed(lambda plain: plain.update(name="\x1b[2J")), "`name`: expected lower-case letters"),
        (changed(lambda plain: plain.update(colour="red")), "unknown key `colour`"),
        (changed(lambda plain: plain.pop("provenance")), "missing key `provenance`"),
        (changed(lambda plain: plain["run"].update(readers=33)), "`run.readers`: expected 1 to 32, found 33"),
        (changed(lambda plain: plain["run"].update(io="tape")), "`run.io`: expected one of auto, direct, "),
        (changed(lambda plain: plain["run"].update(io=1)), "`run.io`: expected a text, found '1'"),
        (changed(lambda plain: plain["run"].clear()), "`run`: expected `io` or `readers`, found neither"),
        (changed(lambda plain: plain["provenance"].update(threads="estimate \ud800")), "half of a surrogate pair"),
        (changed(lambda plain: plain["provenance"].update({"run.readers": "hearsay"})), "starts with one of"),
        (json.dumps(json.loads(changed(lambda plain: None))).encode(), "is not in the form that `moec compile` writes"),
    ],
)  # fmt: skip
def test_what_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(ManifestInvalid) as caught:
        decode_device(data, "a/device.json")
    assert told in caught.value.message and "`a/device.json`" in caught.value.message
    assert "\n" not in caught.value.message and caught.value.hint


def test_a_later_version_is_named() -> None:
    with pytest.raises(UnknownFormatVersion, match="format version 2, this moec reads 1"):
        decode_device(changed(lambda plain: plain.update(format_version=2, colour="red")), "device.json")


@given(st.integers(0, 10_000), st.binary(max_size=3))
def test_damage_is_refused_or_harmless(place: int, piece: bytes) -> None:
    data = encode_device(load_profile("xiaomi-17"))
    place %= len(data)
    damaged = data[:place] + piece + data[place + len(piece) :]
    with suppress(BundleError):
        assert encode_device(decode_device(damaged, "device.json")) == damaged
