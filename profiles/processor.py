"""Name the instruction sets of this processor that have kernels, and tell its big cores from its little ones."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from .device_parts import MAX_PROCESSORS, Cores

_FEATURES = {
    "amx": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "amx_tile", "amx_int8"},
    "avx512vnni": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "neon-i8mm": {"asimd", "asimddp", "i8mm"},
    "neon-dot": {"asimd", "asimddp"},
    "neon": {"asimd"},
}
_SYSTEM = Path("/")


def instruction_sets(system: Path = _SYSTEM) -> tuple[str, ...]:
    """Return the instruction sets with kernels that this processor has, best first. `scalar` is always included."""
    features: set[str] = set()
    for line in read_text(system / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            features = set(value.split())
            break
    return (*(name for name, needed in _FEATURES.items() if needed <= features), "scalar")


def core_kinds(allowed: Collection[int], system: Path = _SYSTEM) -> tuple[Cores, str] | None:
    """Return the big and little processors, and the file of the system that tells; None if all are alike or none tells.

    Arm systems state a capacity of each processor; those under the largest one are little. Hybrid x86 systems list the
    processors of each kind.
    allowed: numbers of the processors that this process may use.
    """
    numbers = sorted(number for number in allowed if number < MAX_PROCESSORS)
    capacities, atoms = _capacities(numbers, system), _atoms(system)
    little, source = [], ""
    if capacities:
        most = max(capacities.values())
        little, source = [number for number in numbers if capacities[number] < most], "cpu_capacity"
    elif atoms is not None:
        little, source = [number for number in numbers if number in atoms], "cpu_atom/cpus"
    big = len(numbers) - len(little)
    return (Cores(big, len(little), tuple(little)), source) if big and little else None


def little_processors(stated: Cores, allowed: Collection[int], system: Path = _SYSTEM) -> tuple[int, ...]:
    """Return the numbers of this machine's processors that a profile counts as little; empty if nothing tells them.

    * With capacities: as many of the least capacity as the profile counts. There may be more than two kinds.
    * On hybrid x86: the processors that the system lists as atoms.
    * If the system states neither: the numbers of the profile.
    stated: the cores of the profile.
    allowed: numbers of the processors that this process may use. Others are never returned.
    """
    numbers = sorted(number for number in allowed if number < MAX_PROCESSORS)
    capacities, atoms = _capacities(numbers, system), _atoms(system)
    if capacities:
        ranked = sorted(numbers, key=lambda number: capacities[number])
        little, others = ranked[: stated.little], ranked[stated.little :]
        is_told = bool(others) and capacities[little[-1]] < capacities[others[0]]
        return tuple(sorted(little)) if is_told else ()
    if atoms is not None:
        return tuple(number for number in numbers if number in atoms)
    return tuple(sorted(stated.little_cpus)) if set(stated.little_cpus) <= set(numbers) else ()


def physical_cores(allowed: Collection[int], system: Path = _SYSTEM) -> int:
    """Return the number of cores with one of these processors; 0 if the system does not tell. A core may have two."""
    places = (system / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list" for number in allowed)
    siblings = [read_text(place).strip() for place in places]
    return len(set(siblings)) if all(siblings) else 0


def _capacities(numbers: Collection[int], system: Path) -> dict[int, int]:
    """Return the capacity of each processor; empty unless the system states all of them."""
    capacities = {number: _capacity(number, system) for number in numbers}
    return capacities if all(capacities.values()) else {}


def _atoms(system: Path) -> set[int] | None:
    """Return the little processors of hybrid x86; None on another machine."""
    if not (system / "sys/devices/cpu_core/cpus").exists():
        return None
    numbers: set[int] = set()
    for piece in read_text(system / "sys/devices/cpu_atom/cpus").strip().split(","):  # like `0-3,8`
        first, _, last = piece.partition("-")
        if not all(number.isascii() and number.isdigit() and len(number) < 10 for number in (first, last or first)):
            return set()
        numbers.update(range(int(first), min(int(last or first), MAX_PROCESSORS) + 1))
    return numbers


def _capacity(number: int, system: Path) -> int:
    """Return the capacity of a processor; 0 if the system does not state it."""
    text = read_text(system / f"sys/devices/system/cpu/cpu{number}/cpu_capacity").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def read_text(path: Path) -> str:
    """Return a file of the system as text; empty if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a zero byte in the path
        return ""
