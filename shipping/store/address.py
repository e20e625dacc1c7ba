"""Addresses of stores: what a user writes as DEST of `push` and SOURCE of `pull`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from moec.manifests.errors import InputError

FILE, HTTP, HTTPS, S3, GS, HF, OCI = "file", "http", "https", "s3", "gs", "hf", "oci"
_FORMS = {
    FILE: "file:DIR",
    HTTP: "http://HOST/PATH",
    HTTPS: "https://HOST/PATH",
    S3: "s3://BUCKET/PREFIX",
    GS: "gs://BUCKET/PREFIX",
    HF: "hf://OWNER/NAME[@REVISION]",
    OCI: "oci://HOST/REPOSITORY",
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", re.DOTALL)
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PART = re.compile(r"[A-Za-z0-9._~!$'()*+,;=:@%-]+")
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*")
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]{1,5})?")
_MAX_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class Address:
    """The place of one model on a store.

    scheme: one of the constants above.
    host: host and port of http, https and oci; bucket of s3 and gs; owner of hf; empty for file.
    path: folder of file; path of http and https; prefix of s3 and gs; name of hf; repository of oci.
    revision: branch, tag or commit of hf; None elsewhere, and for the default branch.
    """

    scheme: str
    host: str
    path: str
    revision: str | None = None

    def __str__(self) -> str:
        if self.scheme == FILE:
            return self.path
        place = f"{self.scheme}://{self.host}"
        at = "" if self.revision is None else f"@{self.revision}"
        return f"{place}/{self.path}{at}" if self.path else place

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether a host, with or without its port, is this machine."""
    return _LOOPBACK.fullmatch(host) is not None


def parse_address(text: str) -> Address:
    """Return the address that a user wrote. A text without a scheme is a folder.

    A name with a colon before the first slash, such as `host:folder`, is refused: `./host:folder` is a folder.
    Raises InputError. Its message never shows credentials.
    """
    match = _SCHEME.fullmatch(text)
    if match is None:
        return _folder(text)
    scheme, rest = match[1].lower(), match[2]
    if scheme not in _FORMS:
        raise InputError(
            f"`{match[1][:40]}:` is no kind of store, expected {', '.join(_FORMS.values())} or a folder",
            "a folder whose name has a colon is written with `./` before it",
        )
    if scheme == FILE:
        return _folder(_without_host(rest))
    if not rest.startswith("//"):
        raise _malformed(scheme, "it has no `//` after the scheme")
    return _of_service(scheme, rest.removeprefix("//"))


def _of_service(scheme: str, rest: str) -> Address:
    if len(rest) > _MAX_CHARACTERS:
        raise _malformed(scheme, f"it has more than {_MAX_CHARACTERS} characters")
    host, _, path = rest.partition("/")
    if "@" in host:  # nothing of it is shown
        raise InputError(
            f"an address of {scheme} holds credentials",
            "leave them out; the page `Shipping`, Stores, says where each kind of store takes them from",
        )
    if "?" in rest or "#" in rest:
        raise _malformed(scheme, "it has a query or a fragment, which may hold credentials")
    return _READERS[scheme](scheme, host, path.rstrip("/"))


def _without_host(rest: str) -> str:
    """Return the folder of `file:DIR` and `file:///DIR`. Raises InputError for a URL with a host."""
    if not rest.startswith("//"):
        return rest
    host, slash, path = rest.removeprefix("//").partition("/")
    if host not in ("", "localhost") or not slash:
        raise _malformed(FILE, "it names a host")
    return f"/{path}"


def _folder(text: str) -> Address:
    if not text or "\0" in text:
        raise InputError("the address of a store is empty or has a zero byte", f"write {_FORMS[FILE]} or a folder")
    return Address(FILE, "", text)


def _of_web(scheme: str, host: str, path: str) -> Address:
    parts = path.split("/") if path else []
    if not _HOST.fullmatch(host):
        raise _malformed(scheme, f"`{host[:80]}` is no host")
    if any(segment in (".", "..") or not _PART.fullmatch(segment) for segment in parts):
        raise _malformed(scheme, f"`{path[:80]}` is no path of a URL")
    return Address(scheme, host, path)


def _of_bucket(scheme: str, host: str, path: str) -> Address:
    if not _BUCKET.fullmatch(host):
        raise _malformed(scheme, f"`{host[:80]}` is no name of a bucket")
    parts = path.split("/") if path else []
    if any(segment in ("", ".", "..") or not segment.isprintable() for segment in parts):
        raise _malformed(scheme, f"`{path[:80]!r}` is no prefix")
    return Address(scheme, host, path)


def _of_hub(scheme: str, host: str, path: str) -> Address:
    name, at, revision = path.partition("@")
    if not (_HUB_NAME.fullmatch(host) and _HUB_NAME.fullmatch(name)):
        raise _malformed(scheme, f"`{host[:80]}/{name[:80]}` is no owner and name")
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise _malformed(scheme, f"`{revision[:80]}` is no revision")
    return Address(scheme, host, name, revision if at else None)


def _of_registry(scheme: str, host: str, path: str) -> Address:
    if not _HOST.fullmatch(host):
        raise _malformed(scheme, f"`{host[:80]}` is no host")
    if not _REPOSITORY.fullmatch(path):
        raise _malformed(scheme, f"`{path[:80]}` is no repository; it has lower-case letters, and no tag")
    return Address(scheme, host, path)


_READERS: dict[str, Callable[[str, str, str], Address]] = {
    HTTP: _of_web,
    HTTPS: _of_web,
    S3: _of_bucket,
    GS: _of_bucket,
    HF: _of_hub,
    OCI: _of_registry,
}


def _malformed(scheme: str, why: str) -> InputError:
    return InputError(f"an address of {scheme} is malformed: {why}", f"write it as {_FORMS[scheme]}")
