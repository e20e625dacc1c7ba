"""Files of device profiles: optional parts, impossible devices, and `device.json` of a bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import BundleError, ManifestInvalid, ProfileError, UnknownFormatVersion
from moec.manifests.files.limits import MAX_DEVICE_BYTES, MAX_TOML_BYTES
from moec.profiles.device import CONTENT, DeviceProfile
from moec.profiles.device_json import decode_device, encode_device
from moec.profiles.device_parts import Cores, Gpu, Power, Run
from moec.profiles.loading import list_profiles, load_profile, read_profile, to_toml

TEXT = """
name = "board"
memory_budget_bytes = 1_000_000
memory_bytes_per_s = 2_000_000
storage_bytes_per_s = 300_000
storage_latency_ns = 4_000
storage_block_bytes = 4096
threads = 6
instruction_sets = ["scalar"]

[gpu]
type = "Example 1"
memory_bytes = 500_000
memory_bytes_per_s = 9_000_000
link_bytes_per_s = 1_000_000
flops_per_s = 7_000_000

[cores]
big = 4
little = 2
little_cpus = [0, 5]

[power]
load_watts = 9.5
idle_watts = 3
gpu_watts = 20

[run]
io = "buffered"
readers = 1

[provenance]
"""
KEYS = (
    *CONTENT,
    "gpu.type", "gpu.memory_bytes", "gpu.memory_bytes_per_s", "gpu.link_bytes_per_s", "gpu.flops_per_s",
    "cores.big", "cores.little", "cores.little_cpus", "power.load_watts", "power.idle_watts", "power.gpu_watts",
    "run.io", "run.readers",
)  # fmt: skip


def profile_text(old: str = "", new: str = "", without: str = "") -> str:
    """A valid file with a piece replaced, or without the provenance of a key."""
    assert old in TEXT
    sources = [f'{key} = "estimate: {key}"' for key in KEYS if key != without]
    return TEXT.replace(old, new) + "\n".join(sources) + "\n" if old else TEXT + "\n".join(sources) + "\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "board.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_parts_are_read(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, profile_text()))
    assert profile.gpu == Gpu("Example 1", 500_000, 9_000_000, 1_000_000, 7_000_000)
    assert profile.cores == Cores(4, 2, (0, 5))
    assert profile.power == Power(9.5, 3, 20)
    assert profile.run == Run("buffered", 1)
    assert profile.provenance["gpu.type"] == "estimate: gpu.type"
    plain = profile.to_plain()
    assert plain["cores"] == {"big": 4, "little": 2, "little_cpus": [0, 5]}
    assert plain["gpu"]["memory_bytes"] == 500_000 and plain["power"]["idle_watts"] == 3


def test_a_profile_without_parts_states_none() -> None:
    profile = load_profile("laptop")
    plain = profile.to_plain()
    assert profile.parts() == () and plain["gpu"] is plain["cores"] is plain["power"] is plain["run"] is None
    assert "[gpu]" not in to_toml(profile)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "link_bytes_per_s = 1_000_000",
            "link_bytes_per_s = 9_000_001",
            "at most 9000000, the faster of both memories",
        ),
        ("memory_bytes = 500_000", "memory_bytes = 0", "`gpu.memory_bytes`: expected a positive number, found 0"),
        ("memory_bytes = 500_000", "memory_bytes = true", "`gpu.memory_bytes`: expected a whole number, found 'True'"),
        ("memory_bytes = 500_000\n", "", "missing key `gpu.memory_bytes`"),
        ("memory_bytes = 500_000", "memory = 500_000", "unknown key `gpu.memory`"),
        ("flops_per_s = 7_000_000", "flops_per_s = -1", "`gpu.flops_per_s`: expected a positive number, found -1"),
        ("flops_per_s = 7_000_000", f"flops_per_s = {1 << 60}", "`gpu.flops_per_s`"),
        ('type = "Example 1"', 'type = ""', "`gpu.type`: expected the name of a GPU of 1 to 100 characters, found ''"),
        ('type = "Example 1"', 'type = "a\\nb"', "`gpu.type`"),
        ('type = "Example 1"', "type = 1", "`gpu.type`: expected a text, found '1'"),
        ("threads = 6", "threads = 7", "`threads`: expected at most 6, the big and little cores, found 7"),
        ("big = 4", "big = 0", "`cores.big`: expected 1 to 4096, found 0"),
        ("little = 2", "little = 0", "`cores.little`: expected 1 to 4096, found 0"),
        ("big = 4", "big = 5000", "`cores.big`: expected 1 to 4096, found 5000"),
        ("[0, 5]", "[0]", "`cores.little_cpus`: expected the numbers of 2 processors once each, found [0]"),
        ("[0, 5]", "[5, 5]", "`cores.little_cpus`: expected the numbers of 2 processors once each"),
        ("[0, 5]", "[0, -1]", "`cores.little_cpus`: expected numbers from 0 to 4095"),
        ("[0, 5]", "[0, true]", "`cores.little_cpus`: expected a list of whole numbers"),
        ("[0, 5]", '"0-1"', "`cores.little_cpus`: expected a list of whole numbers"),
        ("load_watts = 9.5", "load_watts = 0.0", "`power.load_watts`: expected more than 0"),
        ("load_watts = 9.5", "load_watts = nan", "`power.load_watts`: expected more than 0"),
        ("load_watts = 9.5", "load_watts = inf", "`power.load_watts`: expected more than 0"),
        ("load_watts = 9.5", 'load_watts = "9 W"', "`power.load_watts`: expected a number, found '9 W'"),
        (
            "idle_watts = 3",
            "idle_watts = 10",
            "`power.idle_watts`: expected at most the 9.5 watts under load, found 10",
        ),
        ('io = "buffered"', 'io = "tape"', "`run.io`: expected one of auto, direct, buffered, mmap, found 'tape'"),
        ('io = "buffered"', 'io = ""', "`run.io`: expected one of"),
        ('io = "buffered"', "io = true", "`run.io`: expected a text, found 'True'"),
        ("readers = 1", "readers = 0", "`run.readers`: expected 1 to 32, found 0"),
        ("readers = 1", "readers = 33", "`run.readers`: expected 1 to 32, found 33"),
        ("readers = 1", "readers = 1.0", "`run.readers`: expected a whole number, found '1.0'"),
        ("readers = 1", "threads = 1", "unknown key `run.threads`"),
        ("idle_watts = 3", f"idle_watts = {10**400}", "`power.idle_watts`: expected more than 0 and at most 1000000"),
    ],
)
def test_an_impossible_device_is_refused_with_its_key(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = write(tmp_path, profile_text(old, new))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(path) in caught.value.message and told in caught.value.message
    assert caught.value.hint and "\n" not in caught.value.message


def test_watts_of_a_gpu_that_is_not_there_are_refused(tmp_path: Path) -> None:
    start, end = TEXT.index("[gpu]"), TEXT.index("[cores]")
    sources = [f'{key} = "estimate"' for key in KEYS if not key.startswith("gpu.")]
    path = write(tmp_path, TEXT[:start] + TEXT[end:] + "\n".join(sources))
    with pytest.raises(ProfileError, match=r"`power.gpu_watts`: expected a table `gpu`, found none for 20 watts"):
        read_profile(path)


@pytest.mark.parametrize("part", ["gpu", "cores", "power", "run"])
def test_a_part_is_a_table_of_values(tmp_path: Path, part: str) -> None:
    bare = TEXT[: TEXT.index("[gpu]")]
    sources = "[provenance]\n" + "\n".join(f'{key} = "estimate"' for key in CONTENT)
    with pytest.raises(ProfileError, match=f"`{part}`: expected a table, found '3'"):
        read_profile(write(tmp_path, f"{part} = 3\n{bare}{sources}"))
    with pytest.raises(ProfileError, match=f"`{part}`|`{part}\\."):
        read_profile(write(tmp_path, f"{bare}[{part}]\n{sources}"))


@pytest.mark.parametrize("key", [key for key in KEYS if "." in key])
def test_every_value_of_a_part_has_a_source(tmp_path: Path, key: str) -> None:
    with pytest.raises(ProfileError, match=rf"missing \['{key}'\]"):
        read_profile(write(tmp_path, profile_text(without=key)))


def test_a_source_of_a_value_that_is_not_stated_is_refused(tmp_path: Path) -> None:
    for line, told in (
        ('gpu.colour = "estimate"', r"unknown \['gpu.colour'\]"),
        ("gpu.colour = 1", "`provenance`: expected a table of texts"),
        ('gpu.type.name = "estimate"', "is not TOML"),
        ('screen.type = "estimate"', r"unknown \['screen.type'\]"),
    ):
        with pytest.raises(ProfileError, match=told):
            read_profile(write(tmp_path, profile_text() + line + "\n"))


counts = st.integers(1, (1 << 60) - 1)
watts = st.floats(1e-6, 1e6) | st.integers(1, 1_000_000)
sources = st.builds("estimate{}".format, st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100).filter(str.isprintable)


@st.composite
def parts_of_profiles(draw: st.DrawFn) -> dict[str, Any]:
    """Parts that one device can have, some of them absent."""
    parts: dict[str, Any] = {"gpu": None, "cores": None, "power": None, "run": None}
    if draw(st.booleans()):
        link = draw(st.none() | st.integers(1, 1_000))
        parts["gpu"] = Gpu(draw(names), draw(counts), draw(counts), link, draw(st.none() | counts))
    if draw(st.booleans()):
        numbers = draw(st.sets(st.integers(0, 4095), min_size=1, max_size=20))
        named = tuple(numbers) if draw(st.booleans()) else ()
        parts["cores"] = Cores(draw(st.integers(8, 4096)), len(numbers), named)
    if draw(st.booleans()):
        idle, load = sorted([draw(watts), draw(watts)])
        on_gpu = draw(watts) if parts["gpu"] is not None and draw(st.booleans()) else None
        parts["power"] = Power(load, idle if draw(st.booleans()) else None, on_gpu)
    if draw(st.booleans()):
        io = draw(st.none() | st.sampled_from(["auto", "direct", "buffered", "mmap"]))
        parts["run"] = Run(io, draw(st.integers(1, 32)))
    return parts


@given(parts_of_profiles(), st.data())
def test_a_written_profile_is_read_as_the_same(
    tmp_path_factory: pytest.TempPathFactory, parts: dict[str, Any], data: st.DataObject
) -> None:
    laptop = load_profile("laptop")
    keys = [f"{part.TABLE}.{key}" for part in parts.values() if part is not None for key in part.stated()]
    profile = replace(laptop, **parts, provenance={key: data.draw(sources) for key in (*CONTENT, *keys)})
    assert profile.sha256 == laptop.sha256, "no plan depends on a part"
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(to_toml(profile), encoding="utf-8")
    copy = read_profile(path)
    assert copy == profile and dict(copy.provenance) == dict(profile.provenance)


def test_control_characters_of_a_source_are_written_escaped(tmp_path: Path) -> None:
    profile = replace(load_profile("laptop"), provenance=dict.fromkeys(CONTENT, 'estimate \x7f \x1f " \\'))
    assert read_profile(write(tmp_path, to_toml(profile))).provenance == profile.provenance


def test_rounding_keeps_the_parts(tmp_path: Path) -> None:
    profile: DeviceProfile = replace(read_profile(write(tmp_path, profile_text())), is_probed=True)
    rounded = profile.rounded()
    assert rounded.parts() == profile.parts() and rounded.sha256 == profile.sha256


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
