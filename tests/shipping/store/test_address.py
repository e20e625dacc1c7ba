"""Addresses of stores: what is read from them, and what is refused without showing a secret."""

from __future__ import annotations

import pytest

from moec.manifests.errors import InputError
from moec.shipping.store.address import Address, parse_address

READ = {
    "models/mixtral": Address("file", "", "models/mixtral"),
    "./host:folder": Address("file", "", "./host:folder"),
    "file:models": Address("file", "", "models"),
    "file:///models/mixtral": Address("file", "", "/models/mixtral"),
    "file://localhost/models": Address("file", "", "/models"),
    "http://127.0.0.1:8000": Address("http", "127.0.0.1:8000", ""),
    "https://host.invalid/a/b%20c/": Address("https", "host.invalid", "a/b%20c"),
    "HTTPS://[::1]:8443/a": Address("https", "[::1]:8443", "a"),
    "s3://bucket": Address("s3", "bucket", ""),
    "s3://bucket/some/prefix/": Address("s3", "bucket", "some/prefix"),
    "gs://bucket/prefix": Address("gs", "bucket", "prefix"),
    "hf://owner/name": Address("hf", "owner", "name"),
    "hf://owner/name@v1.0": Address("hf", "owner", "name", "v1.0"),
    "hf://owner/name@refs/pr/1": Address("hf", "owner", "name", "refs/pr/1"),
    "oci://127.0.0.1:5000/fleet/mixtral-8x7b": Address("oci", "127.0.0.1:5000", "fleet/mixtral-8x7b"),
}
WRONG = {
    "": "empty",
    "a\0b": "zero byte",
    "host:folder": "`host:` is no kind of store, expected file:DIR, http",
    "ftp://host.invalid/a": "`ftp:` is no kind of store",
    "http:host": "it has no `//`",
    "http://": "`` is no host",
    "http://ho st/a": "is no host",
    "https://host.invalid/a/../b": "is no path",
    "https://host.invalid//a": "is no path",
    "https://host.invalid/a b": "is no path",
    "https://host.invalid/" + "a" * 5000: "more than 4096 characters",
    "file://host.invalid/a": "it names a host",
    "s3:///prefix": "is no name of a bucket",
    "s3://bucket/a//b": "is no prefix",
    "s3://bucket/../b": "is no prefix",
    "s3://bucket/a\nb": "is no prefix",
    "hf://owner": "is no owner and name",
    "hf://owner/name/more": "is no owner and name",
    "hf://owner/name@": "is no revision",
    "hf://owner/name@a..b": "is no revision",
    "oci://host.invalid": "is no repository",
    "oci://host.invalid/Upper": "is no repository",
    "oci://host.invalid/name:tag": "is no repository",
}


@pytest.mark.parametrize("text", READ)
def test_an_address_is_read(text: str) -> None:
    assert parse_address(text) == READ[text]


@pytest.mark.parametrize("text", [text for text in READ if "://" in text and not text.startswith("file")])
def test_a_shown_address_is_an_address(text: str) -> None:
    assert parse_address(str(parse_address(text))) == READ[text]


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_address(text)
    assert WRONG[text] in caught.value.message
    assert caught.value.hint and "\n" not in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "https://user:hunter2@host.invalid/a",
        "https://hunter2@host.invalid/a",
        "https://host.invalid/a?token=hunter2",
        "https://host.invalid/a#hunter2",
        "s3://key:hunter2@bucket/prefix",
        "hf://hunter2@owner/name",
        "oci://user:hunter2@host.invalid/name",
    ],
)
def test_credentials_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_address(text)
    assert "credentials" in caught.value.message
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("http://127.0.0.1:80/a", True),
        ("http://localhost/a", True),
        ("http://[::1]:80/a", True),
        ("http://127.0.0.1.invalid/a", False),
        ("http://localhost.invalid/a", False),
        ("http://10.0.0.1/a", False),
    ],
)
def test_loopback_is_known(text: str, is_loopback: bool) -> None:
    assert parse_address(text).is_loopback is is_loopback
