"""Optional parts of a device profile: its GPU, its big and little cores, its power draw, settings of a run.

Each is checked. No part enters the digest of a profile, because no plan depends on one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from moec.manifests.runtime_limits import IO_MODES, MAX_READERS

MAX_PROCESSORS = 4096
MAX_WATTS = 1_000_000
MAX_TYPE_LENGTH = 100
_MAX_NUMBER = 1 << 60


class _Part:
    """A table of a profile. Its subclasses are frozen dataclasses.

    TABLE: name of the table in a file.
    """

    __slots__ = ()
    TABLE: ClassVar[str]

    def stated(self) -> dict[str, Any]:
        """Return the values that the part states, by key, in the order of the fields."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return {key: value for key, value in values.items() if value not in (None, ())}

    def to_plain(self) -> dict[str, Any]:
        """Return every field for `--json`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # type: ignore[arg-type]
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def _check_range(self, key: str, least: float, most: float, expected: str) -> None:
        value = getattr(self, key)
        if value is not None and not least <= value <= most:
            raise ValueError(f"`{self.TABLE}.{key}`: expected {expected}, found {value}")


@dataclass(frozen=True, slots=True)
class Gpu(_Part):
    """A GPU with its memory.

    type: name of the model, for people.
    memory_bytes: its own memory, or the memory that it shares with the processor.
    memory_bytes_per_s: peak bandwidth of that memory.
    link_bytes_per_s: rate of copies from host memory; None: it shares the memory of the processor.
    flops_per_s: peak rate of float32 operations; None: not stated.
    Raises ValueError, with the key first, if a value is out of range.
    """

    TABLE: ClassVar[str] = "gpu"

    type: str
    memory_bytes: int
    memory_bytes_per_s: int
    link_bytes_per_s: int | None = None
    flops_per_s: int | None = None

    def __post_init__(self) -> None:
        if not self.type.isprintable() or not 0 < len(self.type) <= MAX_TYPE_LENGTH:
            raise ValueError(
                f"`gpu.type`: expected the name of a GPU of 1 to {MAX_TYPE_LENGTH} characters, found {self.type[:80]!a}"
            )
        for key in ("memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "flops_per_s"):
            self._check_range(key, 1, _MAX_NUMBER - 1, "a positive number")


@dataclass(frozen=True, slots=True)
class Cores(_Part):
    """Two kinds of processors, as the system counts them. A profile has no such part if all are alike.

    big, little: number of processors of each kind. A core of two threads counts twice.
    little_cpus: numbers of the little ones, for the affinity of readers; empty: not stated.
    Raises ValueError, with the key first, if a value is out of range.
    """

    TABLE: ClassVar[str] = "cores"

    big: int
    little: int
    little_cpus: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in ("big", "little"):
            self._check_range(key, 1, MAX_PROCESSORS, f"1 to {MAX_PROCESSORS}")
        numbers = self.little_cpus
        if numbers and (len(numbers) != self.little or len(set(numbers)) != len(numbers)):
            raise ValueError(
                f"`cores.little_cpus`: expected the numbers of {self.little} processors once each, "
                f"found {list(numbers)[:80]}"
            )
        if any(not 0 <= number < MAX_PROCESSORS for number in numbers):
            raise ValueError(
                f"`cores.little_cpus`: expected numbers from 0 to {MAX_PROCESSORS - 1}, found {list(numbers)[:80]}"
            )


@dataclass(frozen=True, slots=True)
class Power(_Part):
    """Power draw, in watts. The provenance says which parts of the device it covers.

    load_watts: draw while all threads compute; None: not stated.
    idle_watts: draw without work, of the same parts; None: not stated.
    gpu_watts: draw of the GPU under load, which `load_watts` leaves out; None: not stated.
    Raises ValueError, with the key first, if a value is out of range or none is stated.
    """

    TABLE: ClassVar[str] = "power"

    load_watts: float | None = None
    idle_watts: float | None = None
    gpu_watts: float | None = None

    def __post_init__(self) -> None:
        for key in ("load_watts", "idle_watts", "gpu_watts"):
            value = getattr(self, key)
            if value is not None and not 0 < value <= MAX_WATTS:
                raise ValueError(f"`power.{key}`: expected more than 0 and at most {MAX_WATTS} watts, found {value}")
        if not self.stated():
            raise ValueError("`power`: expected one of `load_watts`, `idle_watts` and `gpu_watts`, found none")
        if self.idle_watts is not None and self.load_watts is not None and self.idle_watts > self.load_watts:
            raise ValueError(
                f"`power.idle_watts`: expected at most the {self.load_watts} watts under load, found {self.idle_watts}"
            )


@dataclass(frozen=True, slots=True)
class Run(_Part):
    """Settings of a run that suit the storage. They are defaults of `moec run` on such a device.

    io: how experts are read, as `--io`; None: not stated.
    readers: expert reads under way at once, as the setting `readers`; None: not stated.
    Raises ValueError, with the key first, if a value is out of range or none is stated.
    """

    TABLE: ClassVar[str] = "run"

    io: str | None = None
    readers: int | None = None

    def __post_init__(self) -> None:
        if self.io is not None and self.io not in IO_MODES:
            raise ValueError(f"`run.io`: expected one of {', '.join(IO_MODES)}, found {self.io[:80]!a}")
        self._check_range("readers", 1, MAX_READERS, f"1 to {MAX_READERS}")
        if not self.stated():
            raise ValueError("`run`: expected `io` or `readers`, found neither")


Part = Gpu | Cores | Power | Run
PARTS: tuple[type[Part], ...] = (Gpu, Cores, Power, Run)
