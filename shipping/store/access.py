"""Credentials for stores, and proxies of HTTP between this machine and stores.

Credentials go to the host that they are for, over TLS or to this machine, and into no message. A server over TLS is
reached through a tunnel (CONNECT), so that the proxy sees its host alone. Other requests are sent to the proxy with
their whole URL. Source: RFC 9110, section 9.3.6, and RFC 9112, section 3.2.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import unquote

from moec.manifests.errors import InputError

from .address import HTTPS, Address, parse_address

_FORM = re.compile(
    r"(?:http://)?(?:(?P<user>[^:/?#@]*)(?::(?P<password>[^/?#@]*))?@)?"
    r"(?P<host>[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])(?::(?P<port>[0-9]{1,5}))?/?"
)
_DEFAULT_PORT = 80
_MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Login:
    """User name and password of a host."""

    user: str
    password: str = field(repr=False)

    def header(self) -> str:
        """Return the header `Authorization` of basic authentication. Source: RFC 7617."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


@dataclass(frozen=True, slots=True)
class IdentityToken:
    """Text that a registry gave at login instead of a password. It only buys further tokens."""

    text: str = field(repr=False)


RegistryLogin = Login | IdentityToken


def _no_login(host: str) -> Login | None:
    return None


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials that the command line found. Object storage and the hub read their own settings.

    token: bearer token for http and https.
    login: takes a host with its port, returns user and password for http and https, or None.
    registry_login: the same for OCI, or an identity token.
    """

    token: str | None = field(default=None, repr=False)
    login: Callable[[str], Login | None] = _no_login
    registry_login: Callable[[str], RegistryLogin | None] = _no_login


def keeps_secrets(url: str) -> bool:
    """Return whether credentials may go to a URL: over TLS, or to this machine."""
    address = parse_address(url)
    return address.scheme == HTTPS or address.is_loopback


def web_authorization(address: Address, access: Access) -> str | None:
    """Return the header `Authorization` for an HTTP server, or None. A token comes before a login."""
    if not keeps_secrets(str(address)):
        return None
    if access.token is not None:
        return f"Bearer {access.token}"
    login = access.login(address.host)
    return None if login is None else login.header()


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
    form = _FORM.fullmatch(text.strip())
    port = int(form["port"] or _DEFAULT_PORT) if form else 0
    if form is None or not 0 < port <= _MAX_PORT:
        raise InputError(f"`{variable}` names no proxy of HTTP", f"write `{variable}=http://HOST:PORT`")
    login = None if form["user"] is None else Login(unquote(form["user"]), unquote(form["password"] or ""))
    return Proxy(form["host"].strip("[]"), port, None if login is None else login.header())
