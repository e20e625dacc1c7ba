"""RuntimeOptions: all options of a run. Only the lossy modes and `kv` change a logit."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Literal, TypedDict

from moec.manifests.errors import OptionError
from moec.manifests.runtime_limits import IO_MODES, MAX_READERS
from moec.manifests.sizes import parse_bytes

from .lossy import CACHE_STATES, CacheState, LossyModes, parse_lossy
from .readers import Readers
from .setting import check_field_types, check_settings, docstring_of, setting

POLICIES = ("lrfu", "edgemoe", "lru", "lfu", "hobbit", "hobbit-printed")
WEIGHTED_POLICIES = ("hobbit", "hobbit-printed")
PREFETCHERS = ("lookahead", "path", "popularity", "off")
PREFETCH_RULES = ("likely", "spread", "first-miss", "until-routed")
KV_NAMES = ("float32", "float16")
MAX_THREADS = 256
MAX_PREFETCH_LAYERS = 4
MAX_PREFETCH_EXPERTS = 1024
_WEIGHT = re.compile(r"\s*(?:[01]|0?\.[0-9]{1,9}|1\.0{1,9})\s*")
_SUM_TOLERANCE = 1e-3  # `moec tune` writes three digits after the point

Policy = Literal["lrfu", "edgemoe", "lru", "lfu", "hobbit", "hobbit-printed"]
Prefetch = Literal["lookahead", "path", "popularity", "off"]
PrefetchRule = Literal["likely", "spread", "first-miss", "until-routed"]
KvType = Literal["float32", "float16"]
IoMode = Literal["auto", "direct", "buffered", "mmap"]
Cooperation = Literal["auto", "twiddler", "gpu", "cpu"]
DensePlace = Literal["auto", "device", "host"]
COOPERATIONS = ("auto", "twiddler", "gpu", "cpu")
DENSE_PLACES = ("auto", "device", "host")
TORCH_CPU = "torch-cpu"
_ACCELERATOR = re.compile(r"cuda(?::[0-9]{1,3})?")


def parse_cache(text: str, expert_bytes: int) -> int:
    """Return the bytes of `SIZE` or `PERCENT%`. expert_bytes: bytes of all routed experts. Raises OptionError."""
    if text.strip().endswith("%"):
        number = text.strip()[:-1]
        if not re.fullmatch(r"\d+(\.\d+)?", number) or not 0 < float(number) <= 100:
            raise OptionError(f"`{text}` is not a share of the experts", "write `50%`, more than 0 and at most 100")
        return int(expert_bytes * float(number) / 100)
    return parse_bytes(text)


@dataclass(frozen=True, slots=True)
class EvictionWeights:
    """Weights of HOBBIT's score. Their sum is 1.

    lru: recency.
    lfu: uses.
    lhu: uses at high precision.
    fld: nearness of the layer.
    """

    lru: float
    lfu: float
    lhu: float
    fld: float

    def to_text(self) -> str:
        """Return the text that `parse_weights` reads."""
        return ",".join(f"{weight:g}" for weight in (self.lru, self.lfu, self.lhu, self.fld))


def _parse_cpus(text: str) -> tuple[int, ...]:
    """Parse `0,1` into numbers of processors that this process may use. Raises OptionError."""
    from moec.profiles.probe import allowed_processors  # a command that reads no bundle does not need it

    allowed = allowed_processors()
    parts = text.split(",")
    numbers = {int(part) for part in parts if re.fullmatch(r"[0-9]{1,4}", part)}
    if len(numbers) != len(parts) or not numbers <= allowed:
        raise OptionError(
            f"`reader-cpus={text[:60]}`: expected different numbers out of {sorted(allowed)[:64]}",
            "write the processors of the reader, like `0,1`",
        )
    return tuple(sorted(numbers))


def parse_weights(text: str) -> EvictionWeights:
    """Parse `LRU,LFU,LHU,FLD`, for example `0.1,0.5,0,0.4`.

    Raises OptionError unless each is 0 to 1 and the sum is 1 with a tolerance of 0.001.
    """
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
    memory: str | None = setting(
        None,
        "Memory of the whole process, like `2GiB`.",
        group="common",
        metavar="SIZE",
        default_text="7/8 of what is free",
    )
    expert_cache: str | None = setting(
        None,
        "Memory for routed experts: a size like `512MiB`, or a share of all experts like `50%`.",
        group="common",
        metavar="SIZE|PERCENT",
        default_text="what the budget leaves",
    )
    context: int = setting(
        0,
        "Longest sequence. A longrope model takes its long form throughout, if this exceeds its original context.",
        group="common",
        metavar="N",
        bounds=(0, None),
        default_text="the model's context, of longrope the original one, at most 4096",
    )
    policy: Policy = setting(
        "lrfu",
        "Which expert leaves a full cache first: one that was used long ago (`lru`), rarely (`lfu`), or both (`lrfu`). "
        "`edgemoe`, `hobbit` and `hobbit-printed` are the rules of these papers.",
        group="memory and cache",
        choices=POLICIES,
        place="set",
    )
    policy_weights: str | None = setting(
        None,
        "Shares of recency, uses, uses at full precision, and nearness of the layer, for `hobbit`. Their sum is 1.",
        group="memory and cache",
        metavar="LRU,LFU,LHU,FLD",
        default_text="those of the bundle, else measured ones",
        place="set",
    )
    prefetch: Prefetch = setting(
        "lookahead",
        "How experts of later layers are predicted, to be read early. `lookahead` asks the routers of "
        "these layers before their turn. `path` goes by which experts followed each other in calibration, "
        "`popularity` by which were used most.",
        group="reading ahead",
        choices=PREFETCHERS,
        is_tuned=True,
        place="set",
    )
    io: IoMode = setting(
        "auto",
        "How experts are read: without the system's file cache (`direct`), through it (`buffered`, `mmap`), or "
        "`direct` where it works (`auto`).",
        group="memory and cache",
        noun="io mode",
        choices=IO_MODES,
    )
    kv: KvType = setting(
        "float32",
        "Type of keys and values. `float16` takes half the memory and is LOSSY, because it rounds them.",
        group="memory and cache",
        noun="type of keys and values",
        choices=KV_NAMES,
    )
    threads: int = setting(
        0,
        "Threads that compute.",
        metavar="N",
        bounds=(0, MAX_THREADS),
        default_text="all processors of the process, or as many as its quota pays for",
        is_tuned=True,
    )
    slots: int = setting(1, "Sequences decoded side by side.", bounds=(1, None), place="internal")
    other_bytes: int = setting(
        0,
        "Memory of this process for other things than the run, in bytes, for example for a server.",
        bounds=(0, None),
        place="internal",
    )
    verify: bool = setting(
        True,
        "Compare experts and files with their digests.",
        place="set",
    )
    readers: int = setting(
        2,
        "Expert reads under way at once.",
        group="reading ahead",
        metavar="N",
        bounds=(1, MAX_READERS),
        is_tuned=True,
        place="set",
    )
    prefetch_layers: int = setting(
        2,
        "Number of later layers whose experts are predicted.",
        group="reading ahead",
        noun="layers to prefetch",
        metavar="N",
        bounds=(1, MAX_PREFETCH_LAYERS),
        is_tuned=True,
        place="set",
    )
    prefetch_experts: int = setting(
        0,
        "Most experts of the next layer to read ahead for each token. The rule `until-routed` reads all.",
        group="reading ahead",
        noun="experts to prefetch",
        metavar="N",
        bounds=(0, MAX_PREFETCH_EXPERTS),
        default_text="as many as the rule says",
        is_tuned=True,
        place="set",
    )
    learned_routers: bool = setting(
        True,
        "Let `lookahead` use routers that the compile learned.",
        group="reading ahead",
        place="set",
    )
    prefetch_rule: PrefetchRule = setting(
        "likely",
        "Which of the predicted experts are read ahead. `likely`: those whose predictions proved right often enough. "
        "`spread`: 3/8 of the next layer's top-k, fewer of later layers. `first-miss`: the same, up to the first layer "
        "that lacks an expert. `until-routed`: all of the next layer, until it has chosen, by a reader of its own.",
        group="reading ahead",
        choices=PREFETCH_RULES,
        is_tuned=True,
        place="set",
    )
    reader_cpus: str | None = setting(
        None,
        "Processors of the reader of the rule `until-routed`, like `0,1`.",
        group="reading ahead",
        metavar="N,N",
        default_text="little cores of the profile, or any",
        place="set",
    )
    cache_state: CacheState = setting(
        "warm",
        "Start with the most popular experts in memory, or with none.",
        group="memory and cache",
        choices=CACHE_STATES,
        place="set",
    )
    lossy: str | None = setting(
        None,
        "LOSSY: one or more modes, joined by `+`. `dynamic-precision T1,T2`: a missed expert above T1 is read with "
        "fewer bits, above T2 not at all. `big-little gamma=G,k=N`: use N experts per token, and all if no next "
        "token has a probability of G. `cache-routing margin=M,drop=D`: use an expert in memory in place of a missed "
        "one, or drop that. `expert-activations bfloat16`: round what bfloat16 experts read. `auto` takes the measured "
        "thresholds that read least within the loss target of the bundle, `auto 1%` within another loss, `published` "
        "those with HOBBIT's shares.",
        group="lossy modes",
        metavar="SETTING",
        default_text="off",
    )
    accelerator: str | None = setting(
        None,
        "Let `cuda` or `cuda:N` compute routed experts next to the CPU. `torch-cpu` only shows that this works.",
        group="accelerator",
        metavar="NAME",
        default_text="off",
    )
    accelerator_memory: str | None = setting(
        None,
        "Memory of the accelerator to fill with the most popular experts.",
        group="accelerator",
        metavar="SIZE",
        default_text="7/8 of what is free there",
    )
    cooperation: Cooperation = setting(
        "auto",
        "Which other experts are copied to the accelerator: as many as end the layer first (`auto`), each that pays "
        "alone (`twiddler`), all (`gpu`), none (`cpu`).",
        group="accelerator",
        choices=COOPERATIONS,
        place="set",
    )
    accelerator_dense: DensePlace = setting(
        "auto",
        "Where attention, shared experts and head are computed. `auto`: where it is measured to be faster.",
        group="accelerator",
        noun="place of dense weights",
        choices=DENSE_PLACES,
        place="set",
    )

    def __post_init__(self) -> None:
        check_field_types(self)
        check_settings(self)
        self._check_weights()
        _ = self.modes, self.reader_threads
        self._check_accelerator()

    def _check_accelerator(self) -> None:
        if self.accelerator is None:
            if self.accelerator_memory is not None or (self.cooperation, self.accelerator_dense) != ("auto", "auto"):
                raise OptionError("an accelerator's options have no effect without one", "add `--accelerator cuda`")
            return
        if self.accelerator != TORCH_CPU and not _ACCELERATOR.fullmatch(self.accelerator):
            raise OptionError(f"unknown accelerator `{self.accelerator[:40]}`", f"choose cuda, cuda:N or {TORCH_CPU}")
        if self.accelerator == TORCH_CPU and self.accelerator_memory is None:
            raise OptionError(f"`{TORCH_CPU}` shares the host's memory", "set it: `--accelerator-memory SIZE`")
        if self.modes.reads_cache and self.accelerator_memory is None:
            raise OptionError(
                "`dynamic-precision` and `cache-routing` decide by the experts in memory. How many an accelerator "
                "holds would depend on its free memory",
                "set it: `--accelerator-memory SIZE`",
            )

    @property
    def modes(self) -> LossyModes:
        """Lossy modes of the run. Raises OptionError for values that are not valid."""
        return parse_lossy(self.lossy)

    @property
    def uses_learned_routers(self) -> bool:
        """True if routers that a compile learned predict what is read ahead."""
        return self.learned_routers and self.prefetch == "lookahead"

    @property
    def has_own_reader(self) -> bool:
        """True if what is read ahead has a reader of its own."""
        return self.prefetch_rule == "until-routed" and self.prefetch != "off"

    @property
    def reader_threads(self) -> Readers:
        """Number and duties of the threads that read experts. Raises OptionError for processors of another form."""
        if not self.has_own_reader:
            if self.reader_cpus is not None:
                raise OptionError(
                    "`reader-cpus` has no effect without a reader of its own for what is read ahead",
                    "add `--set prefetch-rule=until-routed`",
                )
            return Readers(self.readers)
        return Readers(self.readers, () if self.reader_cpus is None else _parse_cpus(self.reader_cpus))

    @property
    def prefetch_text(self) -> str:
        """Text of the `mode:` line."""
        if self.prefetch == "off":
            return self.prefetch
        count = f" of {self.prefetch_experts}" if self.prefetch_experts else ""
        rule = {"first-miss": " to the first miss", "until-routed": " until routed"}.get(self.prefetch_rule, "")
        return self.prefetch + count + rule

    def exact(self) -> RuntimeOptions:
        """Return these options without lossy modes."""
        return replace(self, lossy=None)

    def _check_weights(self) -> None:
        if self.policy_weights is None:
            return
        if self.policy not in WEIGHTED_POLICIES:
            raise OptionError(f"weights have no effect on the policy `{self.policy}`", "add `--set policy=hobbit`")
        parse_weights(self.policy_weights)


RuntimeOptions.__doc__ = docstring_of(
    RuntimeOptions, "Everything that can be set about a run. Only lossy modes and `kv` change a logit."
)


class RuntimeSettings(TypedDict, total=False):
    """The fields of RuntimeOptions as keywords of `load`, for editors and type checkers.

    memory: may be a number of bytes, too.
    """

    memory: str | int | None
    expert_cache: str | None
    context: int
    policy: Policy
    policy_weights: str | None
    prefetch: Prefetch
    io: IoMode
    kv: KvType
    threads: int
    slots: int
    other_bytes: int
    verify: bool
    readers: int
    prefetch_layers: int
    prefetch_experts: int
    learned_routers: bool
    prefetch_rule: PrefetchRule
    reader_cpus: str | None
    cache_state: CacheState
    lossy: str | None
    accelerator: str | None
    accelerator_memory: str | None
    cooperation: Cooperation
    accelerator_dense: DensePlace
