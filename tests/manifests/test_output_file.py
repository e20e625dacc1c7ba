"""Files are replaced whole or not at all, links are followed, devices and pipes are written to; nothing is left."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from moec.manifests.errors import DoesNotFit, InputError, MoecError
from moec.manifests.files.implied_names import check_implied, write_implied
from moec.manifests.files.mounts import Mount, mount_of, mounts
from moec.manifests.files.output_file import (
    AtomicFile,
    FileSystem,
    check_folder,
    check_output,
    made_folders,
    output_file,
    temporary_path,
    write_output,
)

OLD, NEW = b"old content", b"new content, which is longer"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def mounted(mount: str, script: str, place: Path) -> str:
    """Return what a script prints after a mount, in a namespace of its own."""
    command = f'{mount} && exec "{sys.executable}" -c "$0" "{place}"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", command, script], capture_output=True, text=True, check=False)
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(done.stderr.strip())
    return done.stdout or done.stderr


def make_device(path: Path, minor: int) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        path.open("wb").close()
    except OSError as problem:
        pytest.skip(f"no device can be made here: {problem}")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


def test_a_new_file_and_its_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    check_output(path)
    assert names(tmp_path) == [], "the question leaves something behind"
    write_output(path, NEW)
    assert path.read_bytes() == NEW and names(path.parent) == ["file"]


def test_nothing_is_seen_before_the_end(old: Path) -> None:
    with output_file(old) as file:
        file.write(NEW)
        assert old.read_bytes() == OLD
    assert old.read_bytes() == NEW and names(old.parent) == ["file"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_producer_that_raises_leaves_what_was_there(tmp_path: Path, is_new: bool) -> None:
    path = tmp_path / "a" / "file"
    if not is_new:
        write_output(path, OLD)
    with pytest.raises(KeyError), output_file(path) as file:
        file.write(NEW)
        raise KeyError
    assert names(tmp_path) == ([] if is_new else ["a"])
    assert is_new or (path.read_bytes() == OLD and names(path.parent) == ["file"])


class FailingSystem(FileSystem):
    """Fails at the n-th operation, with the disk full."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at

    def _step(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open(self, path: Path) -> BinaryIO:
        self._step()
        return super().open(path)

    def write(self, file: BinaryIO, data: bytes | memoryview) -> None:
        file.write(memoryview(data)[:5])
        self._step()
        file.write(memoryview(data)[5:])

    def sync(self, file: BinaryIO) -> None:
        self._step()
        super().sync(file)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_every_operation_may_fail(old: Path, fail_at: int) -> None:
    system = FailingSystem(fail_at)
    with pytest.raises(OSError), AtomicFile(old, temporary_path(old), system) as file:
        file.write(NEW)
    assert system.left == 0 and old.read_bytes() == OLD and names(old.parent) == ["file"]


@as_root
def test_a_full_disk_is_a_sentence_and_the_old_content_stays(tmp_path: Path) -> None:
    """On a real file system of 64 KiB, in a namespace of its own."""
    script = (
        "import sys; from pathlib import Path\n"
        "from moec.manifests.files.output_file import output_file\n"
        "from moec.manifests.errors import DoesNotFit\n"
        "path = Path(sys.argv[1]) / 'file'; path.write_bytes(b'old')\n"
        "try:\n"
        "    with output_file(path) as file:\n"
        "        for _ in range(100): file.write(bytes(1 << 16))\n"
        "except DoesNotFit as problem: print(problem.message)\n"
        "print(path.read_bytes(), [each.name for each in path.parent.iterdir()])\n"
    )
    said = mounted(f'mount -t tmpfs -o size=64k none "{tmp_path}"', script, tmp_path)
    assert said == f"the disk of `{tmp_path}/file` is full\nb'old' ['file']\n"


def test_a_kill_leaves_the_old_content(old: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from moec.manifests.files.output_file import output_file\n"
        "with output_file(Path(sys.argv[1])) as file:\n"
        "    file.write(bytes(1 << 20)); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(old)], check=False)
    assert done.returncode == -signal.SIGKILL and old.read_bytes() == OLD
    write_output(old, NEW)
    assert old.read_bytes() == NEW


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_permissions_of_an_existing_file_are_kept(old: Path, mode: int) -> None:
    old.chmod(mode)
    write_output(old, NEW)
    assert stat.S_IMODE(old.stat().st_mode) == mode


@as_root
def test_the_owner_of_an_existing_file_is_kept(old: Path) -> None:
    os.chown(old, 1234, 2345)
    write_output(old, NEW)
    assert (old.stat().st_uid, old.stat().st_gid) == (1234, 2345)


def test_a_name_of_255_bytes_can_be_written(tmp_path: Path) -> None:
    for name in ("x" * 255, "é" * 127):
        path = tmp_path / name
        check_output(path)
        write_output(path, OLD)
        write_output(path, NEW)
        assert path.read_bytes() == NEW
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("kind", ["relative", "absolute", "two links", "dangling"])
def test_a_link_is_followed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if kind != "dangling":
        target.write_bytes(OLD)
    if kind == "two links":
        (tmp_path / "second").symlink_to("folder/target")
        link.symlink_to("second")
    else:
        link.symlink_to("folder/target" if kind == "relative" else target)
    check_output(link)
    write_output(link, NEW)
    assert link.is_symlink() and target.read_bytes() == NEW and names(target.parent) == ["target"]


def test_a_file_with_the_temporary_name_is_not_followed(tmp_path: Path, old: Path) -> None:
    left = tmp_path / "left"
    left.symlink_to(old)
    with AtomicFile(tmp_path / "target", left, FileSystem()) as file:
        file.write(NEW)
    assert old.read_bytes() == OLD and (tmp_path / "target").read_bytes() == NEW


@as_root
@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_device_is_written_to_and_stays(tmp_path: Path, through_a_link: bool) -> None:
    device = tmp_path / "null"
    make_device(device, 3)
    path = device
    if through_a_link:
        path = tmp_path / "link"
        path.symlink_to(device)
    before = device.stat()
    check_output(path)
    write_output(path, NEW)
    after = device.lstat()
    assert stat.S_ISCHR(after.st_mode) and (after.st_ino, after.st_rdev) == (before.st_ino, before.st_rdev)
    assert path.is_symlink() == through_a_link and not any(name.endswith(".writing") for name in names(tmp_path))


@as_root
def test_a_device_that_refuses_is_a_sentence(tmp_path: Path) -> None:
    device = tmp_path / "full"
    make_device(device, 7)
    with pytest.raises(DoesNotFit, match="full"):
        write_output(device, NEW)
    assert stat.S_ISCHR(device.lstat().st_mode)


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_output(pipe)
    read = list[bytes]()
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_output(pipe, NEW)
    reader.join()
    assert read == [NEW] and stat.S_ISFIFO(pipe.lstat().st_mode) and names(tmp_path) == ["pipe"]


def test_a_reader_that_leaves_is_a_broken_pipe(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with pytest.raises(BrokenPipeError):
        write_output(Path(f"/dev/fd/{theirs}"), NEW)
    os.close(theirs)


def test_a_socket_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket may have a hundred bytes alone
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
        for refuse in (check_output, lambda path: write_output(path, NEW)):
            with pytest.raises(InputError, match="socket"):
                refuse(Path("socket"))
        assert stat.S_ISSOCK(Path("socket").lstat().st_mode)


def test_an_own_descriptor_is_written_to(old: Path) -> None:
    """`/dev/stdout` after `> file` is written to: the file is not replaced, and its content stays."""
    with old.open("ab") as file:
        path = Path(f"/dev/fd/{file.fileno()}")
        inode = old.stat().st_ino
        check_output(path)
        write_output(path, NEW)
    assert old.read_bytes() == OLD + NEW and old.stat().st_ino == inode
    with old.open("rb") as file, pytest.raises(InputError, match="reading alone"):
        check_output(Path(f"/dev/fd/{file.fileno()}"))


def test_standard_output_has_a_name_and_is_written_to(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from moec.manifests.files.output_file import check_output, write_output\n"
        "path = Path(sys.argv[1]); check_output(path); print('first'); write_output(path, b'second\\n'); print('third')"
    )
    for name in ("-", "/dev/stdout", "/proc/self/fd/1"):
        into = tmp_path / "into"
        with into.open("wb") as file:
            subprocess.run([sys.executable, "-u", "-c", script, name], stdout=file, check=True, cwd=tmp_path)
        assert into.read_text() == "first\nsecond\nthird\n", name
        done = subprocess.run([sys.executable, "-u", "-c", script, name], capture_output=True, check=True, cwd=tmp_path)
        assert done.stdout == b"first\nsecond\nthird\n", name
    assert names(tmp_path) == ["into"]


REFUSED = {
    "": "folder",
    "/": "folder",
    "folder": "folder",
    "file/below": "Not a directory",
    "..": "folder",
    "missing/..": "of its own",
    "x" * 256: "may have 255 bytes|too long",
    "missing/" + "x" * 256: "may have 255 bytes|too long",
    "x" * 256 + "/file": "may have 255 bytes|too long",
    "d/" * 2500 + "file": "too long",
    "with\0zero": "null",
    "loop": "symbolic links",
    "gone/file": "link to nothing",
    "/proc/moec": "cannot be written",
    "/dev/fd/977": "cannot be written",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_bytes(OLD)
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nowhere")
    before = names(tmp_path)
    with pytest.raises(MoecError, match=REFUSED[name]) as caught:
        check_output(Path(name))
    assert "\n" not in caught.value.message and caught.value.hint
    assert names(tmp_path) == before and Path("file").read_bytes() == OLD


def test_a_lost_folder_is_refused(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from moec.manifests.errors import InputError\n"
        "from moec.manifests.files.output_file import check_output\n"
        "os.rmdir(os.getcwd())\n"
        "try: check_output(Path('file'))\n"
        "except InputError as problem: print(problem.message)\n"
    )
    lost = tmp_path / "lost"
    lost.mkdir()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=lost)
    assert done.stdout.startswith("`file` cannot be written: "), "the system's reason differs from kernel to kernel"


@as_root
def test_a_read_only_file_system_is_refused_before_the_work(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from moec.manifests.files.output_file import check_output\n"
        "from moec.manifests.errors import InputError\n"
        "for name in ('new', 'there', 'a/b'):\n"
        "    try: check_output(Path(sys.argv[1]) / name)\n"
        "    except InputError as problem: print(problem.message)\n"
    )
    mount = f'mount -t tmpfs none "{tmp_path}" && touch "{tmp_path}/there" && mount -o remount,ro "{tmp_path}"'
    expected = [f"`{tmp_path}/{name}` cannot be written: Read-only file system" for name in ("new", "there", "a/b")]
    assert mounted(mount, script, tmp_path).splitlines() == expected


@as_root
def test_a_mounted_file_is_refused_before_the_work(tmp_path: Path) -> None:
    """Containers mount single files; those can never be replaced."""
    script = (
        "import sys; from pathlib import Path; from moec.manifests.files.output_file import check_output\n"
        "from moec.manifests.errors import InputError\n"
        "try: check_output(Path(sys.argv[1]))\n"
        "except InputError as problem: print(problem.message)\n"
    )
    source, target = tmp_path / "source", tmp_path / "my target"
    source.touch()
    target.touch()
    said = mounted(f'mount --bind "{source}" "{target}"', script, target)
    assert said == f"`{target}` is a mount point, so it cannot be replaced\n"


def test_a_folder_is_checked_with_what_is_added_to_its_name(tmp_path: Path) -> None:
    check_folder(tmp_path / ("x" * 247), ".partial")
    with pytest.raises(InputError, match="255 bytes"):
        check_folder(tmp_path / ("x" * 248), ".partial")


def test_folders_that_stay_empty_are_taken_away_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError), made_folders(tmp_path / "a" / "b" / "file"):
        (tmp_path / "a" / "kept").touch()
        assert (tmp_path / "a" / "b").is_dir()
        raise KeyError
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["kept"]


MARK = re.compile(rb"\Aours ")


def test_a_new_file_and_one_with_the_mark_are_written(tmp_path: Path) -> None:
    for data in (b"ours 1", b"ours 2"):
        write_implied(tmp_path / "file", data, MARK)
        assert (tmp_path / "file").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.gate("G10")
@pytest.mark.parametrize("kind", ["file", "empty file", "link", "link to one of ours", "link to nothing", "folder"])
def test_what_somebody_else_made_stays(tmp_path: Path, kind: str) -> None:
    place, other = tmp_path / "file", tmp_path / "other"
    other.write_bytes(b"ours 1" if kind == "link to one of ours" else b"dear")
    if kind.startswith("link"):
        place.symlink_to(tmp_path / "nothing" if kind == "link to nothing" else other)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"" if kind == "empty file" else b"dear ours")
    before = other.read_bytes(), place.is_symlink()
    for work in (lambda: check_implied(place, MARK), lambda: write_implied(place, b"ours 2", MARK)):
        with pytest.raises(InputError, match="not replaced"):
            work()
    assert (other.read_bytes(), place.is_symlink()) == before and not (tmp_path / "nothing").exists()


LINES = {
    "optional fields": (
        b"30 1 8:1 / /a rw shared:1 master:2 - ext4 /dev/sda1 rw",
        Mount("/", "/a", "ext4", "/dev/sda1", "rw"),
    ),
    "escapes": (
        rb"30 1 8:1 /a\134b /a\040b rw - nfs host:/x\011y rw",
        Mount("/a\\b", "/a b", "nfs", "host:/x\ty", "rw"),
    ),
    "other white space": (
        "30 1 8:1 / /a\x85b\u2028c\u00a0 rw - ext4 x rw".encode(),
        Mount("/", "/a\x85b\u2028c\u00a0", "ext4", "x", "rw"),
    ),
    "not UTF-8": (b"30 1 8:1 / /\xff rw - ext4 x rw", Mount("/", "/\udcff", "ext4", "x", "rw")),
    "no source": (b"30 1 0:5 / /tmp rw - tmpfs  rw", Mount("/", "/tmp", "tmpfs", "", "rw")),
    "no options": (b"30 1 0:5 / /tmp rw - tmpfs x", Mount("/", "/tmp", "tmpfs", "x", "")),
    "no kind": (b"30 1 0:5 / /tmp rw", None),
}


def system_of(folder: Path, *lines: bytes) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/mountinfo").write_bytes(b"\n".join(lines) + b"\n")
    return folder


@pytest.mark.parametrize("name", LINES)
def test_a_line_of_the_kernel(name: str, tmp_path: Path) -> None:
    line, expected = LINES[name]
    assert mounts(system_of(tmp_path, b"odd", line)) == ([] if expected is None else [expected])


def test_the_mount_of_a_path_is_the_last_of_the_longest(tmp_path: Path) -> None:
    mount = "30 1 8:1 / {} rw - {} x rw".format
    lines = [mount("/a/b", "first"), mount("/a/b", "second"), mount("/a", "short"), mount("/a/bc", "other")]
    system = system_of(tmp_path, *map(str.encode, lines))
    assert mount_of(Path("/a/b/c"), system).kind == "second"
    assert mount_of(Path("/z"), system) == Mount("", "", "", "", "")
    assert mounts(tmp_path / "nowhere") == []
