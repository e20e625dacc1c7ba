"""Which lossy modes are on, and how strong; all off is the default, and lossless."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moec.manifests.errors import OptionError

CacheState = Literal["warm", "cold"]
CACHE_STATES = ("warm", "cold")
_NUMBER = re.compile(r"[01]|[01]?\.[0-9]{1,9}")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
HALF = "K/2"


@dataclass(frozen=True, slots=True)
class DynamicPrecision:
    """low_above, T1: a miss less important than this takes the low version; skip_above, T2: it is skipped.

    Importance falls with the weights of the experts ranked before. Source: HOBBIT, token-level dynamic loading.
    """

    low_above: float
    skip_above: float

    @property
    def needs_low_versions(self) -> bool:
        """Whether any score asks for a low version."""
        return self.low_above < self.skip_above

    def to_text(self) -> str:
        """As `parse_dynamic_precision` reads it."""
        return f"{self.low_above:g},{self.skip_above:g}"


@dataclass(frozen=True, slots=True)
class BigLittle:
    """gamma: a token whose likeliest continuation is less probable is computed again with all K experts.

    experts: of the little model, per token and layer; 0: half of the layer's K. Source: MoBiLE, big-little experts.
    """

    gamma: float
    experts: int = 0

    def little_top_k(self, top_k: int) -> int:
        """Experts of the little model in a layer of so many; at least 1, never more than all."""
        return min(self.experts or max(top_k // 2, 1), top_k)

    def to_text(self) -> str:
        """As `parse_big_little` reads it."""
        return f"gamma={self.gamma:g},k={self.experts or HALF}"


@dataclass(frozen=True, slots=True)
class CacheRouting:
    """What a miss may become: a cached expert whose score is at most the share `margin` lower, or, where its weight is
    below the share `drop` of the token's, nothing. The best expert of a token is never touched.
    """

    margin: float
    drop: float

    def to_text(self) -> str:
        """As `parse_cache_routing` reads it."""
        return f"margin={self.margin:g},drop={self.drop:g}"


@dataclass(frozen=True, slots=True)
class LossyModes:
    """The modes of one run; None is off."""

    dynamic_precision: DynamicPrecision | None = None
    big_little: BigLittle | None = None
    cache_routing: CacheRouting | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether all are off."""
        return not self.parts()

    @property
    def reads_cache(self) -> bool:
        """Whether a decision depends on what is cached, and so on what ran before."""
        return self.dynamic_precision is not None or self.cache_routing is not None

    def parts(self) -> dict[str, str]:
        """The settings of those that are on, by the name of the option."""
        values = {
            "big-little": self.big_little,
            "cache-routing": self.cache_routing,
            "dynamic-precision": self.dynamic_precision,
        }
        return {name: value.to_text() for name, value in values.items() if value is not None}

    def to_text(self) -> str:
        """For the `mode:` line."""
        return " + ".join(f"{name} {value}" for name, value in self.parts().items())


def parse_modes(dynamic_precision: str | None, big_little: str | None, cache_routing: str | None) -> LossyModes:
    """The modes of three options. Raises OptionError."""
    return LossyModes(
        None if dynamic_precision is None else parse_dynamic_precision(dynamic_precision),
        None if big_little is None else parse_big_little(big_little),
        None if cache_routing is None else parse_cache_routing(cache_routing),
    )


def parse_mode_list(text: str) -> list[dict[str, str]]:
    """Settings apart by `;`, each of modes joined by `+`, as `to_text` writes them -> options of each.

    Raises OptionError.
    `big-little gamma=0.7; dynamic-precision 0.6,1 + cache-routing margin=0.2` are two.
    """
    names = {"big-little": "big_little", "cache-routing": "cache_routing", "dynamic-precision": "dynamic_precision"}
    found = []
    for setting in text.split(";"):
        options: dict[str, str] = {}
        for part in setting.split("+"):
            name, _, value = part.strip().partition(" ")
            if name not in names or names[name] in options:
                raise OptionError(
                    f"`--modes {text[:60]}`: `{part.strip()[:40]}` is not a mode",
                    "write `sweep`, or settings like `big-little gamma=0.7; dynamic-precision 0.6,1`",
                )
            options[names[name]] = value.strip()
        found.append(options)
    return found


def parse_dynamic_precision(text: str) -> DynamicPrecision:
    """`T1,T2`, like `0.6,0.9`. Raises OptionError."""
    remedy = "write T1,T2 with 0 <= T1 <= T2 <= 1, like `0.6,0.9`"
    parts = text.split(",")
    if len(parts) != 2:
        raise OptionError(f"`--dynamic-precision {text[:60]}` is not two thresholds", remedy)
    low_above, skip_above = (_share("dynamic-precision", part, remedy) for part in parts)
    if low_above > skip_above:
        raise OptionError(f"`--dynamic-precision {text[:60]}`: T1 is above T2", remedy)
    return DynamicPrecision(low_above, skip_above)


def parse_big_little(text: str) -> BigLittle:
    """`gamma=G,k=N`, either may be left out; k `K/2` is half of every layer's. Raises OptionError."""
    remedy = "write it like `gamma=0.7,k=K/2`"
    given = _assignments("big-little", text, {"gamma": "0.7", "k": HALF}, remedy)
    if given["k"] != HALF and not _COUNT.fullmatch(given["k"]):
        raise OptionError(f"`--big-little`: k is `{given['k'][:20]}`, expected K/2 or a number of experts", remedy)
    return BigLittle(_share("big-little", given["gamma"], remedy), 0 if given["k"] == HALF else int(given["k"]))


def parse_cache_routing(text: str) -> CacheRouting:
    """`margin=M,drop=D`, either may be left out. Raises OptionError."""
    remedy = "write it like `margin=0.2,drop=0.1`"
    given = _assignments("cache-routing", text, {"margin": "0", "drop": "0"}, remedy)
    found = CacheRouting(*(_share("cache-routing", given[name], remedy) for name in ("margin", "drop")))
    if not (found.margin or found.drop):
        raise OptionError("`--cache-routing` with neither margin nor drop changes nothing", remedy)
    return found


def _assignments(option: str, text: str, defaults: Mapping[str, str], remedy: str) -> dict[str, str]:
    """`name=value` pairs over their defaults. Raises OptionError for a name unknown or given twice."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign or name not in defaults or name in found:
            raise OptionError(f"`--{option} {text[:60]}`: `{part[:30]}` is not one of {', '.join(defaults)}", remedy)
        found[name] = value.strip()
    return {**defaults, **found}


def _share(option: str, text: str, remedy: str) -> float:
    if not _NUMBER.fullmatch(text.strip()) or not 0 <= float(text) <= 1:
        raise OptionError(f"`--{option}`: `{text.strip()[:30]}` is not a number from 0 to 1", remedy)
    return float(text)
