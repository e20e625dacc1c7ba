"""`moec push` and stores: messages, exit codes, credentials, TLS, proxies, and secrets that none sees."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner, Result

from moec.cli.main import cli
from moec.cli.options.stores import docker_login, netrc_login, proxy_for, store_access
from moec.manifests.errors import InputError
from moec.shipping.signatures.keys import make_key_pair
from moec.shipping.store.access import IdentityToken, Login
from tests.shipping.certificates import server_context, write_certificate
from tests.shipping.model_bundles import digests, sha256_of, write_bundle
from tests.shipping.servers import Fault, serving
from tests.shipping.store.dav_server import DavHandler, DavServer
from tests.shipping.store.loopback_proxy import LoopbackProxy, serving_proxy

from .conftest import Invoke

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"
SECRET, PASSWORD = "hunter2", "swordfish"
HOST = "files.invalid"
"""A name that the proxy alone knows."""
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "NETRC", "MOEC_STORE_TOKEN")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("push") / "fleet-model")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "fleet.pem"
    make_key_pair(path)
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no variable of the one who tests."""
    for name in ("DOCKER_CONFIG", *VARIABLES, *map(str.lower, VARIABLES)):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def push(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["push", *map(str, arguments)])


def refused(code: int, *arguments: object) -> str:
    """Push, and return the message of the refusal, which has a hint."""
    result = push(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == "" and result.stderr.startswith("error: ") and "\nhint: " in result.stderr
    return result.stderr


def test_sentences_and_json(tmp_path: Path, bundle: Path, key: Path) -> None:
    first = push(bundle, tmp_path / "store", "--key", key)
    assert first.exit_code == 0, first.output
    assert f"`{bundle}` for `host`: " in first.stdout and "sent" in first.stdout
    assert f"channel `stable` on `{tmp_path / 'store'}`: sequence 1, 1 device, expires 2" in first.stdout
    told = json.loads(push(bundle, f"file:{tmp_path / 'store'}", "--key", key, "--json").stdout)
    assert (told["sequence"], told["channel"], told["model"], told["devices"]) == (2, "stable", "fleet-model", ["host"])
    (pushed,) = told["bundles"]
    assert pushed["manifest_sha256"] == sha256_of(bundle) and pushed["sent_files"] == pushed["sent_bytes"] == 0
    assert pushed["signed_now"] is True


def test_damage_on_the_store_is_repaired(tmp_path: Path, bundle: Path, key: Path) -> None:
    arguments = (bundle, tmp_path / "store", "--key", key, "--json")
    push(*arguments)
    weights = max((tmp_path / "store" / sha256_of(bundle)).iterdir(), key=lambda path: path.stat().st_size)
    content = weights.read_bytes()
    weights.write_bytes(b"?" + content[1:])
    repaired = json.loads(push(*arguments).stdout)["bundles"][0]
    assert repaired["sent_bytes"] == len(content) and weights.read_bytes() == content
    again = json.loads(push(*arguments, "--again").stdout)["bundles"][0]
    assert again["sent_bytes"] == again["bytes"] and again["sent_files"] == again["files"]


def test_options_arrive(tmp_path: Path, bundle: Path, key: Path) -> None:
    options = ["--channel", "beta", "--expires", "2w", "--minimum-moec", "0.9", "--sequence", 7, "--only", "--json"]
    told = json.loads(push(bundle, tmp_path / "store", "--key", key, *options).stdout)
    assert (told["channel"], told["minimum_moec"], told["sequence"]) == ("beta", "0.9", 7)
    other = tmp_path / "other.pem"
    make_key_pair(other)
    again = [bundle, tmp_path / "store", "--channel", "beta", "--key", other]
    assert "none of the accepted keys" in refused(3, *again)
    assert push(*again, "--accept-key", key.with_suffix(".pub")).exit_code == 0


def test_a_passphrase_of_a_variable(tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_key_pair(tmp_path / "locked.pem", SECRET.encode())
    monkeypatch.setenv("FLEET", SECRET)
    arguments = [bundle, tmp_path / "store", "--key", tmp_path / "locked.pem", "--passphrase-env", "FLEET"]
    assert push(*arguments).exit_code == 0


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--expires", "0d"], "is no time"),
        (["--expires", "90"], "is no time"),
        (["--expires", "9999d"], "is no time"),
        (["--minimum-moec", "new"], "is no version"),
        (["--sequence", "0"], "not in the range"),
    ],
)
def test_wrong_usage(tmp_path: Path, bundle: Path, key: Path, option: list[str], told: str) -> None:
    result = push(bundle, tmp_path / "store", "--key", key, *option)
    assert result.exit_code == 2 and told in result.output
    assert not (tmp_path / "store").exists()


