"""Files next to the output while a compile runs: the journal `NAME.work` and the unfinished bundle `NAME.partial`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, WORK_SUFFIX
from moec.manifests.errors import InputError, MoecError, OptionError, TargetUnreachable
from moec.manifests.files.implied_names import is_implied_folder
from moec.manifests.files.output_file import WRITING_SUFFIX

from .durable import Disk
from .journal import Journal, Note


def certified_stage(device: str) -> str:
    """Return the last stage in the journal: the digest of the manifest that will be published for a device."""
    return f"certified-{device}"


def work_folder(output: Path) -> Path:
    """Return the folder of the journal for this output."""
    return output.with_name(output.name + WORK_SUFFIX)


def check_partial(partial: Path) -> None:
    """Raise OptionError if `NAME.partial` exists and is not the remains of an unfinished compile."""
    if not os.path.lexists(partial):
        return
    names = {item.name.removesuffix(WRITING_SUFFIX) for item in partial.iterdir()} if partial.is_dir() else {""}
    is_ours = not names or not names.isdisjoint((DENSE_NAME, MANIFEST_NAME))
    if partial.is_symlink() or not is_ours or any(item.is_dir() for item in partial.iterdir()):
        raise OptionError(
            f"`{partial}` is in the way and was not left by a compile", "move it, or choose another `--output`"
        )


@contextlib.contextmanager
def work_journal(
    folder: Path, identity: str, disk: Disk, resume: bool, note: Note, last: str, is_kept: bool = False
) -> Iterator[Journal]:
    """Open a journal. It is kept only if the run was interrupted and can be resumed.

    If the input is refused, a resumed run would be refused too, so the journal is removed.
    identity: digest of everything that measurements depend on.
    last: stage whose result is removed last.
    is_kept: keep the journal for another compile, also if this one is refused.
    note: called with sentences about resumed stages and damaged results.
    Raises the errors of Journal.
    """
    opened = Journal if resume else Journal.fresh
    journal = opened(folder, identity, disk, note)
    if resume:
        note(_taken_up(journal, folder))
    try:
        yield journal
    except (MoecError, OSError) as error:
        is_useless = not is_kept and isinstance(error, (InputError, TargetUnreachable))
        if is_useless or not any(folder.iterdir()):
            forget(journal, last)
        raise
    if not is_kept:
        forget(journal, last)


@contextlib.contextmanager
def planning_journal(output: Path, identity: str, resume: bool, note: Note) -> Iterator[Journal]:
    """Open the journal of a run that writes nothing: a temporary one, or with `resume` that of an interrupted run."""
    if resume and is_implied_folder(work_folder(output)):
        journal = Journal(work_folder(output), identity, Disk(), note)
        note(_taken_up(journal, work_folder(output)))
        yield journal
        return
    if resume:
        note(_nothing_there(work_folder(output)))
    with tempfile.TemporaryDirectory(prefix="moec-plan-") as folder:
        yield Journal(Path(folder), identity, Disk())


def _taken_up(journal: Journal, folder: Path) -> str:
    """Return a sentence about the stages that a resumed compile does not repeat."""
    kinds = Counter(stage.partition("-")[0] for stage in journal.finished())
    if not kinds:
        return _nothing_there(folder)
    listed = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())
    return f"taking up {kinds.total()} finished stages from `{folder}`: {listed}"


def _nothing_there(folder: Path) -> str:
    return f"`{folder}` holds no finished stage of these inputs and options, by this version: the compile starts anew"


@contextlib.contextmanager
def removed_on_failure(disk: Disk, partial: Path) -> Iterator[None]:
    """Remove the unfinished bundle after an error; a resumed run writes it again. Errors of the disk are ignored."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove_tree(partial)
        raise


def forget(journal: Journal, last: str) -> None:
    """Remove the journal. The stage `last` goes last. A leftover is no failure; the next compile removes it."""
    with contextlib.suppress(MoecError):
        journal.remove(last)
