"""Device profiles: the strict loader, the shipped files, digests and rounding."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import ProfileError
from moec.manifests.files.limits import MAX_TOML_BYTES
from moec.profiles.device import KERNEL_FORMATS, PROVENANCE_KINDS, DeviceProfile, nearest_power_of_two, round_down
from moec.profiles.loading import list_profiles, load_profile, read_profile

NUMBERS = {
    "memory_budget_bytes": 1000000,
    "memory_bytes_per_s": 2000000,
    "storage_bytes_per_s": 300000,
    "storage_latency_ns": 4000,
    "storage_block_bytes": 4096,
    "threads": 2,
}
FIELDS = (*NUMBERS, "instruction_sets")
DIGESTS = {
    "jetson-agx-orin": "fdbb5b5712ff453f",
    "jetson-tx2-hdd": "b6fc3cdd798a2598",
    "jetson-tx2-ssd": "a434794deca14a3c",
    "laptop": "ff97c8a40cedbc68",
    "raspberry-pi-4b-sd": "f118bc650f527e30",
    "rtx-4090-host": "6d122a9ea305c247",
    "xiaomi-14": "533495b02b49975a",
}


def profile_text(**changes: str | None) -> str:
    """A valid file with some right-hand sides replaced; None leaves the line out, `provenance_x` is in the table."""
    lines = {"name": '"board"', **{key: str(value) for key, value in NUMBERS.items()}, "instruction_sets": '["scalar"]'}
    table = {f"provenance_{key}": '"estimate"' for key in FIELDS}
    for key, value in changes.items():
        (table if key.startswith("provenance_") else lines)[key] = value  # type: ignore[assignment]
    top = [f"{key} = {value}" for key, value in lines.items() if value is not None]
    low = [f"{key.removeprefix('provenance_')} = {value}" for key, value in table.items() if value is not None]
    return "\n".join([*top, "[provenance]", *low, ""])


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "board.toml"
    path.write_text(text, encoding="utf-8")
    return path


def board(**changes: object) -> DeviceProfile:
    provenance = dict.fromkeys(FIELDS, "estimate")
    profile = DeviceProfile("board", **NUMBERS, instruction_sets=("scalar",), provenance=provenance)
    return replace(profile, **changes)  # type: ignore[arg-type]


def test_a_valid_file_loads(tmp_path: Path) -> None:
    profile = load_profile(write(tmp_path, profile_text()))
    assert profile == board()
    assert profile.bitwidths == (1, 1.6, 2, 3, 4, 5, 6, 8, 16)
    assert not profile.is_probed


@pytest.mark.parametrize("name", [name for name in list_profiles() if name != "host"])
def test_shipped_profiles_say_where_every_number_comes_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert set(profile.provenance) == set(profile.stated_keys()) >= set(FIELDS)
    assert all(text.startswith(PROVENANCE_KINDS) for text in profile.provenance.values())
    assert profile.rounded() is profile


def test_list_names_the_probe_and_the_shipped_files() -> None:
    boards = ("jetson-agx-orin", "jetson-tx2-hdd", "jetson-tx2-ssd", "raspberry-pi-4b-sd", "raspberry-pi-5-nvme")
    hosts = ("quadro-rtx-6000-host", "rtx-4080-host", "rtx-4090-host")
    assert list_profiles() == ("host", *sorted((*boards, *hosts, "laptop", "xiaomi-14", "xiaomi-17")))


def test_the_document_names_every_shipped_profile() -> None:
    text = (Path(__file__).parents[2] / "docs" / "device-profiles.md").read_text(encoding="utf-8")
    table = text.split("## Profiles in the tree")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| .* \| ?(.*) \|$", table, re.MULTILINE)
    assert [name for name, _ in rows] == [name for name in list_profiles() if name != "host"]
    for name, told in rows:
        assert [part.TABLE for part in load_profile(name).parts()] == re.findall(r"gpu|cores|power|run", told), name


@pytest.mark.parametrize(("name", "digest"), DIGESTS.items())
def test_plans_of_a_shipped_profile_keep_their_digest(name: str, digest: str) -> None:
    """The digest is in the manifest. Values of the optional parts are not in it."""
    profile = load_profile(name)
    assert profile.sha256.startswith(digest)
    bare = {key: profile.provenance[key] for key in FIELDS}
    assert replace(profile, gpu=None, cores=None, power=None, run=None, provenance=bare).sha256 == profile.sha256


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"colour": '"red"'}, "unknown key `colour`"),
        ({"threads": None}, "missing key `threads`"),
        ({"threads": "0"}, "`threads`"),
        ({"threads": "5000"}, "`threads`"),
        ({"threads": "true"}, "`threads`"),
        ({"memory_budget_bytes": "-1"}, "`memory_budget_bytes`"),
        ({"memory_budget_bytes": "1.5e9"}, "`memory_budget_bytes`"),
        ({"storage_bytes_per_s": '"fast"'}, "`storage_bytes_per_s`"),
        ({"storage_bytes_per_s": str(1 << 61)}, "`storage_bytes_per_s`"),
        ({"storage_block_bytes": "3000"}, "`storage_block_bytes`"),
        ({"storage_block_bytes": "256"}, "`storage_block_bytes`"),
        ({"name": '"A board"'}, "`name`"),
        ({"name": "3"}, "`name`"),
        ({"name": '"host"'}, "`name`"),
        ({"instruction_sets": "[]"}, "`instruction_sets`"),
        ({"instruction_sets": '["mmx"]'}, "`instruction_sets`"),
        ({"instruction_sets": '["scalar", "scalar"]'}, "`instruction_sets`"),
        ({"instruction_sets": "[1]"}, "`instruction_sets`"),
        ({"instruction_sets": '"scalar"'}, "`instruction_sets`"),
        ({"instruction_sets": '["neon", "avx2"]'}, "expected sets of one processor, found those of Arm and of x86"),
        ({"storage_bytes_per_s": "2000001"}, "expected at most the 2000000 of `memory_bytes_per_s`, found 2000001"),
        ({"provenance_threads": None}, "missing ['threads']"),
        ({"provenance_colour": '"estimate"'}, "unknown ['colour']"),
        ({"provenance_threads": '"somebody said"'}, "`provenance.threads`"),
        ({"provenance_threads": '""'}, "`provenance.threads`"),
        ({"provenance_threads": "4"}, "`provenance`"),
    ],
)
def test_a_bad_file_is_refused_with_its_key(tmp_path: Path, changes: dict[str, str | None], place: str) -> None:
    path = write(tmp_path, profile_text(**changes))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert str(path) in caught.value.message
    assert place in caught.value.message
    assert caught.value.hint


def test_a_probe_of_a_file_in_memory_may_exceed_the_copy_of_one_thread(tmp_path: Path) -> None:
    text = profile_text(storage_bytes_per_s="2000001", provenance_storage_bytes_per_s='"measured: here"')
    assert read_profile(write(tmp_path, text)).storage_bytes_per_s == 2000001


def test_a_table_missing_altogether_is_a_missing_key(tmp_path: Path) -> None:
    text = profile_text().split("[provenance]")[0]
    with pytest.raises(ProfileError, match="missing key `provenance`"):
        read_profile(write(tmp_path, text))


@pytest.mark.parametrize("content", [b"name = ", b"a = 1\na = 2", b"x = [" * 2000, b'name = "\xff"'])
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "board.toml").write_bytes(content)
    with pytest.raises(ProfileError, match="is not TOML"):
        read_profile(tmp_path / "board.toml")


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="more than"):
        read_profile(write(tmp_path, "#" * (MAX_TOML_BYTES + 1)))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError) as caught:
        load_profile("toaster")
    assert "raspberry-pi-4b-sd" in str(caught.value.hint)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"absent\.toml` is missing"):
        load_profile(tmp_path / "absent.toml")


def test_an_instruction_set_without_a_kernel_offers_fewer_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNEL_FORMATS, "tiny", (2, 4, 8, 16))
    assert board(instruction_sets=("tiny", "scalar")).bitwidths == (2, 4, 8, 16)


def test_the_digest_covers_every_figure_and_no_provenance() -> None:
    profile = board()
    other = dict.fromkeys(FIELDS, "measured again")
    assert replace(profile, provenance=other).sha256 == profile.sha256
    changed = [replace(profile, **{key: value * 2}) for key, value in NUMBERS.items()]
    changed += [replace(profile, instruction_sets=("neon",)), replace(profile, name="other")]
    assert len({profile.sha256, *(item.sha256 for item in changed)}) == len(changed) + 1


def test_the_digest_of_a_probe_leaves_measured_figures_out() -> None:
    profile = board(is_probed=True)
    noisy = replace(
        profile,
        memory_bytes_per_s=7,
        storage_bytes_per_s=8,
        storage_latency_ns=9,
        threads=64,
        memory_budget_bytes=1001234,
    )
    assert noisy.sha256 == profile.sha256 == profile.rounded().sha256
    assert replace(profile, instruction_sets=("avx2", "scalar")).sha256 != profile.sha256
    assert replace(profile, memory_budget_bytes=2000000).sha256 != profile.sha256


def test_rounding_a_probe() -> None:
    profile = board(is_probed=True, memory_budget_bytes=22_116_950_016, storage_bytes_per_s=621_813_513).rounded()
    assert profile.memory_budget_bytes == 22_000_000_000
    assert profile.storage_bytes_per_s == 1 << 29
    assert profile.rounded() == profile


@given(st.integers(1, 1 << 60))
def test_rounding_stays_close(value: int) -> None:
    assert 0 <= value - round_down(value, 2) < max(1, value / 10)
    power = nearest_power_of_two(value)
    assert power & (power - 1) == 0
    assert power * power <= 2 * value * value <= 4 * power * power


def test_plain_form_is_complete() -> None:
    plain = board().to_plain()
    assert plain["sha256"] == board().sha256
    assert plain["bitwidths"] == [1, 1.6, 2, 3, 4, 5, 6, 8, 16]
    assert plain["provenance"]["threads"] == "estimate"
