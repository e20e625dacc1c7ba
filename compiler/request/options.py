"""CompileOptions: all options of a compile, validated in one place."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moec.evaluation.long_items import TRUNCATE
from moec.evaluation.tasks import task_name
from moec.evaluation.tasks.task_settings import NO_SETTINGS, TaskSettings
from moec.manifests.errors import OptionError
from moec.manifests.progress import Progress
from moec.manifests.quant import (
    BITWIDTHS,
    BYTE_SCALES_BITWIDTHS,
    COLUMNS_PER_TILE,
    MAX_DIMENSION,
    TERNARY,
    TERNARY_COLUMNS,
    QuantSpec,
)

from ..calibration.activation_paths import DEFAULT_PATH_KEYS, PathKeys
from ..effort import Effort
from ..quantization.quantizers import PACKAGES, QUANTIZERS, WITH_MOMENTS, can_make
from .plan import CompileResult
from .targets import OBJECTIVES, Objective, Target, require_data

Sensitivity = Literal["exact", "fisher", "proxy", "auto"]
Search = Literal["knapsack", "edgemoe", "edgemoe-popularity"]
DEFAULT_GROUP_SIZES = (32, 64, 128)
DEFAULT_BITS: tuple[float, ...] = (1, TERNARY, 2, 3, 4, 8, 16)
"""Bitwidths on offer to routed experts without a request.

