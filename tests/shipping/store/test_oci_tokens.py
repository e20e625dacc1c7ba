"""Credentials of registries: challenges, and tokens of a server that docker-registry trusts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moec.manifests.errors import StoreFailed
from moec.shipping.store.access import IdentityToken, Login, RegistryLogin
from moec.shipping.store.oci_registry import Registry, RegistryAuthorization
from moec.shipping.store.oci_store import OciStore
from tests.shipping.store.conftest import PATIENCE
from tests.shipping.store.services import docker_registry
from tests.shipping.store.test_every_store import BUNDLE, NAME, OTHER, WEIGHTS, push, read
from tests.shipping.store.token_server import ISSUER, TokenServer, serving_tokens

REPOSITORY = "fleet/tiny"
SECRET = "hunter2"
LOGIN = Login("fleet", SECRET)
IDENTITY = IdentityToken(f"identity of {SECRET}")
Opening = Callable[[RegistryLogin | None], OciStore]


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    with serving_tokens(LOGIN, IDENTITY.text) as served:
        yield served


@pytest.fixture
def opened(tokens: TokenServer, closing: ExitStack, tmp_path: Path) -> Opening:
    """Open a store on a registry that takes the tokens."""
    (tmp_path / "root.pem").write_bytes(tokens.certificate)
    settings = (
        f'auth: {{token: {{realm: "{tokens.url}", service: registry, issuer: {ISSUER}, '
        f'rootcertbundle: "{tmp_path / "root.pem"}"}}}}\n'
    )
    host = closing.enter_context(docker_registry(tmp_path, settings))

    def make(login: RegistryLogin | None) -> OciStore:
        store = OciStore(f"oci://{host}/{REPOSITORY}", Registry(f"http://{host}", REPOSITORY, login, PATIENCE))
        closing.callback(store.close)
        return store

    return make


@pytest.mark.parametrize("base", ["https://registry.invalid", "http://127.0.0.1:5000"])
@pytest.mark.parametrize("login", [LOGIN, IDENTITY])
@pytest.mark.parametrize(
    ("realm", "told"),
    [
        ("http://tokens.invalid/token", "which has no TLS"),
        ("file:///etc/passwd", "names no server of tokens"),
        ("https://user@tokens.invalid/", "names no server of tokens"),
    ],
)
def test_a_secret_goes_to_no_other_kind_of_server(realm: str, told: str, login: RegistryLogin, base: str) -> None:
    """Also if the registry is on this machine and has no TLS."""
    authorization = RegistryAuthorization(base, login, PATIENCE)
    with pytest.raises(StoreFailed, match=told) as caught:
        authorization(f"{base}/v2/", f'Bearer realm="{realm}",service="a"')
    assert SECRET not in str(caught.value)


def test_what_a_challenge_asks_for() -> None:
    url = "https://registry.invalid/v2/"
    authorization = RegistryAuthorization("https://registry.invalid", LOGIN, PATIENCE)
    assert authorization(url, None) is None
    for challenge in ("", "Digest realm=a", "Bearer", 'Bearer realm="', "\0" * 100_000):
        assert authorization(url, challenge) is None
    assert authorization(url, 'Basic realm="registry"') == authorization(url, None) == LOGIN.header()
    assert authorization("https://uploads.invalid/v2/", None) is None
    assert authorization("https://uploads.invalid/v2/", 'Basic realm="registry"') is None
    for login in (None, IDENTITY):
        assert RegistryAuthorization("https://registry.invalid", login, PATIENCE)(url, 'Basic realm="registry"') is None


@pytest.mark.parametrize("login", [LOGIN, IDENTITY])
def test_a_token_of_another_server(tmp_path: Path, tokens: TokenServer, opened: Opening, login: RegistryLogin) -> None:
    """One token for reading and one for writing serve all requests."""
    store = opened(login)
    push(store, tmp_path)
    push(store, tmp_path, OTHER)
    assert read(store, f"{BUNDLE}/{NAME}", 1, 20) == WEIGHTS[1:20]
    scopes = [asked["scope"][0].rpartition(":") for asked in tokens.asked]
    assert [scope[0] for scope in scopes] == 2 * [f"repository:{REPOSITORY}"]
    assert [set(scope[2].split(",")) for scope in scopes] == [{"pull"}, {"pull", "push"}]
    for answer in (b"no JSON", b"[]", b'{"token": 3}', b'{"token": "a b"}', b'{"token": ""}', b" " * 100_000):
        tokens.answer = answer
        with pytest.raises(StoreFailed, match="sends no token"):
            push(opened(login), tmp_path)


@pytest.mark.parametrize("lasting", [b"1" + b"0" * 400, b"-1e308", b'"1"', b"true", b"null"])
def test_any_time_of_a_token(tokens: TokenServer, lasting: bytes) -> None:
    tokens.answer = b'{"token": "abc", "expires_in": ' + lasting + b"}"
    challenge = f'Bearer realm="{tokens.url}",service="a",scope="repository:a:pull"'
    given = RegistryAuthorization("http://localhost:5000", LOGIN, PATIENCE)
    assert given("http://localhost:5000/v2/", challenge) == given("http://localhost:5000/v2/", None) == "Bearer abc"


def test_a_registry_that_anyone_may_read(tmp_path: Path, tokens: TokenServer, opened: Opening) -> None:
    push(opened(LOGIN), tmp_path)
    tokens.is_open = True
    assert read(opened(None), f"{BUNDLE}/{NAME}", 1, 20) == WEIGHTS[1:20]
    with pytest.raises(StoreFailed, match=r"/token`: the server answered 401"):
        push(opened(None), tmp_path, OTHER)


@pytest.mark.parametrize("login", [Login("fleet", "wrong"), IdentityToken("wrong")])
def test_credentials_that_are_refused(
    tmp_path: Path, tokens: TokenServer, opened: Opening, login: RegistryLogin
) -> None:
    with pytest.raises(StoreFailed, match=r"/token`: the server answered 401.*check the credentials") as caught:
        push(opened(login), tmp_path)
    assert "wrong" not in str(caught.value) + repr(login)
    assert len(tokens.asked) == 2, "once, and once after the server asked for credentials"
