"""`moec push` and `moec pull` over TLS and through a proxy: variables that a user sets, and secrets that none sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from moec.cli.options.stores import proxy_for
from moec.manifests.errors import InputError
from moec.shipping.signatures.keys import make_key_pair
from moec.shipping.store.access import Login
from tests.shipping.certificates import server_context, write_certificate
from tests.shipping.model_bundles import digests
from tests.shipping.servers import Fault, serving
from tests.shipping.store.dav_server import DavHandler, DavServer
from tests.shipping.store.loopback_proxy import LoopbackProxy, serving_proxy

from .conftest import Invoke

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"
SECRET, PASSWORD = "hunter2", "swordfish"
HOST = "files.invalid"
"""A name that the proxy alone knows."""
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "NETRC", "MOEC_STORE_TOKEN")


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables and a home without settings of the one who tests."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return write_certificate(tmp_path / "server.pem", "127.0.0.1", HOST)


@pytest.fixture
def server(tmp_path: Path, certificate: Path) -> Iterator[DavServer]:
    (tmp_path / "dav").mkdir()
    with serving(DavServer(tmp_path / "dav"), DavHandler, server_context(certificate)) as served:
        assert isinstance(served, DavServer)
        yield served


@pytest.fixture
def proxy(server: DavServer) -> Iterator[LoopbackProxy]:
    with serving_proxy({f"{HOST}:443": urlsplit(server.url).netloc}) as served:
        yield served


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key_pair(tmp_path / "fleet.pem")
    return tmp_path / "fleet.pub"


@pytest.mark.parametrize("way", ["direct", "proxy"])
def test_push_and_pull(
    invoke: Invoke, server: DavServer, proxy: LoopbackProxy, certificate: Path, key: Path, tmp_path: Path, way: str
) -> None:
    """Bundles arrive, and neither token nor password is told to anyone but the server and the proxy."""
    store, variables = f"{server.url}/fleet", {"SSL_CERT_FILE": str(certificate), "MOEC_STORE_TOKEN": SECRET}
    server.authorization = f"Bearer {SECRET}"
    if way == "proxy":
        store, proxy.authorization = f"https://{HOST}/fleet", Login("worker", PASSWORD).header()
        variables["HTTPS_PROXY"] = f"http://worker:{PASSWORD}@{proxy.host}"
    pushed = invoke("push", EXAMPLE, store, "--key", key.with_suffix(".pem"), "--json", **variables)
    assert pushed.exit_code == 0, pushed.stderr
    pulled = invoke("pull", store, tmp_path / "device", "--key", key, "--json", **variables)
    assert pulled.exit_code == 0, pulled.stderr
    assert digests(tmp_path / "device" / "current") == digests(EXAMPLE)
    assert bool(proxy.asked) == (way == "proxy")
    left = [path.read_text(errors="replace") for path in (tmp_path / "device").glob("*.json")]
    told = "".join([pushed.stdout, pushed.stderr, pulled.stdout, pulled.stderr, *left])
    assert SECRET not in told and PASSWORD not in told


def test_a_certificate_that_is_not_trusted(invoke: Invoke, server: DavServer, key: Path, tmp_path: Path) -> None:
    other = write_certificate(tmp_path / "other.pem", "127.0.0.1")
    for variables in ({}, {"SSL_CERT_FILE": str(other)}):
        for command in (
            ("push", EXAMPLE, server.url, "--key", key.with_suffix(".pem")),
            ("pull", server.url, tmp_path / "device", "--key", key),
        ):
            told = invoke(*command, MOEC_STORE_TOKEN=SECRET, **variables)
            assert told.exit_code == 5 and "certificate is not accepted" in told.stderr
            assert "SSL_CERT_FILE" in told.stderr and SECRET not in told.output
    assert server.requests == []


def test_a_store_that_redirects_to_another_host(
    invoke: Invoke, server: DavServer, certificate: Path, key: Path, tmp_path: Path
) -> None:
    """Its files may come from there. The token goes to the store alone."""
    variables = {"SSL_CERT_FILE": str(certificate), "MOEC_STORE_TOKEN": SECRET}
    pushed = invoke("push", EXAMPLE, f"{server.url}/fleet", "--key", key.with_suffix(".pem"), **variables)
    assert pushed.exit_code == 0, pushed.stderr
    with serving(DavServer(server.folder), DavHandler, server_context(certificate)) as other:
        name = next((server.folder / "fleet").glob("*/moec.json")).relative_to(server.folder)
        server.faults = [Fault("redirect", str(name), to=f"{other.url}/{name}?signed={PASSWORD}")]
        pulled = invoke("pull", f"{server.url}/fleet", tmp_path / "device", "--key", key, "--plan-only", **variables)
        assert pulled.exit_code == 0, pulled.stderr
        assert len(other.requests) > 0
        assert all("Authorization" not in request.headers for request in other.requests)
        server.faults = [Fault("redirect", str(name), to=f"http://{urlsplit(other.url).netloc}/{name}?{PASSWORD}")]
        refused = invoke("pull", f"{server.url}/fleet", tmp_path / "device", "--key", key, "--json", **variables)
        assert refused.exit_code == 5 and "redirects from https to http" in refused.stderr
    assert SECRET not in pulled.output + refused.output and PASSWORD not in pulled.output + refused.output


@pytest.mark.parametrize(
    ("command", "address", "path"),
    [("pull", "s3://bucket/fleet", "/bucket/fleet/channel/stable.json"), ("push", "hf://fleet/tiny", "/api/")],
)
def test_libraries_of_stores_take_the_same_variables(
    server: DavServer,
    proxy: LoopbackProxy,
    certificate: Path,
    key: Path,
    tmp_path: Path,
    command: str,
    address: str,
    path: str,
) -> None:
    """In a process of its own, because they read variables once. The server is no store of theirs, so it refuses."""
    variables = {
        **os.environ,
        "SSL_CERT_FILE": str(certificate),
        "HTTPS_PROXY": f"http://{proxy.host}",
        "AWS_ENDPOINT_URL": f"https://{HOST}",
        "HF_ENDPOINT": f"https://{HOST}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "HF_TOKEN": SECRET,
    }
    words = {
        "push": ["push", EXAMPLE, address, "--key", key.with_suffix(".pem")],
        "pull": ["pull", address, tmp_path / "device", "--key", key],
    }
    program = [sys.executable, "-m", "moec.cli.main", *map(str, words[command])]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 5 and SECRET not in done.stdout + done.stderr
    assert server.requests[0].path.startswith(path)
    assert proxy.asked[0] == ("CONNECT", f"{HOST}:443")


def test_a_proxy_that_is_none(invoke: Invoke, key: Path, tmp_path: Path) -> None:
    variables = {"HTTPS_PROXY": f"socks5://worker:{PASSWORD}@127.0.0.1:1"}
    told = invoke("pull", f"https://{HOST}/fleet", tmp_path / "device", "--key", key, **variables)
    assert told.exit_code == 1 and "`HTTPS_PROXY` names no proxy of HTTP" in told.stderr
    assert PASSWORD not in told.output and not (tmp_path / "device").exists()


@pytest.mark.parametrize(
    ("variables", "scheme", "host", "found"),
    [
        ({}, "https", "a.example:443", None),
        ({"HTTPS_PROXY": "http://p:1"}, "https", "a.example:443", "p:1"),
        ({"HTTPS_PROXY": "http://p:1"}, "http", "a.example:80", None),
        ({"http_proxy": "http://q:2", "HTTP_PROXY": "http://p:1"}, "http", "a.example:80", "q:2"),
        ({"ALL_PROXY": "http://p:1"}, "https", "a.example:443", None),
        ({"HTTPS_PROXY": ""}, "https", "a.example:443", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, "https", "a.example:443", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "b.example, A.example"}, "https", "a.example:443", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": ".example"}, "https", "a.example:443", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a.example:443"}, "https", "a.example:443", None),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a.example:80"}, "https", "a.example:443", "p:1"),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "ample,x,"}, "https", "a.example:443", "p:1"),
    ],
)
def test_which_hosts_have_a_proxy(
    variables: dict[str, str], scheme: str, host: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    proxy = proxy_for(scheme, host)
    assert (None if proxy is None else str(proxy)) == found


def test_a_malformed_proxy_is_an_error_where_it_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "ftp://p")
    assert proxy_for("https", "a.example:443") is None
    with pytest.raises(InputError):
        proxy_for("http", "a.example:80")
