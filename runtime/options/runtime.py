"""RuntimeOptions: everything a user can set about how a bundle runs. Only the lossy modes change a logit."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Literal

from moec.manifests.errors import OptionError

from .field_types import check_field_types
from .lossy import CACHE_STATES, CacheState, LossyModes, parse_modes

POLICIES = ("lrfu", "edgemoe", "lru", "lfu", "hobbit", "hobbit-printed")
WEIGHTED_POLICIES = ("hobbit", "hobbit-printed")
PREFETCHERS = ("lookahead", "path", "popularity", "off")
PREFETCH_RULES = ("likely", "spread", "first-miss")
KV_NAMES = ("float32", "float16")
IO_MODES = ("auto", "direct", "buffered", "mmap")
MAX_THREADS = 256
MAX_READERS = 32
MAX_PREFETCH_LAYERS = 4
MAX_PREFETCH_EXPERTS = 1024
_WEIGHT = re.compile(r"\s*(?:[01]|0?\.[0-9]{1,9}|1\.0{1,9})\s*")
_SUM_TOLERANCE = 1e-3  # three digits after the point are what `moec tune` writes
_UNITS = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip

Policy = Literal["lrfu", "edgemoe", "lru", "lfu", "hobbit", "hobbit-printed"]
Prefetch = Literal["lookahead", "path", "popularity", "off"]
PrefetchRule = Literal["likely", "spread", "first-miss"]
KvType = Literal["float32", "float16"]
IoMode = Literal["auto", "direct", "buffered", "mmap"]
Cooperation = Literal["auto", "published", "gpu", "cpu"]
DensePlace = Literal["auto", "device", "host"]
COOPERATIONS = ("auto", "published", "gpu", "cpu")
DENSE_PLACES = ("auto", "device", "host")
TORCH_CPU = "torch-cpu"
_ACCELERATOR = re.compile(r"cuda(?::[0-9]{1,3})?")


def parse_bytes(text: str) -> int:
    """`512MiB`, `2GB`, `4096` -> bytes. GB is 10**9, GiB 2**30; a bare G is refused. Raises OptionError."""
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*", text)
    if match is None or (match[2] and match[2] not in _UNITS):
        raise OptionError(f"`{text}` is not a size", "write a size like `512MiB`, `2GiB` or `2GB`")
    if "." in match[1] and not match[2]:
        raise OptionError(f"`{text}` is not a whole number of bytes", "add a unit, like `2GiB`")
    return int(Fraction(match[1]) * _UNITS[match[2] or "B"])


def parse_cache(text: str, expert_bytes: int) -> int:
    """`BYTES` or `PERCENT%` of this bundle's routed-expert bytes -> bytes. Raises OptionError."""
    if text.strip().endswith("%"):
        number = text.strip()[:-1]
        if not re.fullmatch(r"\d+(\.\d+)?", number) or not 0 < float(number) <= 100:
            raise OptionError(f"`{text}` is not a share of the experts", "write `50%`, more than 0 and at most 100")
        return int(expert_bytes * float(number) / 100)
    return parse_bytes(text)


@dataclass(frozen=True, slots=True)
class EvictionWeights:
    """What recency, uses, uses at high precision and nearness of the layer count in HOBBIT's score: 1 together."""

    lru: float
    lfu: float
    lhu: float
    fld: float

    def to_text(self) -> str:
        """As `parse_weights` reads it."""
        return ",".join(f"{weight:g}" for weight in (self.lru, self.lfu, self.lhu, self.fld))


