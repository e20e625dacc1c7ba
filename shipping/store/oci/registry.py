"""A client of one repository in an OCI registry: blobs by digest, manifests by tag.

Source: OCI distribution specification 1.1 (github.com/opencontainers/distribution-spec), spec.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..access import RegistryLogin
from ..http_client import HttpClient, HttpOptions
from ..http_upload import refusal, send
from ..source_file import SourceFile
from .authorization import RegistryAuthorization
from .upload import CHUNK_BYTES, BlobUpload, begin_upload, closing_url

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
MAX_MANIFEST_BYTES = 4 << 20
"""Size of a manifest, bytes: what every registry must take."""


class Registry:
    """Blobs and manifests of one repository. Several threads may read at the same time; one thread writes."""

    def __init__(
        self,
        base_url: str,
        repository: str,
        login: RegistryLogin | None = None,
        options: HttpOptions | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """base_url: scheme and host. chunk_bytes: bytes of a request of an upload."""
        own = options or HttpOptions()
        accepting = replace(own, headers={**own.headers, "Accept": f"{MANIFEST_TYPE}, */*;q=0.5"})
        self._client = HttpClient(accepting, RegistryAuthorization(base_url, login, own))
        self._root, self._chunk_bytes = f"{base_url}/v2/{repository}", chunk_bytes

    def blob_bytes(self, digest: str) -> int | None:
        """Return the size of a blob, or None. Raises StoreFailed."""
        return self._client.size_bytes(self._blob(digest))

    def read_blob(self, digest: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield a range of a blob. Raises StoreFailed."""
        return self._client.read(self._blob(digest), start, end)

    def read_small_blob(self, digest: str, limit_bytes: int) -> bytes | None:
        """Return a whole blob, or None. Raises StoreFailed."""
        return self._client.read_small(self._blob(digest), limit_bytes)

    def put_blob(self, digest: str, source: SourceFile) -> None:
        """Upload a blob. Raises StoreFailed, InputError."""
        upload = BlobUpload(self._client, self._uploads, source, self._chunk_bytes)
        upload.send()
        self._close_upload(upload.place, digest, b"", source.size_bytes)

    def put_small_blob(self, digest: str, data: bytes) -> None:
        """Add a blob by one request after the begin, if the registry does not have it. Raises StoreFailed."""
        if self.blob_bytes(digest) != len(data):
            place, _ = begin_upload(self._client, self._uploads)
            self._close_upload(place, digest, data, len(data))

    def _close_upload(self, place: str, digest: str, rest: bytes, size_bytes: int) -> None:
        """End an upload with its last bytes. Raises StoreFailed if the blob is not there then."""
        url, headers = closing_url(place, digest), {"Content-Type": "application/octet-stream"}
        reply = send(self._client, "PUT", url, headers=headers, body=lambda: [rest], size_bytes=len(rest))
        # A request that is repeated finds no upload if the first one has succeeded.
        if reply.status != 201 and self.blob_bytes(digest) != size_bytes:
            raise refusal("PUT", url, reply)

    def manifest(self, tag: str) -> bytes | None:
        """Return a manifest, or None. Raises StoreFailed."""
        return self._client.read_small(self._tagged(tag), MAX_MANIFEST_BYTES)

    def put_manifest(self, tag: str, data: bytes) -> None:
        """Write a manifest, which replaces the one with this tag. Raises StoreFailed."""
        headers = {"Content-Type": MANIFEST_TYPE}
        reply = send(self._client, "PUT", self._tagged(tag), headers=headers, body=lambda: [data], size_bytes=len(data))
        if reply.status != 201:
            raise refusal("PUT", self._tagged(tag), reply)

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _blob(self, digest: str) -> str:
        return f"{self._root}/blobs/{digest}"

    @property
    def _uploads(self) -> str:
        return f"{self._root}/blobs/uploads/"

    def _tagged(self, tag: str) -> str:
        return f"{self._root}/manifests/{tag}"
