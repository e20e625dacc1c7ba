"""Read and send files over HTTP, to servers that are not trusted: ranges, redirects, time-outs, bounded retries.

Source of the rules: RFC 9110, sections 13.1.5 (If-Range), 14 (ranges) and 15.4 (redirects).
"""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from moec.manifests.errors import StoreFailed

from .access import ProxyFor
from .http_connection import Connections, shown_place
from .http_request import Again, Authorize, Body, HttpAnswer, HttpRequests
from .interface import PART_BYTES

_T = TypeVar("_T")
_PROGRESS_BYTES = 1 << 20
"""Bytes of an attempt after which the count of failed attempts starts again."""
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:[0-9]{1,18}|\*)")
_TOTAL = re.compile(r"bytes (?:[0-9]{1,18}-[0-9]{1,18}|\*)/([0-9]{1,18})")
_MISSING = (404, 410)
_LATER = "try again later"
_CHECK = "check the address and the server"
_MAX_REPLY_BYTES = 64 << 10
_REMEDIES = {
    401: "check the credentials",
    403: "check the credentials",
    405: "use a server that takes uploads (PUT)",
    413: "raise the server's limit of a request's size",
    501: "use a server that takes uploads (PUT)",
    507: "free space on the server",
}


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Patience of a client.

    timeout_s: longest wait for the next byte, seconds.
    attempts: failed attempts in a row that end in an error.
    first_pause_s: pause after the first failed attempt, seconds; it doubles with every further one.
    most_pause_s: longest pause that a server may ask for with `Retry-After`, seconds.
    headers: headers of every request, without credentials.
    context: settings of TLS; None: those of the system.
    proxy_for: gives proxies; None: there are none. This machine is reached without one.
    """

    timeout_s: float = 30.0
    attempts: int = 6
    first_pause_s: float = 0.5
    most_pause_s: float = 60.0
    headers: Mapping[str, str] = field(default_factory=dict)
    context: ssl.SSLContext | None = None
    proxy_for: ProxyFor | None = None


class HttpClient:
    """Files on HTTP servers, by URL. Several threads may read at the same time.

    Errors are StoreFailed with host and path. They never have credentials or a query.
    requests: sends one request without a repetition.
    """

    def __init__(self, options: HttpOptions | None = None, authorize: Authorize | None = None) -> None:
        """authorize: gives credentials; None: there are none."""
        self._options = options or HttpOptions()
        self._connections = Connections(self._options.timeout_s, self._options.context, self._options.proxy_for)
        self.requests = HttpRequests(self._connections, self._options.headers, authorize)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._tags: dict[str, str] = {}

    def size_bytes(self, url: str) -> int | None:
        """Return the size of a file, or None if there is no such file. Raises StoreFailed."""
        return self.repeated(url, lambda: self._size(url))

    def read(self, url: str, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of a file from `start` to before `end`, in parts of at most PART_BYTES.

        A part is valid until the next one is asked for. After a cut the rest is asked for again.
        Raises StoreFailed if the server sends other bytes than were asked for, or fails too often.
        """
        buffer = memoryview(bytearray(min(PART_BYTES, max(1, end - start))))
        done, failed = start, 0
        while done < end:
            before = done
            try:
                for count in self._range(url, done, end, buffer):
                    done += count
                    yield buffer[:count]
            except Again as problem:
                failed = 1 if done - before >= _PROGRESS_BYTES else failed + 1
                self._rest(url, problem, failed)

    def read_small(self, url: str, limit_bytes: int) -> bytes | None:
        """Return a whole file, or None if there is no such file.

        Raises StoreFailed, also for a file of more than limit_bytes, of which no more than that is held.
        """
        return self.repeated(url, lambda: self._small(url, limit_bytes))

    def forget(self, url: str) -> None:
        """Forget the ETag of a file that this process changes."""
        with self._lock:
            self._tags.pop(url, None)

    def close(self) -> None:
        """Close all connections. Reads of other threads end with StoreFailed."""
        self._closed.set()
        self._connections.close()

    def repeated(self, url: str, attempt: Callable[[], _T]) -> _T:
        """Return the result of the first attempt that does not raise Again. Raises StoreFailed after the last one."""
        failed = 0
        while True:
            try:
                return attempt()
            except Again as problem:
                failed += 1
                self._rest(url, problem, failed)

    def _rest(self, url: str, problem: Again, failed: int) -> None:
        """Wait after a failed attempt. Raises StoreFailed after the last one."""
        if failed < self._options.attempts:
            pause_s = self._options.first_pause_s * 2 ** (failed - 1)
            if not self._closed.wait(max(pause_s, min(problem.after_s, self._options.most_pause_s))):
                return
        raise StoreFailed(f"`{shown_place(url)}`: {problem}, {failed} times in a row", _LATER) from problem

    def _size(self, url: str) -> int | None:
        with self.requests.answer("HEAD", url) as answer:
            if answer.status in _MISSING:
                return None
            if answer.status == 200 and answer.stated_bytes is not None:
                self._check_tag(url, answer)
                return answer.stated_bytes
            if answer.status not in (200, 400, 403, 405, 501):
                raise _refusal(url, answer)
        # Some servers do not know HEAD, and signed addresses are often valid for GET alone.
        with self.requests.answer("GET", url, {"Range": "bytes=0-0"}) as answer:
            if answer.status in _MISSING:
                return None
            if answer.status == 200 and answer.stated_bytes is not None:
                return answer.stated_bytes
            total = _TOTAL.fullmatch(answer.header("Content-Range"))
            if answer.status not in (206, 416) or total is None:
                raise _refusal(url, answer)
            self._check_tag(url, answer)
            return int(total[1])

    def _small(self, url: str, limit_bytes: int) -> bytes | None:
        # A cache between here and the server asks whether it still has the newest one.
        with self.requests.answer("GET", url, {"Cache-Control": "no-cache"}) as answer:
            if answer.status in _MISSING:
                return None
            if answer.status != 200:
                raise _refusal(url, answer)
            stated, data = answer.stated_bytes, bytearray()
            buffer = memoryview(bytearray(min(PART_BYTES, limit_bytes + 1)))
            while (stated or 0) <= limit_bytes and len(data) <= limit_bytes:
                count = answer.read_into(buffer[: limit_bytes + 1 - len(data)])
                data += buffer[:count]
                if count == 0:
                    if stated is not None and len(data) < stated:
                        raise Again(f"the answer ends after {len(data)} of {stated} bytes")
                    return bytes(data)
            raise StoreFailed(f"`{shown_place(url)}` has more than {limit_bytes} bytes", _CHECK)

    def _range(self, url: str, start: int, end: int, buffer: memoryview) -> Iterator[int]:
        """Fill the buffer again and again with the bytes of a range. Yield the number of bytes each time."""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        known = self._tags.get(url, "")
        if known.startswith('"'):  # a weak tag is not allowed there
            headers["If-Range"] = known
        with self.requests.answer("GET", url, headers) as answer:
            self._check_range(url, answer, start, end)
            left = end - start
            while left:
                count = answer.read_into(buffer[: min(left, len(buffer))])
                if count == 0:
                    raise Again(f"the answer ends after {end - start - left} of {end - start} bytes")
                left -= count
                if not left and answer.goes_on():
                    raise StoreFailed(f"`{shown_place(url)}`: the server sends more bytes than it states", _CHECK)
                yield count

    def _check_range(self, url: str, answer: HttpAnswer, start: int, end: int) -> None:
        """Raise StoreFailed if an answer does not state exactly the bytes of a range."""
        place, stated = shown_place(url), answer.stated_bytes
        if answer.status in _MISSING:
            raise StoreFailed(f"`{place}`: there is no such file", _CHECK)
        if answer.status == 416:
            raise StoreFailed(f"`{place}` has fewer than the {end} bytes that are expected", _CHECK)
        if answer.status not in (200, 206):
            raise _refusal(url, answer)
        self._check_tag(url, answer)
        if answer.status == 200 and (start or stated not in (None, end)):
            range_text = "the whole file" if stated is None else f"a whole file of {stated} bytes"
            raise StoreFailed(
                f"`{place}`: expected bytes {start} to {end - 1}, found {range_text}", "use a server that serves ranges"
            )
        if answer.status == 206:
            range_text = answer.header("Content-Range")
            match = _CONTENT_RANGE.fullmatch(range_text)
            if match is None or (int(match[1]), int(match[2])) != (start, end - 1) or stated not in (None, end - start):
                raise StoreFailed(
                    f"`{place}`: expected bytes {start} to {end - 1}, found the range `{range_text[:80]}`"
                    + ("" if stated is None else f" with {stated} bytes"),
                    _CHECK,
                )

    def _check_tag(self, url: str, answer: HttpAnswer) -> None:
        """Remember the ETag of a file. Raises StoreFailed if it differs from the remembered one."""
        tag = answer.header("ETag")
        if not 0 < len(tag) <= 200:
            return
        with self._lock:
            known = self._tags.setdefault(url, tag)
        if known != tag:
            raise StoreFailed(f"`{shown_place(url)}` changed on the server while it was read", _LATER)