def test_refusals(tmp_path: Path, bundle: Path, key: Path, dav: DavServer) -> None:
    dav.authorization = "Basic other"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("mine")
    many = 8 * ("--accept-key", key.with_suffix(".pub"))
    for arguments, code, told in (
        ((bundle, f"https://fleet:{SECRET}@host.invalid/a", "--key", key), 1, "holds credentials"),
        ((bundle, tmp_path / "store", "--key", key, *many), 1, "`--accept-key` occurs 8 times, at most 7 keys"),
        ((tmp_path / "none", tmp_path / "store", "--key", key), 1, "does not exist"),
        ((tmp_path / "letters", tmp_path / "store", "--key", key), 1, "holds no bundle"),
        ((bundle, f"{dav.url}/models", "--key", key), 5, "the server answered 401"),
    ):
        message = refused(code, *arguments)
        assert told in message and SECRET not in message
        assert not (tmp_path / "store").exists()


@pytest.fixture
def dav(tmp_path: Path) -> Iterator[DavServer]:
    (tmp_path / "dav").mkdir()
    with serving(DavServer(tmp_path / "dav"), DavHandler) as server:
        assert isinstance(server, DavServer)
        yield server


def test_a_token_of_a_variable(
    tmp_path: Path, bundle: Path, key: Path, dav: DavServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dav.authorization = f"Bearer {SECRET}"
    assert "the server answered 401" in refused(5, bundle, f"{dav.url}/models", "--key", key)
    monkeypatch.setenv("MOEC_STORE_TOKEN", SECRET)
    result = push(bundle, f"{dav.url}/models", "--key", key)
    assert result.exit_code == 0 and SECRET not in result.output


def test_a_login_of_netrc(
    tmp_path: Path, bundle: Path, key: Path, dav: DavServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dav.authorization = Login("fleet", SECRET).header()
    (home / ".netrc").write_text(
        f"default login other password other\nmachine 127.0.0.1 login fleet password {SECRET}\n"
    )
    assert push(bundle, f"{dav.url}/models", "--key", key).exit_code == 0
    assert netrc_login("host.invalid") is None, "the entry `default` would go to any host"
    monkeypatch.setenv("NETRC", str(tmp_path / "own"))
    assert netrc_login("127.0.0.1:80") is None
    (tmp_path / "own").write_text("machine [::1]:80 login a password b\nmachine host.invalid login c password d\n")
    assert netrc_login("[::1]:80") == Login("a", "b")
    assert netrc_login("host.invalid:8443") == Login("c", "d")
    (tmp_path / "own").write_text(f"machine host.invalid login fleet password {SECRET} what\n")
    with pytest.raises(InputError, match="it is no netrc file") as caught:
        netrc_login("host.invalid")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("login", [netrc_login, docker_login])
@pytest.mark.parametrize("kind", ["missing", "file", "loop", "unknown user"])
def test_a_home_that_cannot_be_read_has_no_logins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, login: Callable[[str], object]
) -> None:
    place = tmp_path / "elsewhere"
    monkeypatch.setenv("HOME", str(place))
    if kind == "file":
        place.write_text("")
    elif kind == "loop":
        place.symlink_to(place)
    elif kind == "unknown user":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 3_999_999)
    assert login("host.invalid") is None


@pytest.mark.parametrize("login", [netrc_login, docker_login])
def test_settings_at_home_that_may_not_be_read_have_no_logins(
    home: Path, monkeypatch: pytest.MonkeyPatch, login: Callable[[str], object]
) -> None:
    (home / ".docker").mkdir()
    for name in (".netrc", ".docker/config.json"):
        (home / name).write_text("{")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert login("host.invalid") is None


