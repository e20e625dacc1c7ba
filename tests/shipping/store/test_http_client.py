"""Reads from a server that is not trusted: exactly the bytes that were asked for, or one error that names the place."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moec.manifests.errors import StoreFailed
from moec.shipping.store.http_client import HttpClient, HttpOptions
from moec.shipping.store.interface import PART_BYTES
from tests.shipping.servers import Fault, FileServer, serving
from tests.shipping.store.services import free_port

QUICK = HttpOptions(timeout_s=0.5, attempts=3, first_pause_s=0.001, most_pause_s=0.01)
CONTENT = bytes(at * at >> 3 & 255 for at in range(3 * PART_BYTES + 77))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "weights").write_bytes(CONTENT)
    with serving(FileServer(tmp_path)) as server:
        yield server


@pytest.fixture
def client() -> Iterator[HttpClient]:
    opened = HttpClient(QUICK)
    yield opened
    opened.close()


def read(client: HttpClient, url: str, start: int, end: int) -> bytes:
    return b"".join(bytes(part) for part in client.read(url, start, end))


@pytest.mark.parametrize(
    "span", [(0, 1), (0, len(CONTENT)), (5, 5), (100, PART_BYTES + 101), (len(CONTENT) - 1, len(CONTENT))]
)
def test_a_range_is_read(client: HttpClient, files: FileServer, span: tuple[int, int]) -> None:
    parts = [bytes(part) for part in client.read(f"{files.url}/weights", *span)]
    assert b"".join(parts) == CONTENT[slice(*span)]
    assert all(len(part) <= PART_BYTES for part in parts)


def test_sizes_and_small_files(client: HttpClient, files: FileServer) -> None:
    (files.folder / "empty").write_bytes(b"")
    url = f"{files.url}/weights"
    assert client.size_bytes(url) == len(CONTENT)
    assert client.size_bytes(f"{files.url}/empty") == 0
    assert client.read_small(url, len(CONTENT)) == CONTENT
    assert client.read_small(f"{files.url}/empty", 0) == b""
    assert client.size_bytes(f"{files.url}/none") is None
    assert client.read_small(f"{files.url}/none", 10) is None
    with pytest.raises(StoreFailed, match=r"/weights` has more than 1000 bytes"):
        client.read_small(url, 1000)
    with pytest.raises(StoreFailed, match=r"/none`: there is no such file"):
        read(client, f"{files.url}/none", 0, 10)
    with pytest.raises(StoreFailed, match="has fewer than the"):
        read(client, url, len(CONTENT), len(CONTENT) + 1)


def test_a_size_without_head(client: HttpClient, files: FileServer) -> None:
    files.faults = [Fault("status", status=405, times=1)]
    assert client.size_bytes(f"{files.url}/weights") == len(CONTENT)


def test_one_connection_serves_many_requests(client: HttpClient, files: FileServer) -> None:
    url = f"{files.url}/weights"
    others, serving_threads = set(threading.enumerate()), set[threading.Thread]()
    for at in range(20):
        assert read(client, url, at, at + 10) == CONTENT[at : at + 10]
        assert client.size_bytes(url) == len(CONTENT)
        serving_threads.update(set(threading.enumerate()) - others)
    assert len(serving_threads) == 1, "a connection for each request"
    assert all(request.headers["Accept-Encoding"] == "identity" for request in files.requests)
    assert "If-Range" not in files.requests[0].headers and "If-Range" in files.requests[2].headers


@pytest.mark.parametrize("kind", ["cut", "drop", "slow", "silent", "interim"])
def test_an_attempt_that_fails_is_repeated_from_where_it_ended(
    client: HttpClient, files: FileServer, kind: str
) -> None:
    files.faults = [Fault(kind, after_bytes=PART_BYTES + 11, times=1)]
    assert read(client, f"{files.url}/weights", 7, len(CONTENT)) == CONTENT[7:]
    first, second = (request.span for request in files.requests)
    assert first == (7, len(CONTENT))
    begun = {"cut": PART_BYTES + 11, "slow": PART_BYTES, "silent": PART_BYTES}
    assert second == (7 + begun.get(kind, 0), len(CONTENT))


@pytest.mark.parametrize("kind", ["cut", "drop", "slow", "silent", "interim", "status"])
def test_attempts_are_bounded(client: HttpClient, files: FileServer, kind: str) -> None:
    files.faults = [Fault(kind, status=503, retry_after="100000")]
    with pytest.raises(StoreFailed, match=r"127\.0\.0\.1:\d+/weights`: .*, 3 times in a row"):
        read(client, f"{files.url}/weights?token=secret", 0, 1000)
    assert len(files.requests) == 3


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(client: HttpClient, files: FileServer, status: int) -> None:
    files.faults = [Fault("status", status=status, times=2, retry_after="Wed, 21 Oct 2099 07:28:00 GMT")]
    assert read(client, f"{files.url}/weights", 0, 1000) == CONTENT[:1000]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("whole", "found a whole file of"),
        ("gzip", "found the encoding `gzip`"),
        ("shifted", "found the range `bytes 11-1010/"),
        ("endless", "more bytes than it states"),
    ],
)
def test_other_bytes_than_asked_for_are_refused(client: HttpClient, files: FileServer, kind: str, message: str) -> None:
    files.faults = [Fault(kind)]
    with pytest.raises(StoreFailed, match=message) as told:
        read(client, f"{files.url}/weights?token=secret", 10, 1010)
    assert "secret" not in str(told.value)
    assert len(files.requests) == 1
    assert files.sent_bytes < 20 << 20


def test_a_whole_file_may_come_without_a_range(client: HttpClient, files: FileServer) -> None:
    files.serves_ranges = False
    assert read(client, f"{files.url}/weights", 0, len(CONTENT)) == CONTENT
    with pytest.raises(StoreFailed, match="a whole file of"):
        read(client, f"{files.url}/weights", 0, len(CONTENT) - 1)


def test_a_file_that_changes_is_refused(client: HttpClient, files: FileServer) -> None:
    url = f"{files.url}/weights"
    read(client, url, 0, 10)
    files.faults = [Fault("etag")]
    with pytest.raises(StoreFailed, match="changed on the server"):
        read(client, url, 10, 20)


def test_redirects(client: HttpClient, files: FileServer, tmp_path: Path) -> None:
    url = f"{files.url}/weights"
    files.faults = [Fault("redirect", to="/weights?signed=secret", times=1)]
    assert read(client, url, 0, 10) == CONTENT[:10]
    files.faults = [Fault("redirect", to=url)]
    with pytest.raises(StoreFailed, match="more than 5 redirects"):
        read(client, url, 0, 10)
    for to in (
        "file:///etc/passwd",
        "ftp://127.0.0.1/weights",
        "http://user:pass@127.0.0.1/",
        "http://127.0.0.1:99999/",
        "",
    ):
        files.faults = [Fault("redirect", name="weights", to=to)]
        with pytest.raises(StoreFailed, match="redirect"):
            read(client, url, 0, 10)


def test_credentials_stay_with_their_host(files: FileServer, tmp_path: Path) -> None:
    asked: list[str | None] = []

    def authorize(url: str, challenge: str | None) -> str | None:
        asked.append(challenge)
        return "Bearer secret"

    client = HttpClient(QUICK, authorize)
    (tmp_path / "other").mkdir()
    shutil.copy2(tmp_path / "weights", tmp_path / "other" / "weights")  # with its date, so with an equal ETag
    with serving(FileServer(tmp_path / "other")) as other:
        files.faults = [Fault("redirect", to=f"{other.url}/weights", times=1), Fault("status", status=401, times=1)]
        assert read(client, f"{files.url}/weights", 0, 10) == CONTENT[:10]
        assert [request.headers.get("Authorization") for request in files.requests] == ["Bearer secret"]
        assert [request.headers.get("Authorization") for request in other.requests] == [None]
        assert read(client, f"{files.url}/weights", 0, 10) == CONTENT[:10], "credentials are renewed once"
        assert asked == [None, None, ""]
        files.faults = [Fault("status", status=401)]
        with pytest.raises(StoreFailed, match="the server answered 401") as told:
            read(client, f"{files.url}/weights", 0, 10)
        assert "secret" not in str(told.value)
    client.close()


def test_where_nothing_listens_is_told_at_once(client: HttpClient, connects: list[tuple[str, int]]) -> None:
    with pytest.raises(StoreFailed, match=r"127\.0\.0\.1:\d+/weights`: connection refused \(hint: check"):
        read(client, f"http://127.0.0.1:{free_port()}/weights?token=secret", 0, 10)
    assert len(connects) == 1


@pytest.mark.parametrize(("number", "tries"), [(socket.EAI_NONAME, 1), (socket.EAI_AGAIN, QUICK.attempts)])
def test_a_name_that_does_not_exist_is_told_at_once(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch, number: int, tries: int
) -> None:
    """Other failures of the name service are repeated."""
    asked = list[object]()

    def find(host: object, *rest: object) -> None:
        asked.append(host)
        raise socket.gaierror(number, "No such name")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    with pytest.raises(StoreFailed, match=r"store\.invalid/weights`: no such name"):
        client.size_bytes("http://store.invalid/weights")
    assert len(asked) == tries


def test_a_server_that_starts_again_is_waited_for(
    client: HttpClient, connects: list[tuple[str, int]], tmp_path: Path
) -> None:
    with serving(FileServer(tmp_path)) as server:
        assert client.size_bytes(f"{server.url}/none") is None
        server.faults = [Fault("drop")]
        with pytest.raises(StoreFailed):
            client.size_bytes(f"{server.url}/none")
    connects.clear()
    with pytest.raises(StoreFailed, match="connection refused, 3 times in a row"):
        client.size_bytes(f"{server.url}/none")
    assert len(connects) == QUICK.attempts


def test_addresses_that_are_none(client: HttpClient) -> None:
    for url in ("ftp://host/x", "http://", "http://user:secret@host/x", "http://host:x/", "http://127.0.0.1:9/a b"):
        with pytest.raises(StoreFailed, match="address") as told:
            read(client, url, 0, 1)
        assert "secret" not in str(told.value)


def test_closing_ends_reads_of_other_threads(files: FileServer) -> None:
    client = HttpClient(HttpOptions(timeout_s=60))
    files.faults = [Fault("silent")]
    problems: list[Exception] = []

    def reads() -> None:
        try:
            read(client, f"{files.url}/weights", 0, 1000)
        except StoreFailed as error:
            problems.append(error)

    thread = threading.Thread(target=reads)
    thread.start()
    while not files.requests:
        pass
    client.close()
    thread.join(20)
    assert not thread.is_alive() and len(problems) == 1
