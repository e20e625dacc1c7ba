"""Places on every kind of store. Services start when a test asks for one, once for each test process."""

from __future__ import annotations

import os
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from moec.shipping.store.access import Access
from moec.shipping.store.address import parse_address
from moec.shipping.store.http_client import HttpOptions
from moec.shipping.store.interface import Store
from moec.shipping.store.open_store import open_store
from tests.shipping.servers import serving
from tests.shipping.store.dav_server import DavHandler, DavServer
from tests.shipping.store.fake_hub import FakeHub, serving_hub
from tests.shipping.store.services import docker_registry, moto, nginx

KINDS = ("file", "http", "nginx", "s3", "hub", "oci")
PATIENCE = HttpOptions(timeout_s=5, attempts=3, first_pause_s=0.001, most_pause_s=0.01)
_numbers = count()


@dataclass(frozen=True)
class Place:
    """An empty place for one model. open: returns a store there; the argument says whether it is for writing."""

    kind: str
    address: str

    def open(self, for_writing: bool = True) -> Store:
        return open_store(parse_address(self.address), Access(), for_writing=for_writing, options=PATIENCE)


@pytest.fixture(scope="session")
def nginx_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with nginx(tmp_path_factory.mktemp("nginx")) as url:
        yield url


@pytest.fixture(scope="session")
def registry_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    with moto() as url:
        yield url


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    """Close at the end of a test what it has opened."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every connection that is tried."""
    tried, real = list[tuple[str, int]](), socket.create_connection

    def connect(place: tuple[str, int], *rest: Any, **named: Any) -> socket.socket:
        tried.append(place)
        return real(place, *rest, **named)

    monkeypatch.setattr(socket, "create_connection", connect)
    return tried


@pytest.fixture
def bucket(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a new bucket on moto, which obstore finds by its environment variables."""
    settings = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "hunter2", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
    for name, value in {**settings, "ENDPOINT_URL": moto_url}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    name = f"bucket-{os.getpid()}-{next(_numbers)}"
    urllib.request.urlopen(urllib.request.Request(f"{moto_url}/{name}", method="PUT")).close()
    return name


@pytest.fixture
def dav(tmp_path: Path) -> Iterator[DavServer]:
    (tmp_path / "dav").mkdir()
    with serving(DavServer(tmp_path / "dav"), DavHandler) as server:
        assert isinstance(server, DavServer)
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that huggingface_hub takes for its own. What it reads from the environment at import is set anew."""
    from huggingface_hub import constants

    with serving_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = f"{served.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", served.token)
        yield served


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind, number = str(request.param), next(_numbers)
    if kind == "hub":
        request.getfixturevalue("hub")
    makers: dict[str, Callable[[], str]] = {
        "file": lambda: str(tmp_path / "store"),
        "http": lambda: f"{request.getfixturevalue('dav').url}/fleet/models",
        "nginx": lambda: f"{request.getfixturevalue('nginx_url')}/model-{number}",
        "s3": lambda: f"s3://{request.getfixturevalue('bucket')}/fleet/models",
        "hub": lambda: f"hf://fleet/model-{number}",
        "oci": lambda: f"oci://{request.getfixturevalue('registry_host')}/fleet/model-{number}",
    }
    return Place(kind, makers[kind]())