def _refusal(url: str, answer: HttpAnswer) -> StoreFailed:
    """Return the error for a status that no retry changes."""
    remedy = "check the credentials" if answer.status in (401, 403) else _CHECK
    if answer.status == 407:
        remedy = "check HTTP_PROXY and its credentials"
    return StoreFailed(f"`{shown_place(url)}`: the server answered {answer.status}", remedy)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of a server.

    headers: those that were asked for, by name; empty if not there.
    body: at most 64 KiB of it.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def send(
    client: HttpClient,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: Body | None = None,
    size_bytes: int = 0,
    wanted: Collection[str] = (),
) -> Reply:
    """Send a request, and again after errors of the connection. Return the answer, of any status.

    body: content; None: it has none.
    size_bytes: size of the content.
    wanted: headers of the answer that are returned.
    Raises StoreFailed, and the errors of the body.
    """
    sized = {"Content-Length": str(size_bytes)} if method in ("PUT", "POST", "PATCH") else {}

    def attempt() -> Reply:
        with client.requests.answer(method, url, {**sized, **(headers or {})}, body) as answer:
            content = bytearray(_MAX_REPLY_BYTES)
            count = answer.read_into(memoryview(content)) if method != "HEAD" else 0
            return Reply(answer.status, {name: answer.header(name) for name in wanted}, bytes(content[:count]))

    return client.repeated(url, attempt)


def refusal(method: str, url: str, reply: Reply) -> StoreFailed:
    """Return the error for an answer that no retry changes."""
    remedy = _REMEDIES.get(reply.status, "check the address and the server")
    return StoreFailed(f"`{shown_place(url)}`: the server answered {reply.status} to {method}", remedy)
