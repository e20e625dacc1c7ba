"""The request of a compile."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moec.profiles.device import DeviceProfile
from moec.profiles.probe import memory_limit_bytes

from ..workspace.durable import Disk
from ..workspace.work_folder import work_folder
from .options import CompileOptions, Talk
from .ports import CheckCompanions, DrawCard, FitEviction, MeasureModes, OpenRuntime, OpenTemplates


@dataclass(frozen=True, slots=True)
class SharedWork:
    """The measurements that several compiles of one model share.

    folder: holds them.
    devices: digests of the profiles, in order.
    is_first: whether this compile is the first. Its search uses no knowledge of others, also if it is resumed.
    is_last: whether they are removed afterwards.
    """

    folder: Path
    devices: tuple[str, ...]
    is_first: bool
    is_last: bool


@dataclass(slots=True)
class CompileRequest:
    """A compile request: the source, the output, the device, and the runtime that certifies the bundle."""

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
    sweep: tuple[float, ...] = ()  # relative losses; the fewest bytes are searched for each, with plan_only
    cluster: str | None = None  # address of a Ray cluster, or `auto` for that of this machine
    measure_modes: MeasureModes | None = None  # measures the lossy modes for quality.json
    fit_eviction: FitEviction | None = None  # fits the weights of HOBBIT's eviction score
    draw_card: DrawCard = lambda manifest, quality: ()  # draws the pictures of the model card
    measurements: Path | None = None  # folder of measurements that are kept for other compiles; None: none are kept
    shared: SharedWork | None = None  # measurements of the compiles for several devices; None: one device
    templates: OpenTemplates | None = None  # opens the templates of prompts; None: they cannot be used
    check_companions: CheckCompanions | None = None  # checks files as the runtime does; None: they are not checked
    popularity: Path | None = None  # popularity file with the use of experts on devices; None: that of calibration
    memory_bytes: int = 0  # memory of the compile; 0: 7/8 of the machine's memory

    @property
    def work(self) -> Path:
        """The folder with the results of finished stages."""
        return self.measurements or (work_folder(self.output) if self.shared is None else self.shared.folder)

    @property
    def keeps_work(self) -> bool:
        """True if a later compile uses the results of the stages."""
        return self.measurements is not None or (self.shared is not None and not self.shared.is_last)

    @property
    def takes_up(self) -> bool:
        """True if results of earlier runs are used."""
        return self.resume or self.measurements is not None

    @property
    def memory_limit_bytes(self) -> int:
        return self.memory_bytes or memory_limit_bytes() * 7 // 8
