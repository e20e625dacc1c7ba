"""What lies beside the output while a compile runs: the journal in `NAME.work`, the unfinished bundle in `.partial`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME
from moec.manifests.errors import InputError, MoecError, OptionError, TargetUnreachable
from moec.manifests.files.output_file import WRITING_SUFFIX

from .durable import Disk
from .journal import Journal, Note

WORK_SUFFIX = ".work"
CERTIFIED = "certified"
"""The journal's last stage: the digest of the manifest that is about to be published."""


def work_folder(output: Path) -> Path:
    """Where the journal of this output lies."""
    return output.with_name(output.name + WORK_SUFFIX)


def check_partial(partial: Path) -> None:
    """Refuse to replace what stands at `NAME.partial` unless an unfinished compile left it. Raises OptionError."""
    if not os.path.lexists(partial):
        return
    names = {item.name.removesuffix(WRITING_SUFFIX) for item in partial.iterdir()} if partial.is_dir() else {""}
    is_ours = not names or not names.isdisjoint((DENSE_NAME, MANIFEST_NAME))
    if partial.is_symlink() or not is_ours or any(item.is_dir() for item in partial.iterdir()):
        raise OptionError(
            f"`{partial}` is in the way and was not left by a compile", "move it, or choose another `--output`"
        )


@contextlib.contextmanager
def work_journal(output: Path, identity: str, disk: Disk, resume: bool, note: Note) -> Iterator[Journal]:
    """The journal beside the output. It outlives only a run that was cut off and can be taken up again.

    note: told what is taken up, and of damaged results.
    What is refused for its input is refused again, so nothing of it is kept. Raises as Journal does.
    """
    opened = Journal if resume else Journal.fresh
    journal = opened(work_folder(output), identity, disk, note)
    if resume:
        note(_taken_up(journal, work_folder(output)))
    try:
        yield journal
    except (MoecError, OSError) as error:
        if isinstance(error, (InputError, TargetUnreachable)) or not any(work_folder(output).iterdir()):
            forget(journal)
        raise
    forget(journal)


@contextlib.contextmanager
def planning_journal(output: Path, identity: str, resume: bool, note: Note) -> Iterator[Journal]:
    """The journal of a run that writes nothing: one in passing, or with `resume` what an interrupted run left."""
    if resume and work_folder(output).is_dir():
        journal = Journal(work_folder(output), identity, Disk(), note)
        note(_taken_up(journal, work_folder(output)))
        yield journal
        return
    if resume:
        note(_nothing_there(work_folder(output)))
    with tempfile.TemporaryDirectory(prefix="moec-plan-") as folder:
        yield Journal(Path(folder), identity, Disk())


def _taken_up(journal: Journal, folder: Path) -> str:
    """What a resumed compile does not do again, in one sentence."""
    kinds = Counter(stage.partition("-")[0] for stage in journal.finished())
    if not kinds:
        return _nothing_there(folder)
    listed = ", ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())
    return f"taking up {kinds.total()} finished stages from `{folder}`: {listed}"


def _nothing_there(folder: Path) -> str:
    return f"`{folder}` holds no finished stage of these inputs and options: the compile starts anew"


@contextlib.contextmanager
def removed_on_failure(disk: Disk, partial: Path) -> Iterator[None]:
    """Leave no unfinished bundle behind: a resumed run writes it anew. A disk that refuses even that is let be."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove_tree(partial)
        raise


def forget(journal: Journal) -> None:
    """Remove the journal, the note of a complete bundle last. A leftover is no failure: the next compile removes it."""
    with contextlib.suppress(MoecError):
        journal.remove(CERTIFIED)
