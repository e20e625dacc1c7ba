"""A store in a registry: layers of ModelPack, blobs in chunks that survive cuts, passwords and tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from moec.manifests.errors import StoreFailed
from moec.shipping.store.access import IdentityToken, Login, RegistryLogin
from moec.shipping.store.interface import SourceFile
from moec.shipping.store.oci_registry import MAX_MANIFEST_BYTES, Registry, RegistryAuthorization
from moec.shipping.store.oci_store import OciStore
from tests.shipping.store.conftest import PATIENCE
from tests.shipping.store.registry_servers import (
    ISSUER,
    CuttingProxy,
    TokenServer,
    cutting_proxy,
    serving_tokens,
    serving_uploads,
)
from tests.shipping.store.services import docker_registry
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

REPOSITORY = "fleet/tiny"
CHUNK_BYTES = 100_000
SECRET = "hunter2"
LOGIN = Login("fleet", SECRET)
HASHED = "$2b$04$CtQAhYChXb./oK6vtyARbur4QBD9e2Jy1qTn2e6/ipIeV.HT7se9C"
"""bcrypt of SECRET."""
IDENTITY = IdentityToken(f"identity of {SECRET}")
Opening = Callable[..., OciStore]
Trusted = Callable[[RegistryLogin | None], OciStore]


@pytest.fixture
def opened(closing: ExitStack) -> Opening:
    """Open a store on a registry, with small chunks."""

    def make(host: str, login: Login | None = None, repository: str = REPOSITORY) -> OciStore:
        registry = Registry(f"http://{host}", repository, login, PATIENCE, CHUNK_BYTES)
        store = OciStore(f"oci://{host}/{repository}", registry)
        closing.callback(store.close)
        return store

    return make


@pytest.fixture
def proxy(registry_host: str) -> Iterator[CuttingProxy]:
    with cutting_proxy(registry_host) as between:
        yield between


def test_a_bundle_is_a_manifest_of_modelpack(registry_host: str, tmp_path: Path, opened: Opening) -> None:
    store = opened(registry_host, repository="fleet/modelpack")
    push(store, tmp_path)
    store.replace("channel/stable.json", b"{}")
    registry = Registry(f"http://{registry_host}", "fleet/modelpack", options=PATIENCE)
    manifest = json.loads(registry.manifest(BUNDLE) or b"")
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    config = json.loads(registry.read_small_blob(manifest["config"]["digest"], 10_000) or b"")
    assert config["modelfs"] == {"type": "layers", "diffIds": [layer["digest"] for layer in manifest["layers"]]}
    told = {
        layer["annotations"]["org.cncf.model.filepath"]: (layer["mediaType"], layer["digest"], layer["size"])
        for layer in manifest["layers"]
    }
    kind = "application/vnd.cncf.model."
    assert told == {
        NAME: (kind + "weight.v1.raw", f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}", len(WEIGHTS)),
        MANIFEST_NAME: (kind + "weight.config.v1.raw", f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}", len(MANIFEST)),
    }
    assert registry.manifest("channel-stable") is not None
    registry.close()


@pytest.mark.parametrize("cuts", [[50_000], [50_000, 20_000], [99_000, 99_000, 99_000]])
def test_a_cut_upload_is_completed(proxy: CuttingProxy, tmp_path: Path, opened: Opening, cuts: list[int]) -> None:
    """docker-registry gives an upload up that is cut inside a chunk. It begins again."""
    store = opened(proxy.host, repository=f"fleet/cut-{sum(cuts)}")
    proxy.cut_after = list(cuts)
    push(store, tmp_path)
    assert proxy.cut_after == []
    assert read(store, f"{BUNDLE}/{NAME}", 0, len(WEIGHTS)) == WEIGHTS


def test_what_has_arrived_is_not_sent_again(tmp_path: Path, closing: ExitStack) -> None:
    """A registry as the specification has it keeps what has arrived of a cut chunk."""
    uploads = closing.enter_context(serving_uploads())
    uploads.cut_at = [40_000, 250_000, 250_001, 511_000]
    registry = Registry(uploads.url, REPOSITORY, options=PATIENCE, chunk_bytes=CHUNK_BYTES)
    closing.callback(registry.close)
    path, size, digest = write(tmp_path, WEIGHTS)
    with SourceFile(path, size, digest) as source:
        registry.put_blob(f"sha256:{digest}", source)
    assert uploads.blobs == {f"sha256:{digest}": WEIGHTS}
    assert uploads.cut_at == [] and uploads.begun == 1
    assert [start for start, _ in uploads.spans] == [
        0,
        40_000,
        140_000,
        240_000,
        250_000,
        250_001,
        350_001,
        450_001,
        511_000,
    ]


def test_a_registry_may_ask_for_larger_chunks(tmp_path: Path, closing: ExitStack) -> None:
    uploads = closing.enter_context(serving_uploads())
    uploads.least_chunk_bytes = 300_000
    registry = Registry(uploads.url, REPOSITORY, options=PATIENCE, chunk_bytes=CHUNK_BYTES)
    closing.callback(registry.close)
    path, size, digest = write(tmp_path, WEIGHTS)
    with SourceFile(path, size, digest) as source:
        registry.put_blob(f"sha256:{digest}", source)
    assert uploads.spans == [(0, 300_000), (300_000, size)]


def test_a_registry_that_takes_a_blob_in_one_request_alone(
    proxy: CuttingProxy, tmp_path: Path, opened: Opening
) -> None:
    proxy.refused = b"Content-Range:"
    store = opened(proxy.host, repository="fleet/whole")
    push(store, tmp_path)
    assert read(store, f"{BUNDLE}/{NAME}", 0, len(WEIGHTS)) == WEIGHTS


def test_a_connection_that_is_always_cut(proxy: CuttingProxy, tmp_path: Path, opened: Opening) -> None:
    proxy.cut_after.extend([1000] * 1000)
    with pytest.raises(StoreFailed, match=r"times in a row|again and again"):
        push(opened(proxy.host, repository="fleet/never"), tmp_path)


def test_a_registry_that_refuses_uploads(proxy: CuttingProxy, tmp_path: Path, opened: Opening) -> None:
    proxy.refused = b"POST /v2/"
    with pytest.raises(StoreFailed, match="the server answered 405 to POST"):
        push(opened(proxy.host, repository="fleet/closed"), tmp_path)


@pytest.mark.parametrize(
    "manifest",
    [
        b"no JSON",
        b'{"layers": 3}',
        b'{"layers": [{"digest": "sha256:0", "size": 1, "annotations": {"org.cncf.model.filepath": "a"}}]}',
        b'{"layers": [{"digest": "sha256:%s", "size": -1, "annotations": {"org.cncf.model.filepath": "a"}}]}'
        % (b"0" * 64),
        b'{"layers": [' + b"[]," * 70_000 + b"[]]}",
        b" " * (MAX_MANIFEST_BYTES + 1),
    ],
)
def test_a_hostile_manifest_is_refused(
    tmp_path: Path, dav_files: Path, opened: Opening, manifest: bytes, dav_host: str
) -> None:
    path = dav_files / "v2" / REPOSITORY / "manifests" / BUNDLE
    path.parent.mkdir(parents=True)
    path.write_bytes(manifest)
    with pytest.raises(StoreFailed):
        opened(dav_host).size_bytes(f"{BUNDLE}/{NAME}")


@pytest.fixture
def dav_host(request: pytest.FixtureRequest) -> str:
    return str(urlsplit(request.getfixturevalue("dav").url).netloc)


@pytest.fixture
def dav_files(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue("dav").folder)


def test_user_and_password(tmp_path: Path, opened: Opening) -> None:
    (tmp_path / "users").write_text(f"{LOGIN.user}:{HASHED}\n")
    settings = f'auth: {{htpasswd: {{realm: registry, path: "{tmp_path / "users"}"}}}}\n'
    with docker_registry(tmp_path, settings) as host:
        push(opened(host, LOGIN), tmp_path)
        assert read(opened(host, LOGIN), f"{BUNDLE}/{NAME}", 1, 20) == WEIGHTS[1:20]
        for login in (None, Login("fleet", "wrong")):
            with pytest.raises(StoreFailed, match="401") as caught:
                push(opened(host, login), tmp_path)
            assert "wrong" not in str(caught.value)


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    with serving_tokens(LOGIN, IDENTITY.text) as served:
        yield served


@pytest.fixture
def trusted(tokens: TokenServer, closing: ExitStack, tmp_path: Path) -> Trusted:
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
def test_a_token_of_another_server(tmp_path: Path, tokens: TokenServer, trusted: Trusted, login: RegistryLogin) -> None:
    """One token for reading and one for writing serve all requests."""
    store = trusted(login)
    push(store, tmp_path)
    push(store, tmp_path, OTHER)
    assert read(store, f"{BUNDLE}/{NAME}", 1, 20) == WEIGHTS[1:20]
    scopes = [asked["scope"][0].rpartition(":") for asked in tokens.asked]
    assert [scope[0] for scope in scopes] == 2 * [f"repository:{REPOSITORY}"]
    assert [set(scope[2].split(",")) for scope in scopes] == [{"pull"}, {"pull", "push"}]
    for answer in (b"no JSON", b"[]", b'{"token": 3}', b'{"token": "a b"}', b'{"token": ""}', b" " * 100_000):
        tokens.answer = answer
        with pytest.raises(StoreFailed, match="sends no token"):
            push(trusted(login), tmp_path)


@pytest.mark.parametrize("lasting", [b"1" + b"0" * 400, b"-1e308", b'"1"', b"true", b"null"])
def test_any_time_of_a_token(tokens: TokenServer, lasting: bytes) -> None:
    tokens.answer = b'{"token": "abc", "expires_in": ' + lasting + b"}"
    challenge = f'Bearer realm="{tokens.url}",service="a",scope="repository:a:pull"'
    given = RegistryAuthorization("http://localhost:5000", LOGIN, PATIENCE)
    assert given("http://localhost:5000/v2/", challenge) == given("http://localhost:5000/v2/", None) == "Bearer abc"


def test_a_registry_that_anyone_may_read(tmp_path: Path, tokens: TokenServer, trusted: Trusted) -> None:
    push(trusted(LOGIN), tmp_path)
    tokens.is_open = True
    assert read(trusted(None), f"{BUNDLE}/{NAME}", 1, 20) == WEIGHTS[1:20]
    with pytest.raises(StoreFailed, match=r"/token`: the server answered 401"):
        push(trusted(None), tmp_path, OTHER)


@pytest.mark.parametrize("login", [Login("fleet", "wrong"), IdentityToken("wrong")])
def test_credentials_that_are_refused(
    tmp_path: Path, tokens: TokenServer, trusted: Trusted, login: RegistryLogin
) -> None:
    with pytest.raises(StoreFailed, match=r"/token`: the server answered 401.*check the credentials") as caught:
        push(trusted(login), tmp_path)
    assert "wrong" not in str(caught.value) + repr(login)
    assert len(tokens.asked) == 2, "once, and once after the server asked for credentials"
