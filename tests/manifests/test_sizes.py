"""Sizes as people write them."""

from __future__ import annotations

import pytest

from moec.manifests.errors import OptionError
from moec.manifests.sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096), ("0", 0), ("1B", 1), ("2GB", 2 * 10**9), ("2GiB", 2 << 30), ("512 MiB", 512 << 20),
        (" 1.5KiB ", 1536), ("2.1GB", 2_100_000_000), ("9007199254740993", 9007199254740993), ("1TiB", 1 << 40),
        ("0.5B", 0), ("77B", 77), ("1kB", 1000), ("1KiB", 1024),
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
