"""A store in a registry: layers of ModelPack, blobs in chunks that survive cuts, and both kinds of credentials."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from moec.manifests.errors import StoreFailed
from moec.shipping.store.access import Login
from moec.shipping.store.oci.authorization import RegistryAuthorization
from moec.shipping.store.oci.registry import MAX_MANIFEST_BYTES, Registry
from moec.shipping.store.oci.store import OciStore
from moec.shipping.store.source_file import SourceFile
from tests.shipping.store.conftest import PATIENCE
from tests.shipping.store.cutting_proxy import CuttingProxy, cutting_proxy
from tests.shipping.store.fake_registry import serving_uploads
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
Opening = Callable[..., OciStore]


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


def test_an_upload_goes_in_chunks(proxy: CuttingProxy, tmp_path: Path, opened: Opening) -> None:
    push(opened(proxy.host, repository="fleet/chunks"), tmp_path)
    patches = [head for head in proxy.heads if head.startswith(b"PATCH")]
    assert len(patches) == -(-len(WEIGHTS) // CHUNK_BYTES) + 1, "the manifest is small"
    assert b"Content-Range: 100000-199999\r\n" in patches[1]


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


@pytest.mark.parametrize(
    ("realm", "told"),
    [
        ("http://tokens.invalid/token", "which has no TLS"),
        ("file:///etc/passwd", "names no server of tokens"),
        ("https://user@tokens.invalid/", "names no server of tokens"),
    ],
)
@pytest.mark.parametrize("registry", ["https://registry.invalid", "http://localhost:5000"])
def test_a_password_goes_to_no_other_kind_of_server(registry: str, realm: str, told: str) -> None:
    """Nor from a registry on this machine, which needs no TLS itself."""
    authorization = RegistryAuthorization(registry, LOGIN, PATIENCE)
    with pytest.raises(StoreFailed, match=told) as caught:
        authorization(f"{registry}/v2/", f'Bearer realm="{realm}",service="a"')
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
    nobody = RegistryAuthorization("https://registry.invalid", None, PATIENCE)
    assert nobody(url, 'Basic realm="registry"') is None


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


@dataclass
class TokenServer:
    """Gives tokens that docker-registry accepts, to one user.

    lasting_s: time for which a token holds.
    asked: queries that it got.
    """

    url: str = ""
    lasting_s: int = 300
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    answer: bytes = b""

    def sign(self, claims: dict[str, object]) -> str:
        """Return a JSON web token, by ES256. Source: RFC 7515, RFC 7518."""
        raise NotImplementedError


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.fixture
def tokens(tmp_path: Path) -> Iterator[TokenServer]:
    """A server of tokens, and its certificate in `root.pem`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tokens")])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "root.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    chain = [base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()]

    class Signing(TokenServer):
        def sign(self, claims: dict[str, object]) -> str:
            head = {"typ": "JWT", "alg": "ES256", "x5c": chain}
            text = ".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
            r, s = decode_dss_signature(key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
            return f"{text}.{_base64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"

    served = Signing()

    class Answer(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            served.asked.append(asked)
            if self.headers.get("Authorization") != LOGIN.header():
                self.send_error(401)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(served.answer or json.dumps(_granted(served, asked)).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    served.url = f"http://127.0.0.1:{server.server_address[1]}/token"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def _granted(served: TokenServer, asked: dict[str, list[str]]) -> dict[str, object]:
    kind, name, actions = asked["scope"][0].split(":")
    now = int(time.time())
    claims = {
        "iss": "tokens",
        "aud": asked["service"][0],
        "sub": LOGIN.user,
        "exp": now + served.lasting_s,
        "nbf": now - 60,
        "iat": now,
        "jti": str(len(served.asked)),
        "access": [{"type": kind, "name": name, "actions": actions.split(",")}],
    }
    return {"token": served.sign(claims), "expires_in": served.lasting_s}


@pytest.mark.parametrize("lasting", [b"1" + b"0" * 400, b"-1e308", b'"1"', b"true", b"null"])
def test_any_time_of_a_token(tokens: TokenServer, lasting: bytes) -> None:
    tokens.answer = b'{"token": "abc", "expires_in": ' + lasting + b"}"
    challenge = f'Bearer realm="{tokens.url}",service="a",scope="repository:a:pull"'
    given = RegistryAuthorization("http://localhost:5000", LOGIN, PATIENCE)
    assert given("http://localhost:5000/v2/", challenge) == given("http://localhost:5000/v2/", None) == "Bearer abc"


def test_a_token_of_another_server(tmp_path: Path, tokens: TokenServer, opened: Opening) -> None:
    """One token for reading and one for writing serve all requests."""
    settings = (
        f'auth: {{token: {{realm: "{tokens.url}", service: registry, issuer: tokens, '
        f'rootcertbundle: "{tmp_path / "root.pem"}"}}}}\n'
    )
    with docker_registry(tmp_path, settings) as host:
        store = opened(host, LOGIN)
        push(store, tmp_path)
        push(store, tmp_path, OTHER)
        assert read(store, f"{BUNDLE}/{NAME}", 1, 20) == WEIGHTS[1:20]
        scopes = [asked["scope"][0].rpartition(":") for asked in tokens.asked]
        assert [scope[0] for scope in scopes] == 2 * [f"repository:{REPOSITORY}"]
        assert [set(scope[2].split(",")) for scope in scopes] == [{"pull"}, {"pull", "push"}]
        with pytest.raises(StoreFailed, match=r"/token`: the server answered 401") as caught:
            push(opened(host, Login("fleet", "wrong")), tmp_path)
        assert "wrong" not in str(caught.value)
        for answer in (b"no JSON", b"[]", b'{"token": 3}', b'{"token": "a b"}', b'{"token": ""}'):
            tokens.answer = answer
            with pytest.raises(StoreFailed, match="sends no token"):
                push(opened(host, LOGIN), tmp_path)
