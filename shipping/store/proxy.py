"""Proxies of HTTP between this machine and stores.

A server over TLS is reached through a tunnel (CONNECT), so that the proxy sees its host alone. Other requests are sent
to the proxy with their whole URL. Source: RFC 9110, section 9.3.6, and RFC 9112, section 3.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from moec.manifests.errors import InputError

from .access import Login

_FORM = re.compile(
    r"(?:http://)?(?:(?P<user>[^:/?#@]*)(?::(?P<password>[^/?#@]*))?@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORT = 80
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that is spoken to by HTTP.

    authorization: header `Proxy-Authorization`, or None.
    """

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


ProxyFor = Callable[[str, str], "Proxy | None"]
"""Takes the scheme of a URL, and its host with the port. Returns the proxy for requests to it, or None."""


def parse_proxy(text: str, variable: str) -> Proxy:
    """Return the proxy that a user wrote as `http://USER:PASSWORD@HOST:PORT`. All but the host may be missing.

    variable: where the text comes from, for the message.
    Raises InputError. Its message never shows credentials.
    """
    found = _FORM.fullmatch(text.strip())
    port = int(found["port"] or _DEFAULT_PORT) if found else 0
    if found is None or not 0 < port <= _MAX_PORT:
        raise InputError(f"`{variable}` names no proxy of HTTP", f"write `{variable}=http://HOST:PORT`")
    login = None if found["user"] is None else Login(unquote(found["user"]), unquote(found["password"] or ""))
    return Proxy(found["host"].strip("[]"), port, None if login is None else login.header())
