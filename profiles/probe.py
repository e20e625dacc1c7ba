"""The present machine: its `host` profile, its difference from another profile, and the identity of its storage.

The profile is measured in less than two seconds. Nothing is cached or left on disk. The others measure nothing.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moec.manifests.errors import ProfileError
from moec.manifests.files.mounts import mount_of

from .control_group import group_free_memory, group_memory_limits, processor_quota
from .device import HOST_NAME, MEASURED, DeviceProfile, processor_family
from .processor import core_kinds, instruction_sets, physical_cores, read_text

REQUEST_BYTES = 2 << 20
READERS = 2
"""Large reads in progress at once, into huge pages, as in the runtime. Virtual disks are half as fast otherwise."""
PROBE_FILE_BYTES = 32 << 20
MAX_COPY_BYTES = 128 << 20  # a compile probes within its `--memory`; half of a GiB was no slower with 480 MiB of L3
MIN_COPY_BYTES = 32 << 20
MIN_SAMPLE_BYTES = 8 << 20
WRITE_LIMIT_S = 0.5
READ_LIMIT_S = 0.4
LATENCY_LIMIT_S = 0.2
COPY_LIMIT_S = 0.3
LATENCY_READS = 64
DEFAULT_BLOCK_BYTES = 4096
_SYSTEM = Path("/")
_HUGE_PAGE_BYTES = 2 << 20
# Files of a block device in /sys that identify it; each driver has some of them. Names and numbers of devices are left
# out, because both may change with a restart.
_DISK_FACTS = (
    "device/model",
    "device/serial",
    "device/wwid",
    "device/cid",
    "serial",
    "wwid",
    "queue/rotational",
    "size",
    "loop/backing_file",
)
# Files of a device that is made of other devices: encryption, volumes, arrays.
_MAPPING_FACTS = ("dm/uuid", "md/level")


@dataclass(frozen=True, slots=True)
class StorageFigures:
    """Measured rate of a file system.

    request_bytes: size of each large read.
    is_direct: whether reads bypass the page cache.
    """

    request_bytes: int
    bytes_per_s: int
    latency_ns: int
    block_bytes: int
    is_direct: bool


def probe_host(
    storage: Path, system: Path = _SYSTEM, request_bytes: int = REQUEST_BYTES, least_bytes: int = MIN_SAMPLE_BYTES
) -> DeviceProfile:
    """Measure this machine.

    storage: a file of 8 MiB or more to read, or a folder for a temporary file.
    system: root folder of /proc and /sys.
    request_bytes, least_bytes: as in `measure_storage`.
    Raises ProfileError if the storage cannot be measured.
    """
    limit = memory_limit_bytes(system)
    cache = last_level_cache_bytes(system)
    copy_bytes = min(MAX_COPY_BYTES, max(2 * cache, MIN_COPY_BYTES), max(limit // 16, 1 << 20))
    figures = measure_storage(storage, request_bytes, least_bytes)
    way = "direct reads" if figures.is_direct else "buffered reads after dropping the page cache"
    kinds = core_kinds(allowed_processors(), system)
    cores, source = (None, "") if kinds is None else kinds
    return DeviceProfile(
        name=HOST_NAME,
        memory_budget_bytes=limit * 7 // 8,
        memory_bytes_per_s=measure_memory(copy_bytes),
        storage_bytes_per_s=figures.bytes_per_s,
        storage_latency_ns=figures.latency_ns,
        storage_block_bytes=figures.block_bytes,
        threads=len(allowed_processors()),
        instruction_sets=instruction_sets(system),
        provenance={
            "memory_budget_bytes": f"{MEASURED}7/8 of the least of physical memory and the control group's limit",
            "memory_bytes_per_s": f"{MEASURED}copy of {copy_bytes} bytes by one thread, read and written bytes counted",
            "storage_bytes_per_s": f"{MEASURED}{READERS} {way} at a time of {figures.request_bytes} bytes",
            "storage_latency_ns": f"{MEASURED}median of {way} of {figures.block_bytes} bytes at random places",
            "storage_block_bytes": f"{MEASURED}fragment size of the file system",
            "threads": f"{MEASURED}processors this process may use",
            "instruction_sets": f"{MEASURED}features in /proc/cpuinfo",
            **{f"cores.{key}": f"{MEASURED}{source} of the system" for key in (cores.stated() if cores else ())},
        },
        is_probed=True,
        cores=cores,
    )


def resident_set_bytes() -> int:
    """Return the resident bytes of this process now; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def memory_limit_bytes(system: Path = _SYSTEM) -> int:
    """Return the least of physical memory and every control-group limit above this process, bytes.

    These are totals, not free memory, so that the result is the same each time. Raises ProfileError without a total.
    """
    limits = []
    for line in read_text(system / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    limits += group_memory_limits(system)
    if not limits:
        raise ProfileError(f"`{system / 'proc/meminfo'}` does not tell how much memory there is", "name a profile")
    return min(limits)


def available_memory_bytes(system: Path = _SYSTEM) -> int:
    """Return the memory that is free: the least of MemAvailable and what every control group above this process leaves.

    Raises ProfileError as `memory_limit_bytes`.
    """
    used = resident_set_bytes()
    free = [memory_limit_bytes(system) - used, *group_free_memory(system, used)]
    for line in read_text(system / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    return max(0, min(free))


def last_level_cache_bytes(system: Path = _SYSTEM) -> int:
    """Return the size of the largest processor cache; 0 if the system does not report it."""
    sizes = [0]
    for path in sorted((system / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        text = read_text(path).strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdigit():
            sizes.append(int(digits) * unit)
    return max(sizes)


def machine_sha256(system: Path = _SYSTEM) -> str:
    """Return a digest that identifies this machine: processor, memory, number of processors, instruction sets.

    Nothing is measured, so it is cheap enough for every start. A quota of processor time does not change it.
    """
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in read_text(system / "proc/cpuinfo").splitlines()
            if line.startswith(("model name", "CPU part", "Hardware"))
        ),
        "",
    )
    processors = len(allowed_processors())
    facts = [processor, memory_limit_bytes(system), processors, *instruction_sets(system)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def available_threads(system: Path = _SYSTEM) -> int:
    """Return the number of threads that this process can keep busy: its processors, or fewer under a quota.

    A part of a processor is left to threads that read.
    """
    return int(max(1, min(len(allowed_processors()), processor_quota(system))))


def allowed_processors() -> set[int]:
    """Return the numbers of the processors that this process may use; all of them where the system does not tell."""
    with suppress(AttributeError, OSError):  # macOS; a sandbox that refuses the call
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def measure_memory(copy_bytes: int) -> int:
    """Return the bytes per second of copying `copy_bytes`: the best of several copies, read and written bytes
    counted.
    """
    # Filled with values, so that every page has its own memory: a fresh zero buffer may be one shared page.
    source, target = bytearray(b"\x5a") * copy_bytes, bytearray(b"\xa5") * copy_bytes
    view = memoryview(target)
    best_ns, deadline = 0, time.perf_counter() + COPY_LIMIT_S
    while best_ns == 0 or time.perf_counter() < deadline:
        start = time.perf_counter_ns()
        view[:] = source
        elapsed = max(1, time.perf_counter_ns() - start)
        best_ns = min(best_ns or elapsed, elapsed)
    return max(1, 2 * copy_bytes * 10**9 // best_ns)


def measure_storage(
    place: Path, request_bytes: int = REQUEST_BYTES, least_bytes: int = MIN_SAMPLE_BYTES
) -> StorageFigures:
    """Measure read bandwidth and latency of the file system that holds `place`. Raises ProfileError.

    request_bytes: size of each large read, rounded up to blocks, at most a quarter of the file.
    least_bytes: size from which a file is read itself. In place of a smaller one, a file is made next to it.
    """
    try:
        block_bytes = os.statvfs(place if place.exists() else place.parent).f_frsize
        if not 512 <= block_bytes <= 1 << 20 or block_bytes & (block_bytes - 1):
            block_bytes = DEFAULT_BLOCK_BYTES
        if place.is_file() and place.stat().st_size >= least_bytes:
            return _measure_file(place, block_bytes, request_bytes)
        folder = place if place.is_dir() else place.parent
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moec-probe-") as file:
            _fill(file.fileno())
            return _measure_file(Path(file.name), block_bytes, request_bytes)
    except OSError as error:
        raise ProfileError(
            f"`{place}`: storage cannot be measured there: {error.strerror}", "name a device profile, or another place"
        ) from error


def _fill(descriptor: int) -> None:
    """Write up to PROBE_FILE_BYTES of random bytes until WRITE_LIMIT_S is over. Each piece is synced."""
    deadline = time.perf_counter() + WRITE_LIMIT_S
    for _ in range(PROBE_FILE_BYTES // REQUEST_BYTES):
        os.write(descriptor, os.urandom(REQUEST_BYTES))
        os.fsync(descriptor)
        if time.perf_counter() > deadline:
            return


@contextmanager
def _opened(path: Path, block_bytes: int) -> Iterator[tuple[int, bool]]:
    """Open a file. Yields the descriptor, and whether one test read bypassed the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    descriptor, is_direct = -1, False
    if direct:
        try:
            descriptor = os.open(path, os.O_RDONLY | direct)
            with mmap.mmap(-1, block_bytes) as page:
                os.preadv(descriptor, [page], 0)
            is_direct = True
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    if not is_direct:
        descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor, is_direct
    finally:
        os.close(descriptor)


def _measure_file(path: Path, block_bytes: int, request_bytes: int) -> StorageFigures:
    blocks = max(1, path.stat().st_size // block_bytes)
    request = max(1, min(-(-request_bytes // block_bytes), blocks // 4))
    # The order is fixed, so that two probes read the same positions.
    order = random.Random(0)
    with _opened(path, block_bytes) as (descriptor, is_direct):
        large = [first * block_bytes for first in range(0, blocks - request + 1, request)][:256]
        small = [order.randrange(blocks) * block_bytes for _ in range(LATENCY_READS)]
        latencies = _timed_reads(descriptor, small, block_bytes, LATENCY_LIMIT_S, is_direct)
        with ThreadPoolExecutor(READERS) as pool:
            shares = [large[reader::READERS] or large for reader in range(READERS)]
            size = request * block_bytes
            read = partial(_timed_reads, descriptor, size=size, limit_s=READ_LIMIT_S, is_direct=is_direct)
            start = time.perf_counter_ns()
            count = sum(len(times) for times in pool.map(read, shares))
            elapsed_ns = max(1, time.perf_counter_ns() - start)
    return StorageFigures(
        request_bytes=size,
        # All bytes over the whole time: a throttled device answers some reads at once and delays the next ones.
        bytes_per_s=max(1, count * size * 10**9 // elapsed_ns),
        latency_ns=max(1, int(statistics.median(latencies))),
        block_bytes=block_bytes,
        is_direct=is_direct,
    )


@contextmanager
def large_pages(size: int) -> Iterator[memoryview]:
    """Yield memory to read into, uint8 [size], page-aligned for direct reads; huge pages if there are any."""
    with mmap.mmap(-1, size + _HUGE_PAGE_BYTES) as memory:
        with suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        anchor = ctypes.c_char.from_buffer(memory)
        first = -ctypes.addressof(anchor) % _HUGE_PAGE_BYTES
        del anchor  # a mapping with views cannot be closed
        with memoryview(memory) as whole, whole[first : first + size] as pages:
            yield pages


def _timed_reads(descriptor: int, offsets: list[int], size: int, limit_s: float, is_direct: bool) -> list[int]:
    """Return the nanoseconds of each read, at least one, until limit_s is over.

    Buffered reads drop the page cache first.
    """
    times: list[int] = []
    deadline = time.perf_counter() + limit_s
    with large_pages(size) as buffer:
        for offset in offsets:
            if not is_direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            start = time.perf_counter_ns()
            os.preadv(descriptor, [buffer], offset)
            times.append(max(1, time.perf_counter_ns() - start))
            if time.perf_counter() > deadline:
                break
    return times


def first_difference(profile: DeviceProfile, system: Path = _SYSTEM) -> str | None:
    """Return the first difference of this machine from a profile in words, or None if it is such a device.

    Compared are the threads of this process, the best instruction set, and whether all memory holds the budget of the
    profile. A profile may leave some processors to reading, so all of its cores match too. It may also count cores of
    two threads once.
    system: root folder of /proc and /sys.
    """
    processors, cores = allowed_processors(), profile.cores
    threads, physical = len(processors), physical_cores(processors, system)
    all_stated = () if cores is None else (cores.big + cores.little,)
    if threads not in (profile.threads, *all_stated) and physical != profile.threads:
        on_cores = f" on {physical} cores" if 0 < physical < threads else ""
        return f"it has {threads} threads{on_cores}, the profile {profile.threads}"
    best = instruction_sets(system)[0]
    if best != profile.instruction_sets[0]:
        return f"its best instruction set is {best}, that of the profile {profile.instruction_sets[0]}"
    try:
        memory = memory_limit_bytes(system)
    except ProfileError:
        return "it does not tell how much memory it has"
    if memory < profile.memory_budget_bytes:
        return (
            f"it has {memory >> 20}MiB of memory, the budget of the profile is {profile.memory_budget_bytes >> 20}MiB"
        )
    return None


def slower_kernels(profile: DeviceProfile, system: Path = _SYSTEM) -> str | None:
    """Return why a run is slower than predicted: the processor lacks the assumed instruction set. None: it has it.

    Processors of another family have sets of their own, so nothing is said of them.
    system: root folder of /proc and /sys.
    """
    assumed, sets = profile.instruction_sets[0], instruction_sets(system)
    if assumed in sets or processor_family(sets[0]) not in (None, processor_family(assumed)):
        return None
    return f"its predicted speed assumes {assumed}, which this processor lacks, so a run is slower"


def storage_sha256(place: Path, system: Path = _SYSTEM) -> str:
    """Return a digest of the storage of an existing file or folder: its disks and the type of its file system.

    If the system reports no disk (network, memory, containers), the type and the source of the mount are used.
    Two disks of one model have different digests if they report a serial number.
    system: root folder of /proc and /sys.
    Raises OSError.
    """
    device = place.stat().st_dev
    mount = mount_of(place.resolve(), system)
    blocks = [system / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"]
    if mount.source.startswith("/dev/"):  # some file systems, such as btrfs, number their devices themselves
        blocks.append(system / "sys/class/block" / (system / mount.source.lstrip("/")).resolve().name)
    facts = next((disks for block in blocks if any(disks := _disks(block))), mount.source)
    return hashlib.sha256(json.dumps([mount.kind, facts]).encode()).hexdigest()


def _disks(block: Path) -> list[list[str]]:
    """Return the facts of a block device in /sys and of the disks below it, sorted; empty if it is missing."""
    block = block.resolve()
    if not block.is_dir():
        return []
    if (block / "partition").exists():
        block = block.parent
    below = sorted(disk for slave in (block / "slaves").glob("*") for disk in _disks(slave))
    names = _MAPPING_FACTS if below else _DISK_FACTS
    return [[f"{name} {text}" for name in names if (text := read_text(block / name).strip())], *below]