def parse_weights(text: str) -> EvictionWeights:
    """`LRU,LFU,LHU,FLD`, like `0.1,0.5,0,0.4`. Raises OptionError unless all are 0 to 1 and add up to 1 (to 0.001)."""
    parts = text.split(",")
    if len(parts) == len(fields(EvictionWeights)) and all(_WEIGHT.fullmatch(part) for part in parts):
        numbers = [float(part) for part in parts]
        if abs(sum(numbers) - 1) <= _SUM_TOLERANCE:
            return EvictionWeights(*numbers)
    raise OptionError(
        f"`{text[:60]}` is not four weights that add up to 1", "write LRU,LFU,LHU,FLD, like `0.1,0.5,0,0.4`"
    )


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """memory: whole-process budget (`2GiB`), expert_cache: `BYTES` or `PERCENT%`; neither: 7/8 of available memory.

    context 0: min(model, 4096). threads 0: all the process may use. slots: sequences decoded side by side.
    policy_weights: `LRU,LFU,LHU,FLD` of the policies `hobbit` and `hobbit-printed`.
    readers: reads of experts under way at once, at most. prefetch_layers: how far ahead experts are guessed.
    prefetch_rule: `likely` reads what earlier predictions say is sure enough; `spread` three eighths of the top-k of
    the next layer, fewer the further one is; `first-miss` the same up to the first layer that lacks some.
    prefetch_experts: so many of the next layer for each token, and `likely` is `spread`; 0: as the rule says.
    kv: what keys and values are kept as; `float16` takes half the memory, and rounds them.
    verify: compare every expert with its digest when it is first read. cache_state: `warm` fills the cache before the
    first token with what calibration saw most often, `cold` leaves it empty.
    dynamic_precision, big_little, cache_routing: lossy modes, as `modes` reads them; None is off.
    accelerator: `cuda`, `cuda:N` or `torch-cpu`, which computes some experts beside the CPU; accelerator_memory: its
    own budget; cooperation: which missing experts are copied to it, see accelerator/planner.py; accelerator_dense:
    where attention, shared experts and head are computed, `auto` where they were measured to be faster, if they fit.
    """

    memory: str | None = None
    expert_cache: str | None = None
    context: int = 0
    policy: Policy = "lrfu"
    policy_weights: str | None = None
    prefetch: Prefetch = "lookahead"
    io: IoMode = "auto"
    kv: KvType = "float32"
    threads: int = 0
    slots: int = 1
    verify: bool = True
    readers: int = 2
    prefetch_layers: int = 2
    prefetch_experts: int = 0
    prefetch_rule: PrefetchRule = "likely"
    cache_state: CacheState = "warm"
    dynamic_precision: str | None = None
    big_little: str | None = None
    cache_routing: str | None = None
    accelerator: str | None = None
    accelerator_memory: str | None = None
    cooperation: Cooperation = "auto"
    accelerator_dense: DensePlace = "auto"

    def __post_init__(self) -> None:
        check_field_types(self)
        self._check_names()
        self._check_weights()
        _ = self.modes
        if self.context < 0 or self.threads < 0 or self.slots < 1:
            raise OptionError("context and threads must not be negative, slots must be at least 1")
        if not 1 <= self.readers <= MAX_READERS:
            raise OptionError(f"readers must be 1 to {MAX_READERS}, found {self.readers}", "leave it out for 2")
        if not 1 <= self.prefetch_layers <= MAX_PREFETCH_LAYERS:
            raise OptionError(
                f"layers to prefetch must be 1 to {MAX_PREFETCH_LAYERS}, found {self.prefetch_layers}",
                "leave it out for 2, or take `--prefetch off`",
            )
        if not 0 <= self.prefetch_experts <= MAX_PREFETCH_EXPERTS:
            raise OptionError(
                f"experts to prefetch must be 0 to {MAX_PREFETCH_EXPERTS}, found {self.prefetch_experts}",
                "leave it out for as many as the rule says",
            )
        if self.threads > MAX_THREADS:
            raise OptionError(f"threads must be at most {MAX_THREADS}, found {self.threads}", "leave it out for all")
        self._check_accelerator()

    def _check_accelerator(self) -> None:
        if self.cooperation not in COOPERATIONS:
            raise OptionError(f"unknown cooperation `{self.cooperation}`", f"choose one of {', '.join(COOPERATIONS)}")
        if self.accelerator_dense not in DENSE_PLACES:
            raise OptionError(
                f"unknown place of dense weights `{self.accelerator_dense}`", f"choose one of {', '.join(DENSE_PLACES)}"
            )
        if self.accelerator is None:
            if self.accelerator_memory is not None or (self.cooperation, self.accelerator_dense) != ("auto", "auto"):
                raise OptionError("an accelerator's options have no effect without one", "add `--accelerator cuda`")
            return
        if self.accelerator != TORCH_CPU and not _ACCELERATOR.fullmatch(self.accelerator):
            raise OptionError(f"unknown accelerator `{self.accelerator[:40]}`", f"choose cuda, cuda:N or {TORCH_CPU}")
        if self.accelerator == TORCH_CPU and self.accelerator_memory is None:
            raise OptionError(f"`{TORCH_CPU}` shares the host's memory", "say how much: `--accelerator-memory SIZE`")
        if self.modes.reads_cache and self.accelerator_memory is None:
            raise OptionError(
                "`--dynamic-precision` and `--cache-routing` decide by which experts are at hand, and how many lie on "
                "an accelerator would depend on what is free there",
                "say how much: `--accelerator-memory SIZE`",
            )

    def _check_names(self) -> None:
        offers = {
            "policy": (self.policy, POLICIES),
            "cache state": (self.cache_state, CACHE_STATES),
            "prefetch": (self.prefetch, PREFETCHERS),
            "prefetch rule": (self.prefetch_rule, PREFETCH_RULES),
            "io mode": (self.io, IO_MODES),
            "type of keys and values": (self.kv, KV_NAMES),
        }
        for kind, (name, names) in offers.items():
            if name not in names:
                raise OptionError(f"unknown {kind} `{name}`", f"choose one of {', '.join(names)}")

    @property
    def modes(self) -> LossyModes:
        """The lossy modes. Raises OptionError for what they cannot mean."""
        return parse_modes(self.dynamic_precision, self.big_little, self.cache_routing)

    @property
    def prefetch_text(self) -> str:
        """For the `mode:` line."""
        if self.prefetch == "off":
            return self.prefetch
        count = f" of {self.prefetch_experts}" if self.prefetch_experts else ""
        return self.prefetch + count + " to the first miss" * (self.prefetch_rule == "first-miss")

    def lossless(self) -> RuntimeOptions:
        """The same without lossy modes."""
        return replace(self, dynamic_precision=None, big_little=None, cache_routing=None)

    def _check_weights(self) -> None:
        if self.policy_weights is None:
            return
        if self.policy not in WEIGHTED_POLICIES:
            raise OptionError(f"weights have no effect on the policy `{self.policy}`", "add `--policy hobbit`")
        parse_weights(self.policy_weights)
