"""A store in a bucket of S3, of a service that speaks S3, or of Google Cloud Storage, by the package obstore.

obstore reads credentials, region and endpoint from its own environment variables (`AWS_...`, `GOOGLE_...`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError, NotFoundError, PermissionDeniedError, UnauthenticatedError
from obstore.store import GCSStore, S3Store

from moec.manifests.errors import InputError, StoreFailed

from .address import GS, Address
from .http_client import HttpOptions
from .http_connection import Lateness
from .interface import PART_BYTES, Sent, SourceFile

_LEAST_PART_BYTES = 8 << 20
_MAX_PARTS = 9_000
"""Parts of an upload. Services take 10,000."""
_UPLOADS_AT_ONCE = 4
_MAX_COPIED_BYTES = 5 << 30
"""Size of a file that a service copies by one request, bytes."""
_PART_S = 600
"""Longest time of one request, seconds: a part of an upload over a slow line."""
_CREDENTIALS = "check the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS"
_DIGEST = "moec-sha256"
"""Metadata of a file: SHA-256 of its bytes in hex. A file that another program writes there has none."""
_NOTHING_THERE = re.compile("kind: ConnectionRefused|Name or service not known")
"""How obstore says that nothing listens at an address, or that its name is unknown."""
_STATUS = re.compile(r"status code: ([0-9]{3})")
_T = TypeVar("_T")


class ObjectStore:
    """Files of one model below a prefix of a bucket. A file is there when its upload has ended."""

    def __init__(self, address: Address, options: HttpOptions | None = None) -> None:
        """Raises InputError if obstore refuses the settings of the environment."""
        self.address = str(address)
        patience = options or HttpOptions()
        settings: dict[str, Any] = {
            "prefix": address.path or None,
            # Not as `client_options`: they would replace those of the environment, such as AWS_ALLOW_HTTP.
            "config": {
                "connect_timeout": f"{patience.timeout_s:.0f}s",
                "read_timeout": f"{patience.timeout_s:.0f}s",
                "timeout": f"{_PART_S}s",
            },
            "retry_config": {
                "max_retries": patience.attempts - 1,
                "backoff": {"init_backoff": timedelta(seconds=patience.first_pause_s)},
            },
        }
        try:
            kind = GCSStore if address.scheme == GS else S3Store
            self._patient = kind(address.host, **settings)
            # Until the service has answered, each failure is looked at before the request is repeated.
            self._bucket = kind(address.host, **{**settings, "retry_config": {"max_retries": 0}})
        except (BaseError, ValueError, TypeError) as error:
            raise InputError(
                f"`{self.address}` cannot be opened with the settings of the environment ({type(error).__name__})",
                "check the variables that begin with AWS_ or GOOGLE_",
            ) from None
        self._timeout_s = patience.timeout_s
        self._known: dict[tuple[int, str], str] = {}

    def size_bytes(self, path: str) -> int | None:
        head = self._ask("HEAD", path, lambda: obstore.head(self._bucket, path))
        return None if head is None else int(head["size"])

    def read(self, path: str, start: int, end: int) -> Iterator[memoryview]:
        if start >= end:
            return
        result = self._ask("GET", path, lambda: obstore.get(self._bucket, path, options={"range": (start, end)}))
        if result is None:
            raise StoreFailed(f"`{self.address}/{path}`: there is no such file", "push the bundle again")
        if tuple(result.range) != (start, end):
            raise self._other_bytes(path, start, end)
        done = start
        for piece in self._pieces(path, result):
            for at in range(0, len(piece), PART_BYTES):
                block = piece[at : min(at + PART_BYTES, end - done + at)]
                done += len(block)
                yield block
        if done != end:
            raise self._other_bytes(path, start, end)

    def read_small(self, path: str, limit_bytes: int) -> bytes | None:
        result = self._ask("GET", path, lambda: obstore.get(self._bucket, path))
        if result is None:
            return None
        data = bytearray()
        for piece in self._pieces(path, result):
            data += piece[: limit_bytes + 1 - len(data)]
            if len(data) > limit_bytes:
                raise StoreFailed(f"`{self.address}/{path}` has more than {limit_bytes} bytes", "check the address")
        return bytes(data)

    def note(self, path: str, size_bytes: int, sha256: str) -> None:
        self._known.setdefault((size_bytes, sha256), path)

    def put(
        self, path: str, source: Path, size_bytes: int, sha256: str, sent: Sent | None = None, again: bool = False
    ) -> bool:
        """Add a file that never changes, as a copy of the service if an equal one is known.

        Its digest is stored with it. A file that is there without this digest is sent again.
        Raises StoreFailed, InputError.
        """
        is_there = not again and self._has(path, size_bytes, sha256)
        is_there = is_there or self._copy(path, size_bytes, sha256)
        if not is_there:
            part_bytes = max(_LEAST_PART_BYTES, -(-size_bytes // _MAX_PARTS))
            with SourceFile(source, size_bytes, sha256, sent) as content:
                parts = content.parts()
                body = parts if size_bytes > part_bytes else b"".join(parts)
                digest = {_DIGEST: sha256}
                self._put(path, body, attributes=digest, chunk_size=part_bytes, max_concurrency=_UPLOADS_AT_ONCE)
        self.note(path, size_bytes, sha256)
        return not is_there

    def commit(self, folder: str) -> None:
        """Do nothing. No channel names the bundle before all its files are there."""

    def replace(self, path: str, data: bytes) -> None:
        self._put(path, data, attributes={"Content-Type": "application/json", "Cache-Control": "no-cache"})

    def close(self) -> None:
        """Do nothing. obstore closes its connections by itself."""

    def _put(self, path: str, body: bytes | Iterator[bytes], **settings: Any) -> None:
        self._bucket = self._patient  # a body can be sent once
        done = self._ask("PUT", path, lambda: obstore.put(self._bucket, path, body, **settings))
        if done is None:
            raise StoreFailed(f"`{self.address}`: there is no such bucket", "make the bucket, or check its name")

    def _has(self, path: str, size_bytes: int, sha256: str) -> bool:
        """Return whether the service states this size and digest of a file. Raises StoreFailed."""
        head = self._ask("HEAD", path, lambda: obstore.get(self._bucket, path, options={"head": True}))
        return head is not None and head.meta["size"] == size_bytes and head.attributes.get(_DIGEST) == sha256

    def _copy(self, path: str, size_bytes: int, sha256: str) -> bool:
        """Let the service copy a known file with this content. Returns False if that is not possible."""
        known = self._known.get((size_bytes, sha256))
        if known is None or known == path or size_bytes > _MAX_COPIED_BYTES:
            return False
        if not self._has(known, size_bytes, sha256):
            return False
        try:
            self._ask("COPY", path, lambda: obstore.copy(self._bucket, known, path))
        except StoreFailed:  # a service without copies; an upload tells if there is more to it
            return False
        return self._has(path, size_bytes, sha256)

    def _pieces(self, path: str, result: Any) -> Iterator[memoryview]:
        """Yield the body of an answer as it arrives. Raises StoreFailed, also if it arrives too slowly."""
        pieces = iter(result.stream(min_chunk_size=1))  # a slow service must not be waited for
        lateness = Lateness(self._timeout_s)
        while True:
            started = time.monotonic()
            try:
                piece = next(pieces, None)
                if piece is None:
                    return
                lateness.add(time.monotonic() - started, len(piece))
            except TimeoutError as error:
                raise StoreFailed(
                    f"`{self.address}/{path}`: the service sends too slowly", "try again later"
                ) from error
            except (BaseError, OSError) as error:
                raise self._failure("GET", path, error) from None
            yield memoryview(piece)

    def _ask(self, what: str, path: str, call: Callable[[], _T]) -> _T | None:
        """Return the result of a request, or None if there is no such file or bucket. Raises StoreFailed.

        call: makes a request to the present bucket. The first one may be made twice.
        """
        is_first = self._bucket is not self._patient
        try:
            return call()
        except (FileNotFoundError, NotFoundError):
            return None
        except (BaseError, OSError) as error:
            is_final = isinstance(error, (PermissionDeniedError, UnauthenticatedError))
            if not is_first or is_final or _NOTHING_THERE.search(str(error)):
                raise self._failure(what, path, error) from None
        finally:
            self._bucket = self._patient
        return self._ask(what, path, call)

    def _failure(self, what: str, path: str, error: Exception) -> StoreFailed:
        """Return the error of a request. The message of obstore is not shown: it may have a signed address."""
        place = f"`{self.address}/{path}`"
        match = _STATUS.search(str(error))
        status = None if match is None else match[1]
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError, PermissionError)) or status in (
            "401",
            "403",
        ):
            return StoreFailed(f"{place}: the service refuses {what} with these credentials", _CREDENTIALS)
        if status is not None:
            return StoreFailed(f"{place}: the service answered {status} to {what}", "try again later")
        return StoreFailed(f"{place}: the service does not answer {what}", "check network, region and endpoint")

    def _other_bytes(self, path: str, start: int, end: int) -> StoreFailed:
        return StoreFailed(
            f"`{self.address}/{path}`: expected bytes {start} to {end - 1}, found fewer", "push the bundle again"
        )
