"""`moec push`: messages, `--json`, exit codes, and credentials from variables and files."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moec.cli.main import cli
from moec.cli.options.stores import docker_login, netrc_login, store_access
from moec.manifests.errors import InputError
from moec.shipping.signatures.keys import make_key_pair
from moec.shipping.store.access import IdentityToken, Login
from tests.shipping.model_bundles import sha256_of, write_bundle
from tests.shipping.servers import serving
from tests.shipping.store.dav_server import DavHandler, DavServer

SECRET = "hunter2"


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
    """An empty home, so that no file of the one who tests is read."""
    for name in ("NETRC", "DOCKER_CONFIG", "MOEC_STORE_TOKEN"):
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
    no_key = tmp_path / "no.pem"
    no_key.write_text("no key")
    many = 8 * ("--accept-key", key.with_suffix(".pub"))
    for arguments, code, told in (
        ((bundle, "ftp://host.invalid/a", "--key", key), 1, "`ftp:` is no kind of store"),
        ((bundle, f"https://fleet:{SECRET}@host.invalid/a", "--key", key), 1, "holds credentials"),
        ((bundle, tmp_path / "letters", "--key", key), 1, "is no store of bundles"),
        ((bundle, bundle, "--key", key), 1, "is no store of bundles"),
        ((bundle, tmp_path / "store", "--key", no_key), 1, "is no private key"),
        ((bundle, tmp_path / "store", "--key", key.with_suffix(".pub")), 1, "is a public key"),
        ((bundle, tmp_path / "store", "--key", key, *many), 1, "`--accept-key` occurs 8 times, at most 7 keys"),
        ((bundle, bundle, tmp_path / "store", "--key", key), 1, "are both for the device"),
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
