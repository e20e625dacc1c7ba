"""Names in the folder of a device, and the links to the bundles that are used.

Source: docs/design/shipping.md, Layout on the device.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moec.manifests.bundle import PARTIAL_SUFFIX
from moec.manifests.errors import InputError, TryAgain
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.mounts import mount_of
from moec.manifests.files.output_file import FileSystem

CURRENT, PREVIOUS = "current", "previous"
STATE_NAME, LOCK_NAME = "state.json", "lock"
ID_CHARACTERS = 16
JOURNAL_SUFFIX = ".journal"
REMOVING_SUFFIX = ".removing"
_ID = re.compile(r"[0-9a-f]{16}")
_FOLDER = re.compile(rf"[0-9a-f]{{16}}(?:{re.escape(PARTIAL_SUFFIX)}|{re.escape(REMOVING_SUFFIX)})?")
_OWN_NAME = re.compile(
    r"\.?(?:[0-9a-f]{16}(?:\..*)?|current(?:\..*)?|previous(?:\..*)?|state\.json(?:\..*)?|lock|lost\+found)"
)


def is_own_name(name: str) -> bool:
    """Return whether a name in a device's folder is one that moec makes there."""
    return _OWN_NAME.fullmatch(name) is not None


def bundle_id(manifest_sha256: str) -> str:
    """Return the name of an installed bundle: the first digits of the digest of its `moec.json`."""
    return manifest_sha256[:ID_CHARACTERS]


@dataclass(frozen=True, slots=True)
class Places:
    """Paths in the folder of a device."""

    folder: Path

    def bundle(self, name: str) -> Path:
        return self.folder / name

    def partial(self, name: str) -> Path:
        """Return the folder of a bundle that is not complete."""
        return self.folder / f"{name}{PARTIAL_SUFFIX}"

    def journal(self, name: str) -> Path:
        """Return the list of finished ranges of a bundle that is not complete."""
        return self.folder / f"{name}{JOURNAL_SUFFIX}"

    def signature(self, name: str) -> Path:
        return self.folder / f"{name}.sig"

    def receipt(self, name: str) -> Path:
        """Return the list of checked files of a bundle."""
        return self.folder / f"{name}.receipt.json"

    def removing(self, name: str) -> Path:
        return self.folder / f"{name}{REMOVING_SUFFIX}"

    @property
    def state(self) -> Path:
        return self.folder / STATE_NAME

    @property
    def lock(self) -> Path:
        return self.folder / LOCK_NAME

    def ids(self) -> list[str]:
        """Return the names of installed bundles, in no order. Empty if there is no folder. Raises InputError."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [name for name in names if _ID.fullmatch(name) and is_implied_folder(self.bundle(name))]

    def linked(self, link: str) -> str | None:
        """Return the bundle that a link names; None if there is no such link, or no such bundle."""
        try:
            name = os.readlink(self.folder / link)
        except OSError:
            return None
        return name if _ID.fullmatch(name) and is_implied_folder(self.bundle(name)) else None

    @property
    def current(self) -> str | None:
        """Name of the bundle that is used."""
        return self.linked(CURRENT)

    @property
    def previous(self) -> str | None:
        """Name of the bundle that `rollback` returns to."""
        name = self.linked(PREVIOUS)
        return None if name == self.current else name


@contextmanager
def locked(places: Places) -> Iterator[None]:
    """Hold the lock of an existing folder. The system gives it back when the process ends in any way.

    Raises TryAgain if another process holds it, InputError if the disk has no locks. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(places.lock, flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TryAgain(
                f"another `moec pull` or `moec rollback` works in `{places.folder}`", "wait until it has ended"
            ) from error
        except OSError as error:  # a network disk without a lock service
            raise InputError(
                f"`{places.folder}` cannot be locked: {error.strerror}", "name a folder on another disk"
            ) from error
        yield
    finally:
        os.close(descriptor)


def set_link(places: Places, link: str, name: str, system: FileSystem) -> None:
    """Let a link name a bundle, by one rename. Raises OSError."""
    growing = places.folder / f".{link}.writing"
    with contextlib.suppress(FileNotFoundError):
        system.remove(growing)
    os.symlink(name, growing)
    try:
        system.rename(growing, places.folder / link)
    except BaseException:
        with contextlib.suppress(OSError):
            system.remove(growing)
        raise
    system.sync_directory(places.folder)


def check_links(places: Places, system: FileSystem) -> None:
    """Check that links can be made in the folder of a device, which exists. Nothing is left.

    Raises InputError with the file system if it has no links. Raises OSError.
    """
    growing = places.folder / f".{CURRENT}.writing"
    with contextlib.suppress(FileNotFoundError):
        system.remove(growing)
    try:
        os.symlink(CURRENT, growing)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        raise InputError(
            f"the file system of `{places.folder}` ({mount_of(places.folder.resolve()).kind}) has no symbolic links, "
            f"expected them for `{CURRENT}`",
            "name a folder on ext4 or another file system with links",
        ) from error
    system.remove(growing)


def remove_previous(places: Places, system: FileSystem) -> None:
    """Remove the link PREVIOUS if it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        system.remove(places.folder / PREVIOUS)
        system.sync_directory(places.folder)


def check_device_folder(folder: Path) -> None:
    """Raise InputError if a folder holds anything that is no part of a device's folder. It may be missing.

    A link that stands for a bundle is refused: what is removed or written there would be lost elsewhere.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"`{folder}` is no folder for bundles: {reason}", "name a folder") from error
    for link in (CURRENT, PREVIOUS):
        if link in names and not (folder / link).is_symlink():
            raise InputError(f"`{folder / link}` is no link that `moec pull` has made", "give it another name")
    for name in names:
        if _FOLDER.fullmatch(name):
            is_implied_folder(folder / name)
    foreign = [name for name in names if not is_own_name(name)]
    if foreign and STATE_NAME not in names:
        raise InputError(
            f"`{folder}` is no folder of installed bundles: it holds `{foreign[0][:80]}`", "name a folder of its own"
        )
