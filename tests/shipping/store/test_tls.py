"""Servers over TLS: which certificates are accepted, and that nothing leaves TLS."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from moec.manifests.errors import StoreFailed
from moec.shipping.store.http_client import HttpClient
from tests.shipping.certificates import server_context, write_certificate
from tests.shipping.servers import Fault, FileServer, serving
from tests.shipping.store.conftest import PATIENCE

CONTENT = bytes(range(256)) * 1000
SECRET = "hunter2"
Trusting = Callable[..., HttpClient]


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return write_certificate(tmp_path / "server.pem", "127.0.0.1")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "weights").write_bytes(CONTENT)
    return folder


@pytest.fixture
def secure(files: Path, certificate: Path) -> Iterator[FileServer]:
    with serving(FileServer(files), tls=server_context(certificate)) as served:
        yield served


@pytest.fixture
def trusting(closing: ExitStack) -> Trusting:
    """Make a client that sends credentials, and trusts a certificate and no other one."""

    def make(certificate: Path) -> HttpClient:
        context = ssl.create_default_context(cafile=str(certificate))
        client = HttpClient(replace(PATIENCE, context=context), lambda url, challenge: f"Bearer {SECRET}")
        closing.callback(client.close)
        return client

    return make


def read(client: HttpClient, url: str, start: int = 0, end: int = len(CONTENT)) -> bytes:
    return b"".join(bytes(part) for part in client.read(url, start, end))


def test_an_accepted_certificate(secure: FileServer, trusting: Trusting, certificate: Path) -> None:
    client = trusting(certificate)
    assert read(client, f"{secure.url}/weights", 7) == CONTENT[7:]
    assert {request.headers["Authorization"] for request in secure.requests} == {f"Bearer {SECRET}"}


@pytest.mark.parametrize(
    ("hosts", "days", "is_trusted", "told"),
    [
        (["127.0.0.1"], 1, False, "self-signed certificate"),
        (["127.0.0.2", "localhost"], 1, True, "IP address mismatch"),
        (["127.0.0.1"], -1, True, "certificate has expired"),
    ],
)
def test_another_certificate_gets_no_request(
    files: Path,
    trusting: Trusting,
    tmp_path: Path,
    connects: list[tuple[str, int]],
    hosts: list[str],
    days: int,
    is_trusted: bool,
    told: str,
) -> None:
    """It is refused at once, and the message says how to trust another one."""
    own = write_certificate(tmp_path / "other.pem", *hosts, days=days)
    client = trusting(own if is_trusted else write_certificate(tmp_path / "third.pem", "127.0.0.1"))
    with serving(FileServer(files), tls=server_context(own)) as secure:
        with pytest.raises(StoreFailed, match=f"its certificate is not accepted: .*{told}.*SSL_CERT_FILE") as caught:
            read(client, f"{secure.url}/weights?signed={SECRET}")
        assert secure.requests == [] and SECRET not in str(caught.value)
    assert len(connects) == 1


def test_a_server_without_tls_is_told_at_once(
    files: Path, trusting: Trusting, certificate: Path, connects: list[tuple[str, int]]
) -> None:
    with (
        serving(FileServer(files)) as plain,
        pytest.raises(StoreFailed, match=r"no connection over TLS: [a-z ]+ \(hint"),
    ):
        read(trusting(certificate), plain.url.replace("http:", "https:") + "/weights")
    assert len(connects) == 1


def test_redirects_do_not_leave_tls(secure: FileServer, files: Path, trusting: Trusting, certificate: Path) -> None:
    client = trusting(certificate)
    with serving(FileServer(files)) as plain:
        secure.faults = [Fault("redirect", to=f"{plain.url}/weights")]
        with pytest.raises(StoreFailed, match="the server redirects from https to http"):
            read(client, f"{secure.url}/weights")
        assert plain.requests == []
        secure.faults, plain.faults = [], [Fault("redirect", to=f"{secure.url}/weights")]
        assert read(client, f"{plain.url}/weights") == CONTENT, "from http to https"
