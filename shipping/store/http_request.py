"""One request to an HTTP server: body, credentials, redirects, and the answer before its body is read."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit

from moec.manifests.errors import StoreFailed

from .http_connection import Connections, Origin, TunnelRefused, origin_of, shown_place

Authorize = Callable[[str, "str | None"], "str | None"]
"""Returns the `Authorization` header for a URL, or None.

It takes the URL, and the challenge of a server that refused the last one (`WWW-Authenticate`), None at first.
The header goes to the origin of the URL alone, never to that of a redirect.
"""
Body = Callable[[], Iterable[bytes]]
"""Returns the body of a request from its start. It is called again for another attempt."""
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_FOLLOWING = ("GET", "HEAD")
_REPEATED = (408, 425, 429, 500, 502, 503, 504)
_DRAINED_BYTES = 64 << 10
"""Most bytes of an unused answer that are read so that the connection can be kept."""
_CHECK = "check the address and the server"
_UNKNOWN_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class Again(Exception):
    """An attempt that failed, and that may succeed when it is repeated.

    after_s: pause that the server asked for, seconds.
    """

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


class HttpAnswer:
    """An answer whose head was read.

    stated_bytes: size of the body as the head states it, or None.
    """

    def __init__(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        self.origin, self.connection = origin, connection
        self._response = connection.getresponse()
        self.status = self._response.status
        stated = self.header("Content-Length")
        self.stated_bytes = int(stated) if re.fullmatch("[0-9]{1,18}", stated) else None

    def header(self, name: str) -> str:
        """Return a header, empty if it is not there."""
        return (self._response.getheader(name) or "").strip()

    def read_into(self, buffer: memoryview) -> int:
        """Fill a buffer from the body. Return the number of bytes, fewer than asked for where the body ends."""
        return self._response.readinto(buffer)

    def goes_on(self) -> bool:
        return not self._response.isclosed() and self._response.readinto(bytearray(1)) > 0

    def drain(self) -> None:
        """Read a short body, so that the connection can be kept."""
        if (self.stated_bytes or _DRAINED_BYTES) < _DRAINED_BYTES:
            self._response.read()

    def end(self) -> None:
        """Close the connection if the body was not read to its end."""
        if self._response.length == 0:  # an answer to HEAD, for example
            self._response.read()
        if not self._response.isclosed():
            self.connection.close()
        self._response.close()


class HttpRequests:
    """Sends requests.

    headers: headers of every request.
    """

    def __init__(self, connections: Connections, headers: Mapping[str, str], authorize: Authorize | None) -> None:
        self._connections, self._headers, self._authorize = connections, headers, authorize
        self._answering: set[Origin] = set()

    @contextlib.contextmanager
    def answer(
        self, method: str, url: str, headers: Mapping[str, str] | None = None, body: Body | None = None
    ) -> Iterator[HttpAnswer]:
        """Send a request. Yield the last answer, whose body is not read. Redirects of GET and HEAD are followed.

        body: content of the request, whose size `headers` state as Content-Length.
        Raises Again for errors of the connection, also while the body is read, and for a server that is busy.
        Raises StoreFailed for redirects that are not allowed, and for encoded bodies.
        """
        answer = self._last_answer(method, url, dict(headers or {}), body)
        try:
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise Again(_reason(error)) from error
        finally:
            self._end(answer)

    def _end(self, answer: HttpAnswer) -> None:
        answer.end()
        self._connections.give_back(answer.origin, answer.connection)

    def _last_answer(self, method: str, url: str, headers: dict[str, str], body: Body | None) -> HttpAnswer:
        """Return the answer after all redirects. Raises Again, StoreFailed."""
        place, own_origin = url, _origin(url, url)
        credentials = self._authorize(url, None) if self._authorize else None
        redirects, is_renewed = 0, False
        while True:
            origin = _origin(url, place)
            authorization = {"Authorization": credentials} if credentials and origin == own_origin else {}
            answer = self._send(method, place, origin, {**self._headers, **headers, **authorization}, body)
            if answer.status == 401 and origin == own_origin and self._authorize and not is_renewed:
                is_renewed, challenge = True, answer.header("WWW-Authenticate")
                self._drop(answer)
                credentials = self._authorize(url, challenge)
            elif answer.status in _REPEATED:
                after_s = _pause(answer.header("Retry-After"))
                self._drop(answer)
                raise Again(f"the server answered {answer.status}", after_s)
            elif answer.status in _REDIRECTS and method in _FOLLOWING:
                redirects += 1
                location = answer.header("Location")
                self._drop(answer)
                if redirects > MAX_REDIRECTS:
                    raise StoreFailed(f"`{shown_place(url)}`: more than {MAX_REDIRECTS} redirects", _CHECK)
                place = _next_place(url, place, location)
            else:
                self._check_coding(url, answer)
                return answer

    def _send(
        self, method: str, place: str, origin: Origin, headers: Mapping[str, str], body: Body | None
    ) -> HttpAnswer:
        """Send one request. Raises Again, StoreFailed."""
        try:
            connection = self._connections.take(origin)
        except ConnectionError as error:
            raise Again(str(error)) from error
        proxy = self._connections.proxy_of(origin)
        target = _target(place)
        if proxy is not None and origin.scheme == "http":
            target = f"http://{urlsplit(place).netloc}{target}"
            headers = {**headers, **({"Proxy-Authorization": proxy.authorization} if proxy.authorization else {})}
        was_open = connection.sock is not None
        while True:
            try:
                self._write(connection, method, target, {"Accept-Encoding": "identity", **headers}, body)
                answer = HttpAnswer(origin, connection)
                self._answering.add(origin)
                return answer
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                connection.close()
                # A server may close a connection that waits for the next request.
                if was_open and isinstance(error, (ConnectionError, http.client.BadStatusLine)):
                    was_open = False
                    continue
                self._connections.give_back(origin, connection)
                reason = _reason(error)
                if proxy is not None:
                    reason = f"the proxy {proxy}: {reason}"
                if self._is_final(origin, error):
                    raise StoreFailed(f"`{shown_place(place)}`: {reason}", _remedy(error)) from error
                raise Again(reason) from error
            except BaseException:  # the source of the body failed
                connection.close()
                self._connections.give_back(origin, connection)
                raise

    def _is_final(self, origin: Origin, error: BaseException) -> bool:
        """Return whether a request that failed would fail again.

        A server that has answered before may be starting again. One that has not is no server, or its name is wrong.
        """
        if isinstance(error, TunnelRefused):
            return error.status not in _REPEATED
        if isinstance(error, (ssl.SSLCertVerificationError, http.client.InvalidURL, UnicodeError)):
            return True
        if origin in self._answering:
            return False
        if isinstance(error, socket.gaierror):
            return error.errno in _UNKNOWN_NAME
        is_cut = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError))
        return isinstance(error, ConnectionRefusedError) or (isinstance(error, ssl.SSLError) and not is_cut)

    @staticmethod
    def _write(
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Body | None,
    ) -> None:
        """Write a request. Raises OSError, HTTPException, and the errors of the body's source."""
        try:
            connection.request(method, target, None if body is None else body(), dict(headers))
        except (BrokenPipeError, ConnectionResetError):
            if body is None:
                raise
            # A server that refuses a body may answer and close before it has read all of it.

    def _drop(self, answer: HttpAnswer) -> None:
        """End an answer whose body is not used."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer.drain()
        self._end(answer)

    def _check_coding(self, url: str, answer: HttpAnswer) -> None:
        """Raise StoreFailed for a body that is not sent as it is stored."""
        coding = answer.header("Content-Encoding").lower()
        transfer = answer.header("Transfer-Encoding").lower()
        if coding in ("", "identity") and transfer in ("", "chunked", "identity"):
            return
        self._end(answer)
        raise StoreFailed(
            f"`{shown_place(url)}`: expected stored bytes, found the encoding `{(coding or transfer)[:40]}`",
            "let the server send files without compression",
        )


def _origin(url: str, place: str) -> Origin:
    """Return the origin of a place that a request for a URL goes to. Raises StoreFailed."""
    try:
        return origin_of(place)
    except ValueError as error:
        if place == url:
            raise StoreFailed(f"`{shown_place(url)}` is no address of a file: {error}", _CHECK) from error
        raise StoreFailed(
            f"`{shown_place(url)}`: the server redirects to another kind of place: {error}", _CHECK
        ) from error


def _target(place: str) -> str:
    target = re.sub("^[a-z]+://[^/?#]*", "", place.partition("#")[0])
    return target if target.startswith("/") else f"/{target}"


def _next_place(url: str, place: str, location: str) -> str:
    """Return the place of a redirect. Raises StoreFailed if it leaves TLS or HTTP."""
    try:
        target = urljoin(place, location)
    except ValueError as error:
        raise StoreFailed(f"`{shown_place(url)}`: the server redirects to no address", _CHECK) from error
    before, after = _origin(url, place), _origin(url, target)
    if before.scheme == "https" and after.scheme != "https":
        raise StoreFailed(f"`{shown_place(url)}`: the server redirects from https to {after.scheme}", _CHECK)
    return target


def _pause(text: str) -> float:
    """Return the seconds of a `Retry-After` header, 0 if there are none."""
    if re.fullmatch("[0-9]{1,9}", text):
        return float(text)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is not None:
            return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())
    return 0.0


def _reason(error: BaseException) -> str:
    """Return an error of a connection as a part of a sentence."""
    if isinstance(error, TimeoutError):
        return "the server takes too long"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return f"no connection over TLS: {error.reason.lower().replace('_', ' ')}"
    if isinstance(error, TunnelRefused):
        return str(error)
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closes the connection without an answer"
    if isinstance(error, http.client.IncompleteRead):
        return "the answer ends early"
    if isinstance(error, (http.client.InvalidURL, UnicodeError)):
        return "it is no valid address"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror[0].lower()}{error.strerror[1:]}"
    return f"no valid answer ({type(error).__name__})"


def _remedy(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "check the address, or let SSL_CERT_FILE name the certificates that you trust"
    return "check HTTPS_PROXY and its credentials" if isinstance(error, TunnelRefused) else _CHECK
