"""What a compile is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from moec.profiles.device import DeviceProfile
from moec.profiles.probe import memory_limit_bytes

from ..workspace.durable import Disk
from .options import CompileOptions, Talk
from .ports import MeasureModes, OpenRuntime
from .result import CompileResult


@dataclass(slots=True)
class CompileRequest:
    """What to compile, where to, for which device, and whose runtime certifies it."""

    source: str
    output: Path
    options: CompileOptions
    profile: DeviceProfile
    open_runtime: OpenRuntime
    talk: Talk = field(default_factory=Talk)
    disk: Disk = field(default_factory=Disk)
    resume: bool = False
    overwrite: bool = False
    plan_only: bool = False
    sweep: tuple[float, ...] = ()  # relative losses to find the fewest bytes for, with plan_only
    cluster: str | None = None  # a Ray cluster to hand work to: its address, or `auto` for the one of this machine
    measure_modes: MeasureModes | None = None  # what the lossy modes of the bundle cost, for quality.json
    published: Callable[[CompileResult], None] = lambda result: None  # told once the bundle has its name
    memory_bytes: int = 0  # what the compile may take; 0: 7/8 of the machine's

    @property
    def memory_limit_bytes(self) -> int:
        return self.memory_bytes or memory_limit_bytes() * 7 // 8
