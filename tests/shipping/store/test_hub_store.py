"""A store on the hub: one commit for a bundle, contents sent once, and a token that stays at the hub."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from moec.manifests.errors import InputError, StoreFailed
from moec.shipping.store.access import Access
from moec.shipping.store.address import parse_address
from moec.shipping.store.hub_store import HubStore
from moec.shipping.store.interface import Store
from moec.shipping.store.open_store import open_store
from tests.shipping.store.conftest import PATIENCE
from tests.shipping.store.fake_hub import FakeHub
from tests.shipping.store.test_every_store import BUNDLE, MANIFEST_NAME, NAME, OTHER, WEIGHTS, push, read, write

Opening = Callable[..., Store]


@pytest.fixture
def opened(closing: ExitStack) -> Opening:
    """Open a store on the hub, by default on the default branch and for writing."""

    def make(revision: str = "", for_writing: bool = True) -> Store:
        address = parse_address(f"hf://fleet/tiny{revision}")
        store = open_store(address, Access(), for_writing=for_writing, options=PATIENCE)
        closing.callback(store.close)
        return store

    return make


def test_a_bundle_is_one_commit_in_a_private_repository(hub: FakeHub, tmp_path: Path, opened: Opening) -> None:
    push(opened(), tmp_path)
    assert hub.commits == [[f"{BUNDLE}/{NAME}", f"{BUNDLE}/{MANIFEST_NAME}"]]
    assert hub.is_private == {"fleet/tiny": True}


def test_contents_are_sent_once(hub: FakeHub, tmp_path: Path, opened: Opening) -> None:
    """Also after an interruption before the commit, and for another bundle with an equal file."""
    opened().put(f"{BUNDLE}/{NAME}", *write(tmp_path, WEIGHTS))
    push(opened(), tmp_path)
    push(opened(), tmp_path, OTHER)
    assert hub.received_bytes == len(WEIGHTS)


def test_files_that_somebody_changed_are_sent_again(hub: FakeHub, tmp_path: Path, opened: Opening) -> None:
    push(opened(), tmp_path)
    files = hub.repositories["fleet/tiny"]["main"]
    for path in (f"{BUNDLE}/{NAME}", f"{BUNDLE}/{MANIFEST_NAME}"):
        right, files[path] = files[path], b"?" + files[path][1:]
        assert push(opened(), tmp_path) == [path.endswith(NAME), path.endswith(MANIFEST_NAME)]
        files = hub.repositories["fleet/tiny"]["main"]
        assert files[path] == right
    assert push(opened(), tmp_path) == [False, False]


def test_the_token_stays_at_the_hub(hub: FakeHub, tmp_path: Path, opened: Opening) -> None:
    """Large files are redirected to another host, which must not see it."""
    push(opened(), tmp_path)
    assert read(opened(for_writing=False), f"{BUNDLE}/{NAME}", 3, 90) == WEIGHTS[3:90]
    assert hub.leaked == []


def test_a_hub_without_tls_gets_no_token(
    hub: FakeHub, tmp_path: Path, opened: Opening, monkeypatch: pytest.MonkeyPatch, connects: list[tuple[str, int]]
) -> None:
    push(opened(), tmp_path)
    real, (_, port) = socket.getaddrinfo, connects[-1]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: real("127.0.0.1", *rest, **named))
    elsewhere = f"http://hub.invalid:{port}"
    address = parse_address("hf://fleet/tiny")
    with pytest.raises(InputError, match=f"`hub.invalid:{port}` has no TLS, so it gets no token") as caught:
        HubStore(address, PATIENCE, for_writing=True, endpoint=elsewhere)
    assert hub.token not in str(caught.value)
    with pytest.raises(StoreFailed, match="401"):
        HubStore(address, PATIENCE, endpoint=elsewhere).read_small("channel/stable.json", 100)


def test_a_revision_is_a_branch(hub: FakeHub, tmp_path: Path, opened: Opening) -> None:
    push(opened("@v2"), tmp_path)
    assert set(hub.repositories["fleet/tiny"]["v2"]) == {f"{BUNDLE}/{NAME}", f"{BUNDLE}/{MANIFEST_NAME}"}
    assert hub.repositories["fleet/tiny"]["main"] == {}
    assert opened("@v2", False).size_bytes(f"{BUNDLE}/{NAME}") == len(WEIGHTS)
    assert opened("", False).size_bytes(f"{BUNDLE}/{NAME}") is None


def test_a_file_that_the_repository_ignores(hub: FakeHub, tmp_path: Path, opened: Opening) -> None:
    hub.ignored = ".json"
    with pytest.raises(StoreFailed, match=f"has no `{BUNDLE}/{MANIFEST_NAME}` after a commit"):
        push(opened(), tmp_path)


@pytest.mark.parametrize(("status", "told"), [(401, "refuses"), (403, "refuses"), (404, "404"), (400, "400")])
def test_a_hub_that_refuses(hub: FakeHub, tmp_path: Path, opened: Opening, status: int, told: str) -> None:
    store = opened()
    hub.refusal = status
    for ask in (
        lambda: push(store, tmp_path),
        lambda: store.replace("channel/stable.json", b"{}"),
        opened,
    ):
        with pytest.raises(StoreFailed, match=told) as caught:
            ask()
        assert hub.token not in str(caught.value)
