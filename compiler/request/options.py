"""CompileOptions: what a user may ask of a compile, validated in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

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

from ..quantization.quantizers import QUANTIZERS
from .objective import OBJECTIVES, Objective
from .targets import Target

Sensitivity = Literal["exact", "fisher", "proxy", "auto"]
Search = Literal["knapsack", "edgemoe"]
DEFAULT_GROUP_SIZES = (32, 64, 128)
DENSE_BITS = (4, 8, 16)
FALLBACK_BITS = (1, 2, 3, 4)
UNIFORM_DENSE_BITS = 8
UNIFORM_GROUP_SIZE = 64
MAX_SEED = (1 << 63) - 1
"""Of the generators of torch."""
TERNARY_GROUP_SIZES = (0, 128)
"""Of three values, which lose little in wide groups: with GPTQ 1 to 3 % of their error (docs/experiments.md)."""
# Options and their defaults: what only task data gives a meaning to, and what only a search does.
_OF_DATA: dict[str, object] = {
    "tasks": (),
    "shots": 0,
    "limit": None,
    "seed": 0,
    "sensitivity": "auto",
    "search": "knapsack",
    "prune": None,
    "swaps": None,
}
_OF_SEARCH: dict[str, object] = {"bits": BITWIDTHS, "objective": None}
_OPTION_NAMES = {
    "tasks": "task",
    "comparisons": "comparisons/--no-comparisons",
    "prune": "prune-experts/--keep-experts",
}


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """target: exactly one. data: folder, JSONL or hub name; tasks: empty infers one from the fields.

    dense_bits None: searched (8 with a uniform target). group_sizes: 0 is one scale per row. objective None: the
    device profile's. limit: items per split. symmetric, of a uniform target: no minima; None: the format decides.
    confidence, of a loss target: of a verdict that may come before the last item; None: all items, at 95 %.
    fallback_bits: of a second version of every expert that is larger; None: there is none.
    prune: whether the search may leave experts out; None: where a measured loss or KL decides.
    comparisons: whether the best uniform format and EdgeMoE's search are measured; None: those that are affordable.
    swaps: measurements that improve a plan at equal bytes; None: as the search thinks right.
    Raises OptionError for values out of range or without effect.
    """

    target: Target
    data: str | None = None
    tasks: tuple[str, ...] = ()
    dense_bits: int | None = None
    bits: tuple[float, ...] = BITWIDTHS
    group_sizes: tuple[int, ...] = ()
    sensitivity: Sensitivity = "auto"
    search: Search = "knapsack"
    objective: Objective | None = None
    quantizer: str = "gptq"
    shots: int = 0
    limit: int | None = None
    seed: int = 0
    comparisons: bool | None = None
    symmetric: bool | None = None
    confidence: float | None = None
    fallback_bits: int | None = None
    prune: bool | None = None
    swaps: int | None = None

    def __post_init__(self) -> None:
        if self.dense_bits is not None and self.dense_bits not in DENSE_BITS:
            raise OptionError(f"`--dense-bits {self.dense_bits}` is not on offer", "choose 4, 8 or 16")
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
        if self.quantizer not in QUANTIZERS:
            raise OptionError(f"unknown quantizer `{self.quantizer}`", f"choose one of {', '.join(QUANTIZERS)}")
        if self.objective is not None and self.objective not in OBJECTIVES:
            raise OptionError(f"unknown objective `{self.objective}`", f"choose one of {', '.join(OBJECTIVES)}")
        if len(set(self.tasks)) < len(self.tasks):
            raise OptionError(f"`--task` names a task twice: {', '.join(self.tasks)}", "name each once")
        self._check_counts()
        self._check_fallback()
        self._check_effects()
        if self.target.kind == "uniform":
            self._check_uniform()
        elif self.data is None and self.target.kind in ("loss", "kl"):
            raise OptionError(
                f"a target of {self.target} is measured on text, and none was given",
                "add `--data DIR_OR_JSONL`, or take `--bits-per-weight`, `--size` or `--uniform`",
            )

    def _check_counts(self) -> None:
        if self.shots < 0:
            raise OptionError(f"`--shots {self.shots}` must not be negative", "leave it out for none")
        if self.limit is not None and self.limit < 1:
            raise OptionError(f"`--limit {self.limit}` must be at least 1", "leave it out to take all items")
        if not 0 <= self.seed <= MAX_SEED:
            raise OptionError(f"`--seed {self.seed}` must be from 0 to {MAX_SEED}", "leave it out for 0")
        if self.swaps is not None and self.swaps < 0:
            raise OptionError(f"`--swaps {self.swaps}` must not be negative", "write 0 for none")

    def _check_fallback(self) -> None:
        if self.fallback_bits is not None and self.fallback_bits not in FALLBACK_BITS:
            raise OptionError(f"`--fallback-bits {self.fallback_bits}` is not on offer", "choose 1, 2, 3 or 4")

    def _check_effects(self) -> None:
        """Raise OptionError for an option that changes nothing beside the others."""
        if self.confidence is not None and not 0.5 <= self.confidence < 1:
            raise OptionError(f"`--confidence {self.confidence:g}` is not from 0.5 to below 1", "write 0.95")
        if self.target.kind == "uniform":
            self._refuse_given(_OF_DATA | _OF_SEARCH, "beside `--uniform`, which searches nothing")
        elif self.data is None:
            self._refuse_given(_OF_DATA, "without `--data`")
        if self.target.kind != "uniform" or self.target.value == 16:
            self._refuse_given({"symmetric": None}, "but with `--uniform` below 16 bits")
        if self.target.kind in ("size", "bits_per_weight"):
            self._refuse_given({"objective": None}, f"beside a target of {self.target}, where every byte counts alike")
        if self.target.kind != "loss":
            self._refuse_given({"confidence": None}, f"beside a target of {self.target}; a loss is what it is about")
        if self.search == "edgemoe":
            self._refuse_given({"bits": BITWIDTHS}, "beside `--search edgemoe`, which takes 2, 4, 8 and 16")
            self._refuse_given({"comparisons": None}, "beside `--search edgemoe`, which is one of them")
            self._refuse_given({"prune": None}, "beside `--search edgemoe`, which keeps all experts")
            self._refuse_given({"swaps": None}, "beside `--search edgemoe`, which has its own search")

    def _refuse_given(self, defaults: Mapping[str, object], reason: str) -> None:
        for name, default in defaults.items():
            if getattr(self, name) != default:
                option = _OPTION_NAMES.get(name, name)
                raise OptionError(f"`--{option}` has no effect {reason}", "leave it out")

    def _check_uniform(self) -> None:
        if self.group_sizes and self.target.value == 16:
            raise OptionError("`--group-size` has no effect with `--uniform 16`", "leave it out")
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
        if self.data is not None:
            raise OptionError("`--data` has no effect with `--uniform`", "leave it out; `moec eval` measures a bundle")

    @property
    def low_spec(self) -> QuantSpec | None:
        """The format of low versions; None: there are none."""
        if self.fallback_bits is None:
            return None
        return self._unit_spec(self.fallback_bits, self.group_sizes[0] if self.group_sizes else UNIFORM_GROUP_SIZE)

    def _unit_spec(self, bits: float, group: int) -> QuantSpec:
        """Of routed experts, with minima; scales in bytes where the quantizer makes them and the bitwidth has them."""
        has_bytes = group > 0 and bits in BYTE_SCALES_BITWIDTHS and self.quantizer != "quanto"
        return QuantSpec(bits, group, byte_scales=has_bytes)

    @property
    def uniform_group(self) -> int:
        """Columns per scale of a uniform target; 0 is one scale per row."""
        if self.target.value == 16 or (self.quantizer == "quanto" and self.target.value == 8 and not self.group_sizes):
            return 0  # quanto has no others
        return self.group_sizes[0] if self.group_sizes else UNIFORM_GROUP_SIZE

    @property
    def is_uniform_symmetric(self) -> bool:
        """Whether a uniform target does without minima: as asked, else for 1.6 bits, and 4 and 8 in groups of 32.

        There a minimum would cost half a bit per weight and buy less than groups of 64 with minima lose
        (docs/experiments.md, Quantizers).
        """
        if self.symmetric is not None or self.target.kind != "uniform":
            return bool(self.symmetric)
        if self.target.value == TERNARY:
            return True
        return self.target.value in (4, 8) and self.uniform_group == 32 and self.quantizer != "quanto"

    def unit_specs(
        self, bitwidths: tuple[float, ...], plain: QuantSpec, widths: Collection[int] = ()
    ) -> tuple[QuantSpec, ...]:
        """Formats offered to routed experts, smallest first: `bits` that the device has a kernel for.

        plain: what stands for 16 bits, the format that keeps the checkpoint's own numbers.
        widths: columns of the matrices that take these formats; none: such that every group size divides.

        8 bits come with the widest group that divides a width: narrower ones add bytes and no measurable quality. 1 bit
        in groups of 32 takes nearly the bytes of 2 bits. Groups of up to 4 bits have scales and minima in bytes: the
        same output error for fewer bytes (docs/experiments.md). optimum-quanto has no bitwidth below 2, and its own
        scales. Raises OptionError where nothing is left.
        """
        specs: list[QuantSpec] = []
        excluded = {1, TERNARY} if self.quantizer == "quanto" else set()
        for bits in sorted((set(self.bits) & set(bitwidths)) - excluded):
            if bits == 16:
                specs.append(plain)
            elif bits == TERNARY:
                specs += self._ternary_specs()
            else:
                specs += [self._unit_spec(bits, size) for size in self._groups_of(bits, widths)]
        if not specs:
            reason = "has a kernel on this device"
            if excluded & set(self.bits):
                reason += ", and optimum-quanto has none below 2"
            raise OptionError(f"no bitwidth of {self.bits} {reason}", "offer others with `--bits`")
        return tuple(specs)

    def _groups_of(self, bits: float, widths: Collection[int]) -> list[int]:
        """The group sizes on offer to a bitwidth below 16 with codes of whole bits, widest first, 0 before all."""
        groups = sorted(set(self.group_sizes or DEFAULT_GROUP_SIZES), key=lambda size: (size != 0, -size))
        if bits == 8 and self.quantizer == "quanto":
            return [0]  # all that the package has
        if bits == 8:
            fitting = [[size for size in groups if not size or width % size == 0] for width in widths or (0,)]
            widest = {sizes[0] for sizes in fitting if sizes} or {groups[0]}
            return [size for size in groups if size in widest]
        if bits == 1:
            return [size for size in groups if size != 32] or [groups[0]]
        return groups

    def _ternary_specs(self) -> list[QuantSpec]:
        """Three values in the groups on offer that hold whole tiles. Raises OptionError if named and none does."""
        sizes = sorted(set(self.group_sizes or TERNARY_GROUP_SIZES), key=lambda size: (size != 0, -size))
        sizes = [size for size in sizes if size % TERNARY_COLUMNS == 0]
        if not sizes and self.bits != BITWIDTHS:
            raise _no_ternary_groups(self.group_sizes)
        return [QuantSpec(TERNARY, size, symmetric=True) for size in sizes]

    def dense_widths(self) -> tuple[int, ...]:
        """Bitwidths offered to attention, embedding and lm_head; one if fixed."""
        return DENSE_BITS if self.dense_bits is None else (self.dense_bits,)

    def to_plain(self) -> dict[str, str]:
        """For the manifest: what decides the bytes, as text. The place of the data is left out."""
        return {
            "target": str(self.target),
            "tasks": ",".join(self.tasks),
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
            **({} if self.confidence is None else {"confidence": f"{self.confidence:g}"}),
            **({} if self.swaps is None else {"swaps": str(self.swaps)}),
            **({} if self.prune is None else {"prune": str(self.prune).lower()}),
            **({} if self.fallback_bits is None else {"fallback_bits": str(self.fallback_bits)}),
        }


def _no_ternary_groups(sizes: tuple[int, ...]) -> OptionError:
    found = ", ".join(map(str, sizes))
    return OptionError(
        f"{TERNARY} bits come in groups of a multiple of {TERNARY_COLUMNS} columns, found `--group-size {found}`",
        "add 128, or 0 (per row)",
    )


@dataclass(slots=True)
class Talk:
    """How a compile speaks: `note` takes a sentence, `progress` opens a bar of that title and returns its callback."""

    note: Callable[[str], None] = field(default=lambda sentence: None)
    progress: Callable[[str], Progress] = field(default=lambda title: lambda done, total: None)
