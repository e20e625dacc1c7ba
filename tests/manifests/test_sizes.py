"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.manifests.errors import OptionError
from moec.manifests.sizes import exact_bytes, limit_bytes, option_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096), ("0", 0), ("1B", 1), ("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("512 MiB", 512 << 20),
        (" 1.5KiB ", 1536), ("2.1GB", 2_100_000_000), ("9007199254740993", 9007199254740993), ("1TiB", 1 << 40),
        ("0.5B", 0), ("77B", 77), ("1kB", 1000), ("1KB", 1000), ("400KB", 400_000), ("1KiB", 1024),
    ],
)  # fmt: skip
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", "G", "2G", "900M", "2.1gib", "1e9B", "GiB", "2gb", "2M", "-1", "-1GB", "1e9", "1.5", "GB2", "nan", "inf",
     "\uff12GB", "9" * 400 + "GB"],
)  # fmt: skip
def test_not_a_size(text: str) -> None:
    with pytest.raises(OptionError, match=r"`--size .*` is not a") as caught:
        parse_bytes(text, "--size")
    assert "GiB" in str(caught.value.hint)


@given(st.integers(0, 10**18 - 1))  # a size has at most 18 digits
def test_a_written_size_is_read_as_the_same(size: int) -> None:
    assert parse_bytes(exact_bytes(size)) == size


@pytest.mark.parametrize(
    ("size", "text"), [(3 << 30, "3GiB"), (100 << 20, "100MiB"), (7 * 10**9, "7GB"), (100 * 10**6, "100MB"), (77, "77")]
)
def test_the_largest_unit_that_divides(size: int, text: str) -> None:
    assert exact_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "unit"),
    [("0", "MiB"), ("1023", "MiB"), ("1GiB", "MiB"), ("400KB", "MB"), ("900MB", "MB"), ("1.5GB", "MB")],
)  # fmt: skip
def test_another_size_has_the_units_of_the_given_one(text: str, unit: str) -> None:
    assert option_bytes(3_000_001, parse_bytes(text)) == {"MB": "4MB", "MiB": "3MiB"}[unit]


def test_a_limit_is_exact_where_it_was_given_and_never_rounded_up() -> None:
    assert [limit_bytes(size) for size in (900_000_000, 2 << 30, (5 << 20) - 1)] == ["900MB", "2GiB", "4MiB"]