5 and 6 bits are left out: a bundle with them has version 2 of the format, and they gain little at few bits.
Source: docs/experiments/2026-11.md, 25: Five and six bits.
"""
DEFAULT_QUANTIZER = "gptq"
DEFAULT_TORCH_DEVICE = "cpu"
TORCH_DEVICES = r"cpu|cuda(:\d{1,3})?"
DENSE_BITS = (4, 5, 6, 8, 16)
SEARCHED_DENSE_BITS = (4, 8, 16)
FALLBACK_BITS = (1, 2, 3, 4, 5, 6)
UNIFORM_DENSE_BITS = 8
UNIFORM_GROUP_SIZE = 64
MAX_SEED = (1 << 63) - 1
"""Largest seed of torch's generators."""
FEW_GROUP_SIZES: Mapping[float, tuple[int, ...]] = {1: (128,), TERNARY: (128,), 2: (128, 64), 3: (128, 64), 4: (64, 32)}
"""Group sizes on offer to a large model, of which fewer formats take half of the time and disk.

Source: docs/experiments/2026-11.md, 29: Half of the formats.
"""
QUICK_GROUP_SIZES: Mapping[float, tuple[int, ...]] = {1: (), TERNARY: (128,), 2: (64,), 3: (64,), 4: (64,)}
"""Group sizes on offer to a large model in a quick compile: half of the time of FEW_GROUP_SIZES.

Source: docs/experiments/2026-11.md, 30: Five formats.
"""
TERNARY_GROUP_SIZES = (0, 128)
"""Group sizes of three values. Wide groups lose little: with GPTQ 1 to 3 % of the error.

Source: docs/experiments/2026-11.md, 21: Group size of three values.
"""
# Options that have an effect only with task data or only in a search, with their defaults.
_OF_DATA: dict[str, object] = {
    "tasks": (),
    "shots": 0,
    "limit": None,
    "seed": 0,
    "sensitivity": "auto",
    "search": "knapsack",
    "effort": "default",
    "prune": None,
    "swaps": None,
    "path_keys": DEFAULT_PATH_KEYS,
    "long_items": TRUNCATE,
    "task_settings": NO_SETTINGS,
}
_OF_CALIBRATION = ("tasks", "shots", "limit", "seed", "path_keys", "long_items", "task_settings")
"""Options that also count with `--uniform`, whose data gives statistics and second moments."""
_OF_SEARCH: dict[str, object] = {"bits": DEFAULT_BITS, "objective": None}
_OPTION_NAMES = {
    "tasks": "task",
    "comparisons": "comparisons/--no-comparisons",
    "long_items": "long-items",
    "path_keys": "set path-keys",
    "prune": "prune-experts/--keep-experts",
    "torch_device": "torch-device",
}


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Options of a compile.

    target: exactly one target.
    data: folder, JSONL or hub name. With a uniform target it gives statistics and second moments.
    tasks: names or files of tasks. Empty: one task is inferred from the fields.
    dense_bits: bitwidth of dense weights. None: searched, or 8 with a uniform target.
    bits: bitwidths on offer to routed experts.
    group_sizes: columns per scale. 0 is one scale per row.
    sensitivity: how losses of units are predicted.
    search: the search algorithm.
    effort: what the compile spends, see effort.py.
    objective: the cost of a byte. None: the device profile decides.
    quantizer: `gptq`, `rtn`, `quanto` or `auto-gptq`.
    shots: solved examples before each item.
    limit: maximum number of items per split.
    seed: seed of all random choices.
    comparisons: whether best uniform format and EdgeMoE's search are measured. None: the affordable ones.
    symmetric: for a uniform target, no minima. None: the format decides.
    confidence: of the verdict on a loss, which may come before the last item. None: 95 %, and before the last item only
        where answers are dear.
    fallback_bits: bitwidth of a second version of each larger expert. None: no second version.
    prune: whether the search may leave experts out. None: if a measured loss or KL decides.
    swaps: measurements that improve a plan at equal bytes. None: the search decides.
    path_keys: `best`: exact sets, if they predict held-out tokens better than pairs; or `pairs`.
    long_items: what becomes of items that exceed the context, see `evaluation/long_items.py`.
    task_settings: changes of all tasks: prompts and metric.
    torch_device: device of torch that passes texts through layers and quantizes: `cpu`, `cuda` or `cuda:N`.
    Raises OptionError for values out of range or without effect.
    """

    target: Target
    data: str | None = None
    tasks: tuple[str, ...] = ()
    dense_bits: int | None = None
    bits: tuple[float, ...] = DEFAULT_BITS
    group_sizes: tuple[int, ...] = ()
    sensitivity: Sensitivity = "auto"
    search: Search = "knapsack"
    effort: Effort = "default"
    objective: Objective | None = None
    quantizer: str = DEFAULT_QUANTIZER
    shots: int = 0
    limit: int | None = None
    seed: int = 0
    comparisons: bool | None = None
    symmetric: bool | None = None
    confidence: float | None = None
    fallback_bits: int | None = None
    prune: bool | None = None
    swaps: int | None = None
    path_keys: PathKeys = DEFAULT_PATH_KEYS
    long_items: str = TRUNCATE
    task_settings: TaskSettings = NO_SETTINGS
    torch_device: str = DEFAULT_TORCH_DEVICE

    def __post_init__(self) -> None:
        if self.dense_bits is not None and self.dense_bits not in DENSE_BITS:
            raise OptionError(f"`--dense-bits {self.dense_bits}` is not on offer", "choose 4, 5, 6, 8 or 16")
        if not self.bits or set(self.bits) - set(BITWIDTHS):
            raise OptionError(f"`--bits` must be among {BITWIDTHS}, found {self.bits}", "write `--bits 2,3,4,8`")
        for size in self.group_sizes:
            if size < 0 or size % COLUMNS_PER_TILE:
                raise OptionError(
                    f"`--group-size {size}` is not a multiple of {COLUMNS_PER_TILE}",
                    "choose 32, 64, 128 or 0 (per row)",
                )
            if size > MAX_DIMENSION:
                raise OptionError(
                    f"`--group-size {size}` is more than the {MAX_DIMENSION} columns that a matrix may have",
                    "choose 32, 64, 128 or 0 (per row)",
                )
        if re.fullmatch(TORCH_DEVICES, self.torch_device) is None:
            raise OptionError(
                f"`--torch-device {self.torch_device[:40]}` is not on offer",
                "choose cpu, cuda, or cuda:N for one of many",
            )
        if self.quantizer not in QUANTIZERS:
            raise OptionError(f"unknown quantizer `{self.quantizer}`", f"choose one of {', '.join(QUANTIZERS)}")
        if self.objective is not None and self.objective not in OBJECTIVES:
            raise OptionError(f"unknown objective `{self.objective}`", f"choose one of {', '.join(OBJECTIVES)}")
        if len(set(map(task_name, self.tasks))) < len(self.tasks):
            raise OptionError(f"`--task` names a task twice: {', '.join(self.tasks)}", "name each once")
        self._check_counts()
        self._check_effects()
        if self.target.kind == "uniform":
            self._check_uniform()
        require_data(self.target, self.data)

    def _check_counts(self) -> None:
        if self.shots < 0:
            raise OptionError(f"`--shots {self.shots}` must not be negative", "leave it out for none")
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"`--limit {self.limit}` must be at least 1", "leave it out to take all items")
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError(f"`--seed {self.seed}` must be from 0 to {MAX_SEED}", "leave it out for 0")
        if self.swaps is not None and self.swaps < 0:
            raise OptionError(f"`--swaps {self.swaps}` must not be negative", "write 0 for none")
        if self.fallback_bits is not None and self.fallback_bits not in FALLBACK_BITS:
            raise OptionError(f"`--fallback-bits {self.fallback_bits}` is not on offer", "choose 1, 2, 3, 4, 5 or 6")

    def _check_effects(self) -> None:
        """Raise OptionError for an option without effect in combination with the others."""
        if self.confidence is not None and not 0.5 <= self.confidence <= 0.999:
            raise OptionError(f"`--confidence {self.confidence:g}` is not from 0.5 to 0.999", "write 0.95")
        if self.target.kind == "uniform":
            searched = {name: default for name, default in _OF_DATA.items() if name not in _OF_CALIBRATION}
            self._refuse_given(searched | _OF_SEARCH, f"with `{self.target.option}`, which searches nothing")
        if self.data is None:
            self._refuse_given(_OF_DATA, "without `--data`")
            if self.target.kind == "uniform":
                self._refuse_given(
                    {"torch_device": DEFAULT_TORCH_DEVICE}, f"with `{self.target.option}` and without `--data`"
                )
        if self.target.kind != "uniform" or self.target.value == 16:
            self._refuse_given({"symmetric": None}, "but with `--uniform` below 16 bits")
        if self.target.kind in ("size", "bits_per_weight"):
            self._refuse_given({"objective": None}, f"with a target of {self.target}, where bytes have equal costs")
        if self.target.kind != "loss":
            self._refuse_given({"confidence": None}, f"with a target of {self.target}; it needs a loss target")
        if self.is_edgemoe:
            search = f"with `--search {self.search}`"
            self._refuse_given({"bits": DEFAULT_BITS}, f"{search}, which takes 2, 4, 8 and 16")
            self._refuse_given({"comparisons": None}, f"{search}, which is one of them")
            self._refuse_given({"prune": None}, f"{search}, which keeps all experts")
            self._refuse_given({"swaps": None}, f"{search}, which has its own search")

    def _refuse_given(self, defaults: Mapping[str, object], reason: str) -> None:
        for name, default in defaults.items():
            if getattr(self, name) != default:
                option = _OPTION_NAMES.get(name, name)
                if name == "task_settings":
                    option = self.task_settings.first_option
                raise OptionError(f"`--{option}` has no effect {reason}", "leave it out")

    def _check_uniform(self) -> None:
        if self.group_sizes and self.target.value == 16:
            option = self.target.option if self.target.keeps_codes else "--uniform 16"
            raise OptionError(f"`--group-size` has no effect with `{option}`", "leave it out")
        if self.data is None and self.quantizer in WITH_MOMENTS and self.quantizer != DEFAULT_QUANTIZER:
            raise OptionError(
                f"`--quantizer {self.quantizer}` has no effect without `--data`, whose inputs it uses", "add `--data`"
            )
        if self.task_settings.metric is not None:
            raise OptionError("`--metric` has no effect with `--uniform`, which measures nothing", "leave it out")
        if len(self.group_sizes) > 1:
            raise OptionError("`--uniform` takes one `--group-size`", "give it once")
        one_kind = {1: False, TERNARY: True}.get(self.target.value)
        if self.symmetric is not None and one_kind not in (None, self.symmetric):
            raise OptionError(
                f"weights of {self.target.value:g} bits are always {'symmetric' if one_kind else 'asymmetric'}",
                f"leave out `--{'a' if one_kind else ''}symmetric`",
            )
        if self.target.value == TERNARY and self.uniform_group % TERNARY_COLUMNS:
            raise _no_ternary_groups(self.group_sizes)

    @property
    def is_edgemoe(self) -> bool:
        """True if the search is EdgeMoE's, in either order of experts."""
        return self.search != "knapsack"

    @property
    def low_spec(self) -> QuantSpec | None:
        """Format of low versions, or None."""
        if self.fallback_bits is None:
            return None
        return self._unit_spec(self.fallback_bits, self.group_sizes[0] if self.group_sizes else UNIFORM_GROUP_SIZE)

    def _unit_spec(self, bits: float, group: int) -> QuantSpec:
        """Return the format of routed experts with minima.

        Scales are bytes if quantizer and bitwidth support that.
        """
        has_bytes = group > 0 and bits in BYTE_SCALES_BITWIDTHS and self.quantizer not in PACKAGES
        return QuantSpec(bits, group, byte_scales=has_bytes)

    @property
    def uniform_group(self) -> int:
        """Columns per scale of a uniform target. 0 is one scale per row."""
        if self.target.value == 16 or (self.quantizer == "quanto" and self.target.value == 8 and not self.group_sizes):
            return 0  # quanto has no 8-bit groups
        return self.group_sizes[0] if self.group_sizes else UNIFORM_GROUP_SIZE

    @property
    def is_uniform_symmetric(self) -> bool:
        """True if a uniform target has no minima.

        Without a request: 1.6 bits, and 4 to 8 bits in groups of 32. In these groups a minimum costs half a bit per
        weight. Without minima they have the size and about the output error of groups of 64 with minima
        (4 bits: docs/experiments/2026-11.md, 21: Groups at 4.5 bits; more: 25: Five and six bits).
        """
        if self.symmetric is not None or self.target.kind != "uniform":
            return bool(self.symmetric)
        if self.target.value == TERNARY:
            return True
        return 4 <= self.target.value <= 8 and self.uniform_group == 32 and self.quantizer != "quanto"

    def unit_specs(
        self,
        bitwidths: tuple[float, ...],
        plain: QuantSpec,
        widths: Collection[int] = (),
        held_formats: Collection[QuantSpec] = (),
        usual_groups: Mapping[float, tuple[int, ...]] = {},
    ) -> tuple[QuantSpec, ...]:
        """Return the formats on offer to routed experts, smallest first: those of `bits` with a kernel on the device.

        * 8 bits use the widest group that divides a width. Narrower groups add bytes and no measurable quality.
        * 1 bit has no groups of 32, which take nearly the bytes of 2 bits.
        * Groups of up to 5 bits have byte scales and minima: equal output error for fewer bytes
          (docs/experiments/2026-11.md, 22: Byte scales).
        * Quantizers of other packages have no bitwidth below 2, and no byte scales.
        * Formats that hold the checkpoint's own codes are added, whatever the group sizes.

        bitwidths: bitwidths with a kernel.
        plain: the format at 16 bits, which keeps the checkpoint's own numbers.
        widths: columns of the matrices in these formats. Empty: every group size divides them.
        held_formats: formats that hold the checkpoint's own codes exactly.
        usual_groups: group sizes of bitwidths, unless the request names some or 128 does not divide a width. A bitwidth
            with none is offered only if the request names bitwidths.
        Raises OptionError if no format is left.
        """
        specs: list[QuantSpec] = []
        few = {} if self.group_sizes or any(width % 128 for width in widths) else usual_groups
        excluded = {1, TERNARY} if self.quantizer in PACKAGES else set()
        if self.bits == DEFAULT_BITS:
            excluded |= {bits for bits, sizes in few.items() if not sizes}
        for bits in sorted((set(self.bits) & set(bitwidths)) - excluded):
            if bits == 16:
                specs.append(plain)
            elif bits == TERNARY:
                specs += self._ternary_specs(few.get(TERNARY, TERNARY_GROUP_SIZES))
            else:
                sizes = self._groups_of(bits, widths, few.get(bits) or DEFAULT_GROUP_SIZES)
                specs += [self._unit_spec(bits, size) for size in sizes]
            added = [spec for spec in held_formats if spec.bitwidth == bits and spec not in specs]
            specs += [spec for spec in added if can_make(self.quantizer, spec)]
        if not specs:
            reason = "has a kernel on this device"
            if self.quantizer in PACKAGES and excluded & set(self.bits):
                reason += f", and {self.quantizer} has none below 2"
            raise OptionError(f"no bitwidth of {self.bits} {reason}", "offer others with `--bits`")
        return tuple(specs)

    def _groups_of(self, bits: float, widths: Collection[int], usual: tuple[int, ...]) -> list[int]:
        """Return the group sizes of a bitwidth below 16 with whole-bit codes: 0 first, then widest first.

        usual: sizes without a request.
        """
        groups = sorted(set(self.group_sizes or usual), key=lambda size: (size != 0, -size))
        if bits == 8 and self.quantizer == "quanto":
            return [0]  # the only 8-bit format of the package
        if bits == 8:
            fitting = [[size for size in groups if not size or width % size == 0] for width in widths or (0,)]
            widest = {sizes[0] for sizes in fitting if sizes} or {groups[0]}
            return [size for size in groups if size in widest]
        if bits == 1:
            return [size for size in groups if size != 32] or [groups[0]]
        return groups

    def _ternary_specs(self, usual: tuple[int, ...]) -> list[QuantSpec]:
        """Return ternary formats for the group sizes that hold whole tiles.

        usual: sizes without a request.
        Raises OptionError if bitwidths were named and no group size fits.
        """
        sizes = sorted(set(self.group_sizes or usual), key=lambda size: (size != 0, -size))
        sizes = [size for size in sizes if size % TERNARY_COLUMNS == 0]
        if not sizes and self.bits != DEFAULT_BITS:
            raise _no_ternary_groups(self.group_sizes)
        return [QuantSpec(TERNARY, size, symmetric=True) for size in sizes]

    def dense_widths(self) -> tuple[int, ...]:
        """Return the bitwidths on offer to attention, embedding and lm_head. One if it is fixed."""
        return SEARCHED_DENSE_BITS if self.dense_bits is None else (self.dense_bits,)

    def to_plain(self) -> dict[str, str]:
        """Return the options that decide the bytes as text, for the manifest. The location of the data is left out."""
        return {
            "target": str(self.target),
            "tasks": ",".join(map(task_name, self.tasks)),
            "dense_bits": "searched" if self.dense_bits is None else str(self.dense_bits),
            "bits": ",".join(f"{bits:g}" for bits in self.bits),
            "group_sizes": ",".join(map(str, self.group_sizes or DEFAULT_GROUP_SIZES)),
            "sensitivity": self.sensitivity,
            "search": self.search,
            "objective": self.objective or "device",
            "quantizer": self.quantizer,
            "symmetric": str(self.is_uniform_symmetric).lower(),
            "shots": str(self.shots),
            "limit": str(self.limit or "none"),
            "seed": str(self.seed),
            **({} if self.effort == "default" else {"effort": self.effort}),
            **({} if self.confidence is None else {"confidence": f"{self.confidence:g}"}),
            **({} if self.path_keys == DEFAULT_PATH_KEYS else {"path_keys": self.path_keys}),
            **({} if self.long_items == TRUNCATE else {"long_items": self.long_items}),
            **self.task_settings.to_plain(),
            **({} if self.swaps is None else {"swaps": str(self.swaps)}),
            **({} if self.prune is None else {"prune": str(self.prune).lower()}),
            **({} if self.fallback_bits is None else {"fallback_bits": str(self.fallback_bits)}),
            **({} if self.torch_device == DEFAULT_TORCH_DEVICE else {"torch_device": self.torch_device}),
        }


def _no_ternary_groups(sizes: tuple[int, ...]) -> OptionError:
    given = ", ".join(map(str, sizes))
    return OptionError(
        f"{TERNARY} bits come in groups of a multiple of {TERNARY_COLUMNS} columns, found `--group-size {given}`",
        "add 128, or 0 (per row)",
    )


@dataclass(slots=True)
class Talk:
    """Output of a compile.

    note: takes a sentence.
    progress: opens a progress bar with a title, and returns its callback.
    published: takes the result once the bundle is in place, while an interrupted run can still be resumed.
    forecast: takes the stages of a long compile before its work, and the option that brings it nearest to half the
        time, with its seconds.
    """

    note: Callable[[str], None] = field(default=lambda sentence: None)
    progress: Callable[[str], Progress] = field(default=lambda title: lambda done, total: None)
    published: Callable[[CompileResult], None] = field(default=lambda result: None)
    forecast: Callable[[Sequence[dict[str, Any]], tuple[str, float] | None], None] = field(
        default=lambda stages, shorter: None
    )