def test_a_login_of_docker(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert docker_login("host.invalid") is None
    (home / ".docker").mkdir()
    path = home / ".docker" / "config.json"
    auth = base64.b64encode(f"fleet:{SECRET}".encode()).decode()
    logins = {"https://host.invalid/v1/": {"auth": auth}, "127.0.0.1:5000": {"auth": auth}, "empty.invalid": {}}
    logins["token.invalid"] = {"auth": auth, "identitytoken": SECRET}
    path.write_text(json.dumps({"auths": logins}))
    assert docker_login("host.invalid") == docker_login("127.0.0.1:5000") == Login("fleet", SECRET)
    assert docker_login("token.invalid") == IdentityToken(SECRET)
    assert docker_login("127.0.0.1") is docker_login("empty.invalid") is docker_login("other.invalid") is None
    for text in ("no JSON", "[]", json.dumps({"auths": {"host.invalid": {"auth": "?"}}}), '{"auths": ' + "[" * 10**6):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            docker_login("host.invalid")
        assert caught.value.hint
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "other"))
    assert docker_login("host.invalid") is None


def test_a_credential_helper_of_docker(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".docker").mkdir()
    path = home / ".docker" / "config.json"
    helper = tmp_path / "docker-credential-fleet"
    answer = json.dumps({"Username": "fleet", "Secret": SECRET})
    helper.write_text(f"#!/bin/sh\nread host\ntest \"$host\" = host.invalid || exit 1\necho '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for config in ({"credHelpers": {"host.invalid": "fleet"}}, {"credsStore": "fleet"}):
        path.write_text(json.dumps({"auths": {"host.invalid": {}}, **config}))
        assert docker_login("host.invalid") == Login("fleet", SECRET)
    assert docker_login("other.invalid") is None
    helper.write_text(helper.read_text().replace('"fleet"', '"<token>"'))
    assert docker_login("host.invalid") == IdentityToken(SECRET)
    for name in ("none", "../fleet"):
        path.write_text(json.dumps({"credsStore": name}))
        with pytest.raises(InputError, match="credential helper"):
            docker_login("host.invalid")


def test_an_empty_token_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEC_STORE_TOKEN", "")
    assert store_access().token is None


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
    pushed = invoke("push", EXAMPLE, store, "--key", key, "--json", **variables)
    assert pushed.exit_code == 0, pushed.stderr
    pulled = invoke("pull", store, tmp_path / "device", "--key", key.with_suffix(".pub"), "--json", **variables)
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
            ("push", EXAMPLE, server.url, "--key", key),
            ("pull", server.url, tmp_path / "device", "--key", key.with_suffix(".pub")),
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
    pushed = invoke("push", EXAMPLE, f"{server.url}/fleet", "--key", key, **variables)
    assert pushed.exit_code == 0, pushed.stderr
    with serving(DavServer(server.folder), DavHandler, server_context(certificate)) as other:
        name = next((server.folder / "fleet").glob("*/moec.json")).relative_to(server.folder)
        server.faults = [Fault("redirect", str(name), to=f"{other.url}/{name}?signed={PASSWORD}")]
        pulled = invoke(
            "pull",
            f"{server.url}/fleet",
            tmp_path / "device",
            "--key",
            key.with_suffix(".pub"),
            "--plan-only",
            **variables,
        )
        assert pulled.exit_code == 0, pulled.stderr
        assert len(other.requests) > 0
        assert all("Authorization" not in request.headers for request in other.requests)
        server.faults = [Fault("redirect", str(name), to=f"http://{urlsplit(other.url).netloc}/{name}?{PASSWORD}")]
        refused = invoke(
            "pull", f"{server.url}/fleet", tmp_path / "device", "--key", key.with_suffix(".pub"), "--json", **variables
        )
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
        "push": ["push", EXAMPLE, address, "--key", key],
        "pull": ["pull", address, tmp_path / "device", "--key", key.with_suffix(".pub")],
    }
    program = [sys.executable, "-m", "moec.cli.main", *map(str, words[command])]
    done = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 5 and SECRET not in done.stdout + done.stderr
    assert server.requests[0].path.startswith(path)
    assert proxy.asked[0] == ("CONNECT", f"{HOST}:443")


def test_a_proxy_that_is_none(invoke: Invoke, key: Path, tmp_path: Path) -> None:
    variables = {"HTTPS_PROXY": f"socks5://worker:{PASSWORD}@127.0.0.1:1"}
    told = invoke("pull", f"https://{HOST}/fleet", tmp_path / "device", "--key", key.with_suffix(".pub"), **variables)
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
