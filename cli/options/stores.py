"""Stores that a user names by an address, credentials for them (variables, netrc, docker's config.json), and proxies.

Object storage and the Hugging Face hub read their own variables and files.
"""

from __future__ import annotations

import base64
import binascii
import json
import netrc
import os
import re
import subprocess
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING

from moec.manifests.errors import InputError

if TYPE_CHECKING:
    from moec.shipping.store.access import Access, Login, Proxy, RegistryLogin
    from moec.shipping.store.interface import Store

TOKEN_VARIABLE = "MOEC_STORE_TOKEN"
IDENTITY_USER = "<token>"
"""What docker's helpers give as user name of an identity token."""
_MAX_CONFIG_BYTES = 1 << 20
_HELPER_S = 60
_HELPER = re.compile(r"[A-Za-z0-9._-]{1,64}")
_REPAIR = "repair the file"


def opened_store(address: str, *, for_writing: bool = False) -> AbstractContextManager[Store]:
    """Open the store at an address. The end of the `with` block closes it.

    Raises InputError, MissingDependency, StoreFailed.
    """
    from moec.shipping.store.address import parse_address
    from moec.shipping.store.http_client import HttpOptions
    from moec.shipping.store.open_store import open_store

    options = HttpOptions(proxy_for=proxy_for)
    return closing(open_store(parse_address(address), store_access(), for_writing=for_writing, options=options))


def store_access() -> Access:
    """Return the credentials of this user. Files are read when a store asks for them."""
    from moec.shipping.store.access import Access

    return Access(os.environ.get(TOKEN_VARIABLE) or None, netrc_login, docker_login)


def proxy_for(scheme: str, host: str) -> Proxy | None:
    """Return the proxy that HTTP_PROXY or HTTPS_PROXY names, unless NO_PROXY has the host. Lower-case names come first.

    scheme: http or https.
    host: with its port.
    Raises InputError.
    """
    from urllib.request import getproxies_environment

    from moec.shipping.store.access import parse_proxy

    proxies = getproxies_environment()
    if not proxies.get(scheme) or _is_listed(host, proxies.get("no", "")):
        return None
    return parse_proxy(proxies[scheme], f"{scheme.upper()}_PROXY")


def _is_listed(host: str, names: str) -> bool:
    """Return whether NO_PROXY has a host, with or without the port, or a domain above it, or `*`."""
    with_port = host.lower()
    name = re.sub(r":[0-9]+$", "", with_port).strip("[]")
    for listed in names.lower().split(","):
        entry = listed.strip().removeprefix(".")
        if entry in ("*", with_port, name) or (entry and name.endswith(f".{entry}")):
            return True
    return False


def netrc_login(host: str) -> Login | None:
    """Return user and password of a host from the file that NETRC names, or ~/.netrc. The entry `default` is left out.

    host: with its port; an entry without the port serves too.
    Raises InputError for a file that cannot be read.
    """
    from moec.shipping.store.access import Login

    path = _settings_file(os.environ.get("NETRC"), ".netrc")
    if path is None:
        return None
    try:
        hosts = netrc.netrc(str(path)).hosts
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is no netrc file"
        raise InputError(f"`{path}` cannot be read: {reason}", _REPAIR) from None
    name = re.sub(r":[0-9]+$", "", host)
    entry = hosts.get(host) or hosts.get(name) or hosts.get(name.strip("[]"))
    return None if entry is None or entry[2] is None else Login(entry[0], entry[2])


def _settings_file(named: str | None, name_at_home: str) -> Path | None:
    """Return a file of settings, or None without one. A home that is unknown or cannot be read has none.

    named: the file that a variable names; None: the one in the home of the user.
    """
    if named:
        return Path(named) if os.path.lexists(named) else None
    try:
        path = Path.home() / name_at_home
    except RuntimeError:  # the system knows no user of this number
        return None
    return path if os.access(path, os.R_OK) else None


def docker_login(host: str) -> RegistryLogin | None:
    """Return user and password of a registry, or its identity token, from docker's config.json or the helper it names.

    Raises InputError.
    """
    from moec.shipping.store.access import IdentityToken, Login

    folder = os.environ.get("DOCKER_CONFIG")
    path = _settings_file(folder and os.path.join(folder, "config.json"), ".docker/config.json")
    if path is None:
        return None
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("too large")
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("no object")
    except (OSError, ValueError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is no settings file of docker"
        raise InputError(f"`{path}` cannot be read: {reason}", _REPAIR) from None
    helpers, helper, logins = config.get("credHelpers"), config.get("credsStore"), config.get("auths")
    if isinstance(helpers, dict) and host in helpers:
        helper = helpers[host]
    # The key of an entry is a host or a URL.
    by_host = logins.items() if isinstance(logins, dict) else ()
    entries = [entry for key, entry in by_host if re.sub(r"^https?://", "", key).partition("/")[0] == host]
    entry = entries[0] if entries and isinstance(entries[0], dict) else {}
    if isinstance(entry.get("identitytoken"), str) and entry["identitytoken"]:
        return IdentityToken(entry["identitytoken"])
    if not entry.get("auth"):
        return None if not isinstance(helper, str) else _ask_helper(helper, host)
    try:
        user, colon, password = base64.b64decode(entry["auth"], validate=True).decode().partition(":")
    except (TypeError, binascii.Error, UnicodeDecodeError):
        user = colon = password = ""
    if not colon:
        raise InputError(f"`{path}`: the entry `{host}` holds no user and password", f"run `docker login {host}`")
    return Login(user, password)


def _ask_helper(name: str, host: str) -> RegistryLogin | None:
    """Return what a credential helper of docker has for a registry, or None."""
    from moec.shipping.store.access import IdentityToken, Login

    program = f"docker-credential-{name}"
    if not _HELPER.fullmatch(name):
        raise InputError(f"`{name[:40]}` is no name of a credential helper", "repair docker's config.json")
    try:
        done = subprocess.run(
            [program, "get"], input=host.encode(), capture_output=True, timeout=_HELPER_S, check=False
        )
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
        user, secret = answer.get("Username"), answer.get("Secret")
    except (OSError, subprocess.TimeoutExpired, ValueError, AttributeError):
        raise InputError(f"the credential helper `{program}` does not work", f"run `docker login {host}`") from None
    if not isinstance(user, str) or not isinstance(secret, str):
        return None
    return IdentityToken(secret) if user == IDENTITY_USER else Login(user, secret)
