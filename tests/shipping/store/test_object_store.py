"""A store in a bucket: uploads in parts, a service that refuses or fails, and no secret in a message."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from moec.manifests.errors import InputError, MissingDependency, StoreFailed
from moec.shipping.store.access import Access
from moec.shipping.store.address import parse_address
from moec.shipping.store.interface import Store
from moec.shipping.store.open_store import open_store
from tests.shipping.servers import Fault
from tests.shipping.store.conftest import PATIENCE
from tests.shipping.store.dav_server import DavServer
from tests.shipping.store.services import free_port
from tests.shipping.store.test_every_store import BUNDLE, NAME, OTHER, WEIGHTS, push, read, write


def opened(bucket: str) -> Store:
    return open_store(parse_address(f"s3://{bucket}/models"), Access(), for_writing=True, options=PATIENCE)


def test_a_large_file_goes_in_parts(bucket: str, tmp_path: Path) -> None:
    data = WEIGHTS * 17
    assert len(data) > 8 << 20
    store = opened(bucket)
    sent: list[int] = []
    path, size, digest = write(tmp_path, data)
    assert store.put(f"{BUNDLE}/{NAME}", path, size, digest, sent.append)
    assert sum(sent) == size
    assert read(store, f"{BUNDLE}/{NAME}", 0, size) == data
    path.write_bytes(data[:-1] + b"?")
    with pytest.raises(InputError, match="has changed"):
        opened(bucket).put(f"{BUNDLE}/other", path, size, digest)
    assert store.size_bytes(f"{BUNDLE}/other") is None, "the upload is given up"


def test_a_file_of_another_program_is_sent_again(bucket: str, tmp_path: Path) -> None:
    """It has the same size, and the service states no digest. It is not copied to another bundle either."""
    path, size, digest = write(tmp_path, WEIGHTS)
    push(opened(bucket), tmp_path)
    opened(bucket).replace(f"{BUNDLE}/{NAME}", b"?" + WEIGHTS[1:])
    store = opened(bucket)
    store.note(f"{BUNDLE}/{NAME}", size, digest)
    assert store.put(f"{OTHER}/{NAME}", path, size, digest)
    assert push(store, tmp_path) == [True, False]
    for bundle in (BUNDLE, OTHER):
        assert read(store, f"{bundle}/{NAME}", 0, size) == WEIGHTS


def test_a_bucket_that_is_missing(bucket: str, tmp_path: Path) -> None:
    store = opened(f"{bucket}-none")
    assert store.read_small("channel/stable.json", 10) is None
    with pytest.raises(StoreFailed, match="there is no such bucket"):
        push(store, tmp_path)


@pytest.mark.parametrize(("status", "told"), [(401, "refuses"), (403, "refuses"), (500, "500"), (503, "503")])
def test_a_service_that_refuses(
    bucket: str, dav: DavServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, told: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", dav.url)
    dav.faults.append(Fault("status", status=status))
    dav.upload_faults.append(Fault("status", status=status))
    store = opened(bucket)
    for ask in (
        lambda: push(store, tmp_path),
        lambda: store.replace("channel/stable.json", b"{}"),
        lambda: store.read_small("channel/stable.json", 10),
        lambda: read(store, f"{BUNDLE}/{NAME}", 0, 10),
    ):
        with pytest.raises(StoreFailed, match=told) as caught:
            ask()
        assert "hunter2" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_service_that_is_not_there(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreFailed, match="does not answer HEAD"):
        push(opened(bucket), tmp_path)


@pytest.mark.parametrize(("is_there", "retries"), [(False, [0]), (True, [0, 2, 2])])
def test_only_a_service_that_is_there_is_asked_again(
    bucket: str, dav: DavServer, monkeypatch: pytest.MonkeyPatch, is_there: bool, retries: list[int]
) -> None:
    """obstore repeats a request by itself. The first one says whether that can help."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", dav.url if is_there else f"http://127.0.0.1:{free_port()}")
    dav.faults.append(Fault("status", status=503))
    store, allowed, get = opened(bucket), list[int](), obstore.get

    def counted(asked: S3Store, *rest: Any, **named: Any) -> Any:
        allowed.append((asked.retry_config or {})["max_retries"])
        return get(asked, *rest, **named)

    monkeypatch.setattr(obstore, "get", counted)
    for _ in range(2 if is_there else 1):
        with pytest.raises(StoreFailed):
            store.read_small("channel/stable.json", 10)
    assert allowed == retries and len(dav.requests) == (1 + 3 + 3) * is_there


@pytest.fixture
def google(dav: DavServer, monkeypatch: pytest.MonkeyPatch) -> DavServer:
    """A server for Google Cloud Storage. The XML API is that of a file server, if files are sent in one part."""
    account = {
        "gcs_base_url": dav.url,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
    dav.has_collections = False
    return dav


def test_google_cloud_storage(google: DavServer, tmp_path: Path) -> None:
    store = open_store(parse_address("gs://bucket/models"), Access(), for_writing=True, options=PATIENCE)
    assert push(store, tmp_path) == [True, True]
    assert push(store, tmp_path) == [False, False]
    assert (google.folder / "bucket" / "models" / BUNDLE / NAME).read_bytes() == WEIGHTS
    assert read(store, f"{BUNDLE}/{NAME}", 5, 90) == WEIGHTS[5:90]
    store.replace("channel/stable.json", b"{}")
    assert store.read_small("channel/stable.json", 2) == b"{}"
    assert store.read_small("channel/beta.json", 2) is None


def test_a_slow_service_is_left(google: DavServer, tmp_path: Path) -> None:
    """It sends often enough for the time-out of silence, and less than 512 bytes a second."""
    patience = replace(PATIENCE, timeout_s=1)
    store = open_store(parse_address("gs://bucket/models"), Access(), for_writing=True, options=patience)
    push(store, tmp_path)
    google.faults.append(Fault("slow", NAME, after_bytes=100))
    with pytest.raises(StoreFailed, match="the service sends too slowly"):
        read(store, f"{BUNDLE}/{NAME}", 0, len(WEIGHTS))


@pytest.mark.parametrize(("address", "package"), [("s3://bucket", "obstore"), ("hf://owner/name", "huggingface_hub")])
def test_a_package_that_is_missing_is_named(address: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(package) or name in ("moec.shipping.store.object_store", "moec.shipping.store.hub_store"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency, match=f"needs the package `{package}`") as caught:
        open_store(parse_address(address), Access())
    assert caught.value.hint == 'pip install "moec[ship]"'
