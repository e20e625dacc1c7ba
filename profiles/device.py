"""DeviceProfile: the properties of a device, checked. Every number states its source.

A profile is independent of models and bundles. Its optional parts are in `device_parts.py`. `loading.py` reads it from
TOML, `device_json.py` from the file of a bundle. `probe.py` measures the present machine, and `predict.py` combines
it with a bundle.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from moec.manifests.quant import TERNARY

from .device_parts import MAX_PROCESSORS, Cores, Gpu, Part, Power, Run

# Bitwidths with a kernel in each instruction set. A profile does not offer a format without a kernel.
_SETS = ("scalar", "avx2", "avxvnni", "amx", "avx512vnni", "neon", "neon-dot", "neon-i8mm")
KERNEL_FORMATS: dict[str, tuple[float, ...]] = dict.fromkeys(_SETS, (1, TERNARY, 2, 3, 4, 5, 6, 8, 16))
PROVENANCE_KINDS = (
    "measured",
    "datasheet",
    "EdgeMoE (journal), section",
    "HOBBIT, section",
    "MoBiLE, section",
    "Twiddler, section",
    "Twiddler, table",
    "estimate",
)
MEASURED = "measured: "
"""Begin of each provenance of a probe. A number of somebody else is `measured by ...`."""
HOST_NAME = "host"
_MAX_NUMBER = 1 << 60
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
NUMBERS = (
    "memory_budget_bytes",
    "memory_bytes_per_s",
    "storage_bytes_per_s",
    "storage_latency_ns",
    "storage_block_bytes",
    "threads",
)
CONTENT = (*NUMBERS, "instruction_sets")
# Fields that a second probe of the same machine measures again with the same value.
_STABLE = ("memory_budget_bytes", "storage_block_bytes", "instruction_sets")


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device that bundles are compiled for.

    memory_budget_bytes: most memory of a run.
    memory_bytes_per_s: memory bandwidth; read and written bytes both count.
    storage_bytes_per_s: rate of large reads.
    storage_latency_ns: time of one read of storage_block_bytes with an empty queue.
    storage_block_bytes: alignment of reads.
    threads: computing threads.
    instruction_sets: names in KERNEL_FORMATS, best first.
    provenance: source of each field's value, and of each value of a part, as `gpu.memory_bytes`.
    is_probed: whether it was measured on the present machine, so that it varies.
    gpu, cores, power, run: parts that the profile may state; None: not stated.
    Raises ValueError, with the field first, if a value is out of range or has no provenance, or if two values exclude
    each other.
    """

    name: str
    memory_budget_bytes: int
    memory_bytes_per_s: int
    storage_bytes_per_s: int
    storage_latency_ns: int
    storage_block_bytes: int
    threads: int
    instruction_sets: tuple[str, ...]
    provenance: Mapping[str, str] = field(compare=False)
    is_probed: bool = False
    gpu: Gpu | None = None
    cores: Cores | None = None
    power: Power | None = None
    run: Run | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"`name`: expected lower-case letters, digits and hyphens, found `{self.name[:80]}`")
        for key in NUMBERS:
            value = getattr(self, key)
            if not 0 < value < _MAX_NUMBER:
                raise ValueError(f"`{key}`: expected a positive number, found {value}")
        block = self.storage_block_bytes
        if block & (block - 1) or not 512 <= block <= 1 << 24:
            raise ValueError(f"`storage_block_bytes`: expected a power of two from 512 to {1 << 24}, found {block}")
        if self.threads > MAX_PROCESSORS:
            raise ValueError(f"`threads`: expected at most {MAX_PROCESSORS}, found {self.threads}")
        unknown = [name for name in self.instruction_sets if name not in KERNEL_FORMATS]
        if unknown or not self.instruction_sets or len(set(self.instruction_sets)) != len(self.instruction_sets):
            sets = list(self.instruction_sets)
            raise ValueError(f"`instruction_sets`: expected some of {sorted(KERNEL_FORMATS)} once each, found {sets}")
        self._check_possible()
        self._check_provenance()

    def _check_possible(self) -> None:
        """Refuse values that no device can have together."""
        families = {processor_family(name) for name in self.instruction_sets} - {None}
        if len(families) > 1:
            raise ValueError(
                f"`instruction_sets`: expected sets of one processor, found those of Arm and of x86 in "
                f"{list(self.instruction_sets)}"
            )
        if self.cores is not None and self.threads > self.cores.big + self.cores.little:
            raise ValueError(
                f"`threads`: expected at most {self.cores.big + self.cores.little}, the big and little cores, "
                f"found {self.threads}"
            )
        if self.gpu is not None and self.gpu.link_bytes_per_s is not None:
            fastest = max(self.memory_bytes_per_s, self.gpu.memory_bytes_per_s)
            if self.gpu.link_bytes_per_s > fastest:
                raise ValueError(
                    f"`gpu.link_bytes_per_s`: expected at most {fastest}, the faster of both memories, "
                    f"found {self.gpu.link_bytes_per_s}"
                )
        if self.power is not None and self.power.gpu_watts is not None and self.gpu is None:
            raise ValueError(f"`power.gpu_watts`: expected a table `gpu`, found none for {self.power.gpu_watts} watts")

    def _check_provenance(self) -> None:
        expected = set(self.stated_keys())
        if set(self.provenance) != expected:
            missing, unknown = expected - set(self.provenance), set(self.provenance) - expected
            raise ValueError(f"`provenance`: missing {sorted(missing)}, unknown {sorted(unknown)}")
        for key, text in self.provenance.items():
            if not text.startswith(PROVENANCE_KINDS):
                kinds = ", ".join(f"`{kind}`" for kind in PROVENANCE_KINDS)
                raise ValueError(f"`provenance.{key}`: expected a text that starts with one of {kinds}")

    def stated_keys(self) -> tuple[str, ...]:
        """Return the keys that need a provenance: CONTENT, then those of each part, as `gpu.memory_bytes`."""
        return (*CONTENT, *(f"{table.TABLE}.{key}" for table in self.parts() for key in table.stated()))

    def parts(self) -> tuple[Part, ...]:
        """Return the parts that the profile states."""
        return tuple(table for table in (self.gpu, self.cores, self.power, self.run) if table is not None)

    @property
    def bitwidths(self) -> tuple[float, ...]:
        """Bitwidths that the best instruction set has a kernel for. The search may offer them."""
        return KERNEL_FORMATS[self.instruction_sets[0]]

    @property
    def sha256(self) -> str:
        """Digest of the content that decides a compile, without provenance and without the optional parts.

        For a probed profile only the values count that a second probe measures again: rounded memory budget, block
        size, instruction sets. Measured rates and threads are left out, so that two compiles on one machine can give
        equal bytes.
        """
        steady = self.rounded()
        keys = ("name", *(_STABLE if self.is_probed else CONTENT))
        plain = {key: getattr(steady, key) for key in keys}
        return hashlib.sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def rounded(self) -> DeviceProfile:
        """Return the profile for planning. A profile from a file is returned unchanged.

        In a probed profile the memory budget is rounded down to two significant digits. Each measured rate and latency
        is rounded to the nearest power of two, because probes of one machine differ by 10 to 50 %. A value near the
        border of two powers may still change. Only named profiles avoid that.
        """
        if not self.is_probed:
            return self
        return replace(
            self,
            memory_budget_bytes=round_down(self.memory_budget_bytes, 2),
            memory_bytes_per_s=nearest_power_of_two(self.memory_bytes_per_s),
            storage_bytes_per_s=nearest_power_of_two(self.storage_bytes_per_s),
            storage_latency_ns=nearest_power_of_two(self.storage_latency_ns),
        )

    def to_plain(self) -> dict[str, Any]:
        """Return every field and the digest, for `--json`."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["instruction_sets"] = list(self.instruction_sets)
        plain["provenance"] = dict(self.provenance)
        plain |= {table.TABLE: table.to_plain() for table in self.parts()}
        return {**plain, "bitwidths": list(self.bitwidths), "sha256": self.sha256}


def processor_family(instruction_set: str) -> str | None:
    """Return the kind of processor that has an instruction set; None: any."""
    families = {"neon": "Arm", "avx": "x86", "amx": "x86"}
    return next((kind for prefix, kind in families.items() if instruction_set.startswith(prefix)), None)


def round_down(value: int, digits: int) -> int:
    """Return `value`, positive, with all but its first `digits` decimal digits set to zero."""
    scale: int = 10 ** max(0, len(str(value)) - digits)
    return value // scale * scale


def nearest_power_of_two(value: int) -> int:
    """Return the power of two nearest in ratio to `value`, positive."""
    lower: int = 1 << (value.bit_length() - 1)
    return lower if value * value < 2 * lower * lower else 2 * lower
