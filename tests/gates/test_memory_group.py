"""Control groups of both versions, on folders with the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gates.memory_group import MemoryGroup, parent_group

VERSION_1 = "3:cpu,cpuacct:/elsewhere\n2:memory:/of/mine\n0::/elsewhere\n"
VERSION_2 = "0::/user.slice/session/mine\n"


def system(folder: Path, own: str, controllers: dict[str, str]) -> Path:
    """Make the files of a system.

    own: content of /proc/self/cgroup.
    controllers: controllers that groups give their children.
    """
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(own)
    for group, names in controllers.items():
        path = folder / "sys/fs/cgroup" / group
        path.mkdir(parents=True)
        (path / "cgroup.subtree_control").write_text(names)
    return folder


def test_version_1_has_groups_inside_the_own_one(tmp_path: Path) -> None:
    root = system(tmp_path, VERSION_1, {"memory": ""}) / "sys/fs/cgroup/memory"
    assert parent_group(tmp_path) == MemoryGroup(root, is_version_2=False), "a container does not see its own name"
    (root / "of/mine").mkdir(parents=True)
    assert parent_group(tmp_path) == MemoryGroup(root / "of/mine", is_version_2=False)


def test_version_2_has_groups_where_children_have_the_controller(tmp_path: Path) -> None:
    """A group with processes gives its children no controller."""
    above = {"": "cpu memory\n", "user.slice": "cpu io memory\n", "user.slice/session": "cpu\n"}
    root = system(tmp_path, VERSION_2, {**above, "user.slice/session/mine": "\n"}) / "sys/fs/cgroup"
    assert parent_group(tmp_path) == MemoryGroup(root / "user.slice", is_version_2=True)
    for group in ("", "user.slice"):
        (root / group / "cgroup.subtree_control").write_text("cpu\n")
    with pytest.raises(OSError, match="no group gives its children the controller of memory"):
        parent_group(tmp_path)


@pytest.mark.parametrize(
    "is_version_2, limits, counts",
    [
        (
            False,
            {"memory.limit_in_bytes": "4096", "memory.swappiness": "0"},
            {"memory.failcnt": "3\n", "memory.oom_control": "under_oom 0\noom_kill 1\n"},
        ),
        (
            True,
            {"memory.max": "4096", "memory.swap.max": "0"},
            {"memory.events": "low 0\nhigh 9\nmax 3\noom 2\noom_kill 1\n"},
        ),
    ],
)
def test_limits_and_counts(tmp_path: Path, is_version_2: bool, limits: dict[str, str], counts: dict[str, str]) -> None:
    group = MemoryGroup(tmp_path, is_version_2)
    group.limit(4096)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == limits
    for name, content in counts.items():
        (tmp_path / name).write_text(content)
    assert (group.times_full(), group.kills()) == (3, 1)
