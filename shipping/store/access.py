"""Credentials for stores. They go to the host that they are for, over TLS or to this machine, and into no message."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field

from .address import HTTPS, Address, parse_address


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
