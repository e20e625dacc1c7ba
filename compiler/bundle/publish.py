"""Publish a bundle: give the finished folder its final name. It may replace an earlier bundle."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from moec.manifests.bundle import MANIFEST_NAME
from moec.manifests.errors import OptionError

from ..workspace.durable import Disk, disk_errors

ASIDE_SUFFIX = ".moec-replaced"


def check_replaceable(final: Path, overwrite: bool) -> None:
    """Check before any work whether a bundle may take the name `final`.

    overwrite: permits replacing an empty folder or an earlier bundle, but never a link, a file or another folder.
    Raises OptionError.
    """
    if not os.path.lexists(final):
        return
    if not overwrite:
        raise OptionError(f"`{final}` exists", "choose another output or add `--overwrite`")
    is_folder = final.is_dir() and not final.is_symlink()
    if not is_folder or not ((final / MANIFEST_NAME).is_file() or not any(final.iterdir())):
        raise OptionError(f"`{final}` is not a bundle, so it is not overwritten", "choose another output or remove it")


def publish_directory(disk: Disk, partial: Path, final: Path, overwrite: bool = False) -> None:
    """Give a finished folder its final name. An existing folder is first moved aside, and restored if the rename fails.

    All content is synced before. A crash leaves the old folder, the new one, or the old one aside. `recover_replaced`
    restores it.
    Raises OptionError (see check_replaceable), DoesNotFit or MoecError.
    """
    check_replaceable(final, overwrite)
    aside = _aside(final)
    with disk_errors(final):
        # Sync every file below a folder, then the folders, innermost first.
        for root, _, names in os.walk(partial, topdown=False):
            for name in sorted(names):
                disk.sync_file(Path(root, name))
            disk.sync_directory(Path(root))
        if final.exists():
            disk.remove_tree(aside)
            disk.rename(final, aside)
        try:
            disk.rename(partial, final)
        except BaseException:
            # If this fails too, the old folder stays aside, and recover_replaced finds it.
            with contextlib.suppress(OSError):
                if aside.exists() and not final.exists():
                    disk.rename(aside, final)
            raise
        disk.sync_directory(final.parent)
    # The new folder is in place. A leftover old folder is no failure; the next compile removes it.
    with contextlib.suppress(OSError):
        disk.remove_tree(aside)


def recover_replaced(disk: Disk, final: Path) -> None:
    """Restore an old folder after a crash between the renames of `publish_directory`. Raises DoesNotFit, MoecError."""
    aside = _aside(final)
    if not aside.exists():
        return
    with disk_errors(final):
        if final.exists():
            disk.remove_tree(aside)
        else:
            disk.rename(aside, final)
            disk.sync_directory(final.parent)


def _aside(final: Path) -> Path:
    return final.with_name(final.name + ASIDE_SUFFIX)
