"""A store on an HTTP server that may be no WebDAV server, that fails, and that wants credentials."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from moec.manifests.errors import StoreFailed
from moec.shipping.store.access import Access, Login, keeps_secrets, web_authorization
from moec.shipping.store.address import parse_address
from moec.shipping.store.http_store import HttpStore
from tests.shipping.servers import Fault
from tests.shipping.store.conftest import PATIENCE
from tests.shipping.store.dav_server import DavServer
from tests.shipping.store.test_every_store import (
    BUNDLE,
    MANIFEST,
    MANIFEST_NAME,
    NAME,
    OTHER,
    WEIGHTS,
    push,
    read,
    write,
)

SECRET = "hunter2"
LARGE = WEIGHTS * 2
assert len(LARGE) > 1 << 20
Opening = Callable[..., HttpStore]


@pytest.fixture
def opened(dav: DavServer, closing: ExitStack) -> Opening:
    """Open a store on the server, by default without credentials."""

    def make(access: Access | None = None) -> HttpStore:
        store = HttpStore(parse_address(f"{dav.url}/fleet/models"), access or Access(), PATIENCE)
        closing.callback(store.close)
        return store

    return make


def stored(dav: DavServer, bundle: str = BUNDLE) -> Path:
    return dav.folder / "fleet" / "models" / bundle / NAME


def test_a_server_without_webdav(dav: DavServer, tmp_path: Path, opened: Opening) -> None:
    """Folders are not needed, and equal files are sent again."""
    dav.has_collections = dav.has_copies = False
    store = opened()
    for bundle in (BUNDLE, OTHER, "c" * 64):
        push(store, tmp_path, bundle)
        assert stored(dav, bundle).read_bytes() == WEIGHTS
    assert dav.received_bytes > 3 * len(WEIGHTS)
    assert [request.method for request in dav.requests].count("COPY") == 1, "it is not asked again"


@pytest.mark.parametrize("status", [301, 403, 404, 413, 500, 507])
def test_a_refused_upload_is_one_sentence(dav: DavServer, tmp_path: Path, opened: Opening, status: int) -> None:
    """Also if the server closes the connection before it has read the file."""
    dav.upload_faults.append(Fault("status", NAME, status=status))
    store = opened()
    with pytest.raises(StoreFailed) as caught:
        store.put(f"{BUNDLE}/{NAME}", *write(tmp_path, WEIGHTS))
    assert str(status) in caught.value.message
    assert not stored(dav).exists()


def test_a_busy_server_is_asked_again(dav: DavServer, tmp_path: Path, opened: Opening) -> None:
    dav.upload_faults.append(Fault("status", NAME, status=503, times=2))
    push(opened(), tmp_path)
    assert stored(dav).read_bytes() == WEIGHTS


@pytest.mark.parametrize("after_bytes", [0, 100_000])
def test_a_cut_upload_is_repeated(dav: DavServer, tmp_path: Path, opened: Opening, after_bytes: int) -> None:
    dav.upload_faults.append(Fault("cut", NAME, after_bytes=after_bytes, times=2))
    push(opened(), tmp_path)
    assert stored(dav).read_bytes() == WEIGHTS


def test_a_server_that_cuts_every_upload(dav: DavServer, tmp_path: Path, opened: Opening) -> None:
    dav.upload_faults.append(Fault("cut", NAME, after_bytes=1000))
    with pytest.raises(StoreFailed, match="times in a row"):
        push(opened(), tmp_path)
    assert not stored(dav).exists()


def test_a_server_that_loses_bytes(dav: DavServer, tmp_path: Path, opened: Opening) -> None:
    dav.keeps_bytes = 99
    with pytest.raises(StoreFailed, match=f"took {len(WEIGHTS)} bytes and has 99 bytes"):
        push(opened(), tmp_path)
    dav.keeps_bytes = 1 << 60
    assert push(opened(), tmp_path) == [True, True], "a file of another size is sent again"
    assert stored(dav).read_bytes() == WEIGHTS


def test_damage_of_equal_size(dav: DavServer, tmp_path: Path, opened: Opening) -> None:
    """Small files are read and compared. A large one is sent again on request."""
    push(opened(), tmp_path)
    manifest = stored(dav).with_name(MANIFEST_NAME)
    manifest.write_bytes(b"?" + MANIFEST[1:])
    stored(dav).write_bytes(LARGE)
    assert push(opened(), tmp_path) == [True, True], "both are small"
    path, size, digest = write(tmp_path, LARGE)
    assert opened().put(f"{OTHER}/{NAME}", path, size, digest)
    stored(dav, OTHER).write_bytes(b"?" + LARGE[1:])
    store = opened()
    assert not store.put(f"{OTHER}/{NAME}", path, size, digest)
    assert store.put(f"{OTHER}/{NAME}", path, size, digest, again=True)
    assert stored(dav).read_bytes() == WEIGHTS and manifest.read_bytes() == MANIFEST
    assert stored(dav, OTHER).read_bytes() == LARGE


@pytest.mark.parametrize("access", [Access(token=SECRET), Access(login=lambda host: Login("fleet", SECRET))])
def test_credentials_are_sent(dav: DavServer, tmp_path: Path, opened: Opening, access: Access) -> None:
    dav.authorization = web_authorization(parse_address(dav.url), access) or ""
    store = opened(access)
    push(store, tmp_path)
    assert read(store, f"{BUNDLE}/{NAME}", 5, 90) == WEIGHTS[5:90]
    for wrong in (Access(), Access(token="wrong"), Access(login=lambda host: Login("fleet", "wrong"))):
        with pytest.raises(StoreFailed, match="401") as caught:
            push(opened(wrong), tmp_path)
        assert "wrong" not in str(caught.value) and caught.value.hint == "check the credentials"


def test_credentials_are_not_shown() -> None:
    access = Access(token=SECRET, login=lambda host: Login("fleet", SECRET))
    assert SECRET not in repr(access) and SECRET not in repr(Login("fleet", SECRET))


def test_credentials_need_tls_or_this_machine() -> None:
    access = Access(token=SECRET)
    assert web_authorization(parse_address("https://host.invalid/a"), access) == f"Bearer {SECRET}"
    assert web_authorization(parse_address("http://127.0.0.1:1/a"), access) == f"Bearer {SECRET}"
    assert web_authorization(parse_address("http://host.invalid/a"), access) is None
    assert not keeps_secrets("http://127.0.0.1.invalid/a")


def test_a_login_is_that_of_the_host() -> None:
    logins = {"host.invalid:8443": Login("fleet", "a")}
    access = Access(login=logins.get)
    assert web_authorization(parse_address("https://host.invalid:8443/a"), access) == "Basic ZmxlZXQ6YQ=="
    assert web_authorization(parse_address("https://other.invalid/a"), access) is None
