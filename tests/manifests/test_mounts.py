"""The lines of `/proc/self/mountinfo`, as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.manifests.files.mounts import Mount, mount_of, mounts

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
