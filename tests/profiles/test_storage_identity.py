"""The identity of storage: what tells one disk from another, and what may change without another disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moec.profiles.probe import storage_sha256

SSD = {"device/model": "SSD 990", "device/serial": "S1", "queue/rotational": "0", "size": "1000"}
HDD = {"device/model": "HDD 7200", "device/serial": "H1", "queue/rotational": "1", "size": "9000"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "a bundle"
    folder.mkdir()
    return folder


class System:
    """A made-up /proc and /sys, where the given folder lies on what a test says."""

    def __init__(self, root: Path, place: Path) -> None:
        self.root, self.place = root, place

    def disk(self, name: str, facts: dict[str, str]) -> Path:
        """A disk's folder with these files; known by its name as well."""
        folder = self.root / "sys/devices/bus" / name
        for fact, text in facts.items():
            (folder / fact).parent.mkdir(parents=True, exist_ok=True)
            (folder / fact).write_text(text + " \n")
        self._link(self.root / "sys/class/block" / name, folder)
        return folder

    def partition(self, disk: Path, name: str) -> Path:
        folder = disk / name
        folder.mkdir()
        (folder / "partition").write_text("1\n")
        (folder / "size").write_text("77\n")
        self._link(self.root / "sys/class/block" / name, folder)
        return folder

    def mapped(self, name: str, uuid: str, *below: Path) -> Path:
        folder = self.disk(name, {"dm/uuid": uuid, "size": "500"})
        for each in below:
            self._link(folder / "slaves" / each.name, each)
        return folder

    def holds(self, block: Path) -> None:
        """The place's device number is that of a block device."""
        number = self.place.stat().st_dev
        self._link(self.root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}", block)

    def mounts(self, *lines: str) -> None:
        path = self.root / "proc/self/mountinfo"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines))

    def mount(self, point: Path, kind: str, source: str) -> str:
        name = str(point).replace(" ", r"\040")
        return rf"30 1 0:77 / {name} rw,relatime shared:1 - {kind} {source} rw"

    def sha256(self) -> str:
        return storage_sha256(self.place, self.root)

    def _link(self, link: Path, target: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))


@pytest.fixture
def system(tmp_path: Path, place: Path) -> System:
    return System(tmp_path / "system", place)


def test_this_machine_tells_one_identity(place: Path) -> None:
    (place / "file").write_text("")
    assert len({storage_sha256(place), storage_sha256(place), storage_sha256(place / "file")}) == 1


def test_every_fact_of_a_disk_counts(system: System) -> None:
    found, more = set(), ("device/wwid", "device/cid", "serial", "wwid", "loop/backing_file")
    every = [SSD, HDD, *({**SSD, name: "other"} for name in (*SSD, *more))]
    for number, facts in enumerate(every):
        system.holds(system.disk(f"sd{number}", facts))
        found.add(system.sha256())
    assert len(found) == len(every)


def test_the_name_of_a_disk_and_the_partition_do_not_count(system: System) -> None:
    disk = system.disk("sda", SSD)
    system.holds(disk)
    before = system.sha256()
    for block in (system.partition(disk, "sda1"), system.partition(system.disk("sdb", SSD), "sdb2")):
        system.holds(block)
        assert system.sha256() == before


def test_a_mapped_device_is_the_disks_below_it(system: System) -> None:
    ssd, hdd = system.disk("sda", SSD), system.disk("sdb", HDD)
    system.holds(ssd)
    plain = system.sha256()
    crypt = system.mapped("dm-0", "CRYPT-LUKS2-1", system.partition(ssd, "sda1"))
    system.holds(crypt)
    encrypted = system.sha256()
    system.holds(system.mapped("dm-1", "LVM-1", crypt))
    volume = system.sha256()
    array = system.mapped("md0", "", hdd)
    system.holds(array)
    single = system.sha256()
    (array / "md").mkdir()
    (array / "md/level").write_text("raid0\n")
    striped = system.sha256()
    system.holds(system.mapped("dm-2", "LVM-1", hdd))
    assert len({plain, encrypted, volume, single, striped, system.sha256()}) == 6


