"""Open the store at an address. The package of each kind is loaded when an address asks for it."""

from __future__ import annotations

from pathlib import Path

from moec.manifests.errors import MissingDependency

from .access import Access
from .address import FILE, GS, HF, HTTP, HTTPS, OCI, S3, Address
from .file_store import FileStore
from .http_client import HttpOptions
from .http_store import HttpStore
from .interface import Store
from .oci_registry import Registry
from .oci_store import OciStore


def open_store(
    address: Address, access: Access, *, for_writing: bool = False, options: HttpOptions | None = None
) -> Store:
    """Return the store at an address. The caller closes it.

    access: credentials for http, https and oci.
    for_writing: whether files will be added; a folder may then be new, and so may a repository of the hub.
    options: patience of the clients.
    Raises InputError for a folder that is no store. Raises MissingDependency, StoreFailed.
    """
    if address.scheme == FILE:
        return FileStore(Path(address.path), for_writing=for_writing)
    if address.scheme in (HTTP, HTTPS):
        return HttpStore(address, access, options)
    if address.scheme == OCI:
        # As for docker: only a registry on this machine may do without TLS.
        base_url = f"{HTTP if address.is_loopback else HTTPS}://{address.host}"
        registry = Registry(base_url, address.path, access.registry_login(address.host), options)
        return OciStore(str(address), registry)
    try:
        if address.scheme in (S3, GS):
            from .object_store import ObjectStore

            return ObjectStore(address, options)
        if address.scheme == HF:
            from .hub_store import HubStore

            return HubStore(address, options, for_writing=for_writing)
        raise ValueError(f"no store for {address.scheme}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("obstore", "huggingface_hub"):
            raise
        raise MissingDependency(
            f"an address of {address.scheme} needs the package `{package}`, which is not installed",
            'pip install "moec[ship]"',
        ) from error
