"""A store in a repository of the Hugging Face hub, by the package huggingface_hub. A bundle is one commit.

huggingface_hub reads the address of the hub and the token from its own settings (`HF_ENDPOINT`, `HF_TOKEN`, the login
of `hf auth login`). The hub finds equal contents by itself. Files are read by ranges as from any HTTP server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import disable_progress_bars

from moec.manifests.errors import InputError, StoreFailed

from .access import keeps_secrets
from .address import Address
from .http_client import HttpClient, HttpOptions
from .http_connection import shown_place
from .http_store import UrlFiles
from .interface import Sent, SourceFile

_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_FAILURES: tuple[type[Exception], ...] = (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)
"""What huggingface_hub raises: errors of its HTTP library, and of the native library that uploads."""
_T = TypeVar("_T")


class HubStore(UrlFiles):
    """Files of one model in a repository of kind `model`. Writing makes a private repository if there is none.

    One thread writes.
    """

    def __init__(
        self,
        address: Address,
        options: HttpOptions | None = None,
        *,
        for_writing: bool = False,
        endpoint: str | None = None,
    ) -> None:
        """endpoint: address of the hub; None: the setting of huggingface_hub, as for the token.

        A hub without TLS gets no token. Raises InputError if one would be needed, because the store is for writing.
        Raises StoreFailed if the repository cannot be made.
        """
        self.address = str(address)
        self._name, self._revision = f"{address.host}/{address.path}", address.revision or "main"
        self._endpoint = endpoint or constants.ENDPOINT
        token = get_token()
        if token is not None and not keeps_secrets(self._endpoint):
            token = None
            if for_writing:
                raise InputError(
                    f"the hub at `{shown_place(self._endpoint)}` has no TLS, so it gets no token",
                    "write HF_ENDPOINT with https",
                )
        self._hub = HfApi(endpoint=self._endpoint, token=token or False)
        # Both ask the hub: a redirect to another host gets no token.
        header = None if token is None else f"Bearer {token}"
        self._client = HttpClient(options, lambda url, challenge: header)
        self._files: dict[str, dict[str, RepoFile]] = {}
        self._added: dict[str, dict[str, CommitOperationAdd]] = {}
        if for_writing:
            disable_progress_bars()
            self._make_repository(address.revision)

    def note(self, path: str, size_bytes: int, sha256: str) -> None:
        """Do nothing. The hub finds equal contents by their digest."""

    def put(
        self, path: str, source: Path, size_bytes: int, sha256: str, sent: Sent | None = None, again: bool = False
    ) -> bool:
        """Upload the content of a file that the next commit adds. Raises StoreFailed, InputError.

        Returns True also where the hub finds that it has the content, because it does not tell.
        """
        folder = path.rpartition("/")[0]
        there = self._listed(folder).get(path)
        with SourceFile(source, size_bytes, sha256) as content:  # its kind and size are right
            if not again and there is not None and _has(there, content, sha256):
                return False
            added = CommitOperationAdd(path_in_repo=path, path_or_fileobj=source)
        if added.upload_info.size != size_bytes or added.upload_info.sha256.hex() != sha256:
            raise InputError(f"`{source}` has changed since the bundle was checked", "push again")
        self._ask(
            f"the upload of `{path}`",
            lambda: self._hub.preupload_lfs_files(self._name, [added], revision=self._revision, free_memory=False),
        )
        self._added.setdefault(folder, {})[path] = added
        if sent is not None:
            sent(size_bytes)
        return True

    def commit(self, folder: str) -> None:
        """Commit the files of a bundle. Raises StoreFailed, also if the repository's `.gitignore` leaves out a file."""
        added = self._added.pop(folder, {})
        if not added:
            return
        self._commit(list(added.values()), f"Add bundle {folder[:16]}")
        self._files.pop(folder, None)
        sizes = {path: item.size for path, item in self._listed(folder).items()}
        lost = next((path for path, file in added.items() if sizes.get(path) != file.upload_info.size), None)
        if lost is not None:
            raise StoreFailed(f"`{self.address}` has no `{lost}` after a commit", "remove `.gitignore` there")

    def replace(self, path: str, data: bytes) -> None:
        self._commit([CommitOperationAdd(path_in_repo=path, path_or_fileobj=data)], f"Write {path}")
        self._client.forget(self._url(path))

    def _url(self, path: str) -> str:
        return hf_hub_url(self._name, path, revision=self._revision, endpoint=self._endpoint)

    def _make_repository(self, branch: str | None) -> None:
        """Make the repository and its branch if they are missing. Raises StoreFailed."""
        self._ask("a new repository", lambda: self._hub.create_repo(self._name, private=True, exist_ok=True))
        if branch is not None:
            self._ask("a new branch", lambda: self._hub.create_branch(self._name, branch=branch, exist_ok=True))

    def _listed(self, folder: str) -> dict[str, RepoFile]:
        """Return the files in a folder of the last commit, by path. Raises StoreFailed."""

        def files() -> dict[str, RepoFile]:
            try:
                tree = self._hub.list_repo_tree(self._name, folder, revision=self._revision)
                return {item.path: item for item in tree if isinstance(item, RepoFile)}
            except EntryNotFoundError:
                return {}

        if folder not in self._files:
            self._files[folder] = self._ask("a list of files", files)
        return self._files[folder]

    def _commit(self, added: list[CommitOperationAdd], message: str) -> None:
        self._ask(
            "a commit",
            lambda: self._hub.create_commit(self._name, added, commit_message=message, revision=self._revision),
        )

    def _ask(self, what: str, call: Callable[[], _T]) -> _T:
        """Return the result of a request. Raises StoreFailed, without the message of the hub."""
        try:
            return call()
        except _FAILURES as error:
            status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        place = f"`{self.address}`"
        if status in (401, 403):
            raise StoreFailed(f"{place}: the hub refuses {what} with this token ({status})", _LOG_IN)
        if status is not None:
            raise StoreFailed(f"{place}: the hub answered {status} to the request for {what}", "try again later")
        raise StoreFailed(
            f"{place}: the hub does not answer the request for {what}", "check the network and HF_ENDPOINT"
        )


def _has(there: RepoFile, content: SourceFile, sha256: str) -> bool:
    """Return whether a file of the hub has the bytes of a file here. The hub tells digests of what it stores.

    A large file has its SHA-256, a small one that of git: SHA-1 of the header `blob SIZE`, a zero byte and the bytes.
    Source: git's documentation, gitformat-loose and the page "Git Objects" of the book Pro Git.
    Raises InputError.
    """
    if there.size != content.size_bytes:
        return False
    if there.lfs is not None:
        return bool(there.lfs.sha256 == sha256)
    digest = hashlib.sha1(f"blob {content.size_bytes}\0".encode(), usedforsecurity=False)
    for block in content.parts():
        digest.update(block)
    return bool(there.blob_id == digest.hexdigest())