def test_disks_below_a_mapped_device_may_change_their_names(system: System) -> None:
    found = set()
    for number in range(8):
        disks = [system.disk(f"sd{number}{letter}", facts) for letter, facts in zip("xy", (SSD, HDD), strict=True)]
        system.holds(system.mapped(f"dm-{number}a", "LVM-9", *disks))
        found.add(system.sha256())
        disks = [system.disk(f"sd{number}{letter}", facts) for letter, facts in zip("zw", (SSD, HDD), strict=True)]
        system.holds(system.mapped(f"dm-{number}b", "LVM-9", *disks))
        found.add(system.sha256())
    assert len(found) == 1


def test_the_type_of_the_file_system_counts(system: System, place: Path) -> None:
    system.holds(system.disk("sda", SSD))
    found = set()
    for kind in ("ext4", "ntfs3"):
        system.mounts(system.mount(place.parent, kind, "/dev/sda1"))
        found.add(system.sha256())
    system.mounts(system.mount(place.parent, "ntfs3", "/dev/sdb1"))
    assert len(found | {system.sha256()}) == 2, "a disk that is told has no need of its name"


def test_a_file_system_with_device_numbers_of_its_own_is_found_by_its_source(system: System, place: Path) -> None:
    disk = system.disk("nvme0n1", SSD)
    system.mapped("dm-0", "CRYPT-LUKS2-1", disk)
    (system.root / "dev/mapper").mkdir(parents=True)
    (system.root / "dev/dm-0").write_text("")
    (system.root / "dev/mapper/home").symlink_to("../dm-0")
    found = set()
    for source in ("/dev/nvme0n1", "/dev/mapper/home", "/dev/dm-0", "/dev/absent"):
        system.mounts(system.mount(place, "btrfs", source))
        found.add(system.sha256())
    assert len(found) == 3
    system.mounts(system.mount(place, "btrfs", "/dev/mapper/home"))
    before = system.sha256()
    (disk / "device/serial").write_text("S2")
    assert system.sha256() != before


def test_where_no_disk_is_told_the_mount_is(system: System, place: Path) -> None:
    nothing = system.sha256()
    outer = system.mount(place.parent, "ext4", "/dev/root")
    inner = system.mount(place, "nfs4", r"host:/my\040models")
    system.mounts("", "odd line", outer, inner, system.mount(place.parent / "a", "tmpfs", "tmpfs"))
    found = system.sha256()
    system.mounts(inner, outer)
    assert system.sha256() == found, "the nearest mount holds it"
    system.mounts(system.mount(place, "tmpfs", "tmpfs"), inner)
    assert system.sha256() == found, "the last one at the same place is on top"
    system.mounts(outer, system.mount(place, "nfs4", "other:/models"))
    assert len({nothing, found, system.sha256()}) == 3


def test_a_link_is_where_it_leads(system: System, place: Path, tmp_path: Path) -> None:
    system.mounts(system.mount(place, "nfs4", "host:/models"))
    link = tmp_path / "link"
    link.symlink_to(place)
    assert storage_sha256(link, system.root) == system.sha256() != storage_sha256(tmp_path, system.root)


def test_a_disk_that_tells_nothing_leaves_it_to_the_mount(system: System, place: Path) -> None:
    found = set()
    system.holds(system.disk("sda", {"other": "1"}))
    for source in ("/dev/sda1", "/dev/sdb1"):
        system.mounts(system.mount(place, "ext4", source))
        found.add(system.sha256())
    assert len(found) == 2


def test_what_is_not_there_has_none(place: Path) -> None:
    with pytest.raises(OSError, match="absent"):
        storage_sha256(place / "absent")
