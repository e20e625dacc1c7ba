"""Lossy modes of a run and their settings. By default all are off, and the run is exact."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from moec.manifests.errors import OptionError

CacheState = Literal["warm", "cold"]
CACHE_STATES = ("warm", "cold")
ExpertActivations = Literal["float32", "bfloat16"]
EXPERT_ACTIVATIONS = ("float32", "bfloat16")
_NUMBER = re.compile(r"[01]|[01]?\.[0-9]{1,9}")
_COUNT = re.compile(r"[1-9][0-9]{0,5}")
HALF = "K/2"
MODE_OPTIONS = ("dynamic_precision", "big_little", "cache_routing", "expert_activations")
"""Names of the modes in records, in the order of `parse_modes`."""
AUTO, PUBLISHED = "auto", "published"
"""Values of `--lossy` that take thresholds from the records of a bundle."""


@dataclass(frozen=True, slots=True)
class DynamicPrecision:
    """Thresholds of an expert's unimportance, from 0 to 1.

    The unimportance of an expert is the weight share of the experts ranked before it.
    low_above: T1. A missed expert above it is computed in its low version.
    skip_above: T2. A missed expert above it is skipped.
    Source: HOBBIT, token-level dynamic loading.
    """

    low_above: float
    skip_above: float

    @property
    def needs_low_versions(self) -> bool:
        """True if any unimportance selects a low version."""
        return self.low_above < self.skip_above

    def to_text(self) -> str:
        """Return the text that `parse_dynamic_precision` reads."""
        return f"{self.low_above:g},{self.skip_above:g}"


@dataclass(frozen=True, slots=True)
class BigLittle:
    """A little model with fewer experts per token, and the fallback to all K experts.

    gamma: least probability of the likeliest next token. Below it the token is computed again with all K experts.
    experts: experts of the little model, per token and layer; 0: half of the layer's K.
    Source: MoBiLE, big-little experts.
    """

    gamma: float
    experts: int = 0

    def little_top_k(self, top_k: int) -> int:
        """Return the experts of the little model in a layer that has top_k: at least 1, at most top_k."""
        return min(self.experts or max(top_k // 2, 1), top_k)

    def to_text(self) -> str:
        """Return the text that `parse_big_little` reads."""
        return f"gamma={self.gamma:g},k={self.experts or HALF}"


@dataclass(frozen=True, slots=True)
class CacheRouting:
    """Replacement of missed experts. The best expert of a token stays.

    margin: a cached expert may replace a missed one if its score is lower by at most this share.

    drop: a missed expert is dropped if its weight is below this share of the token's weight.
    """

    margin: float
    drop: float

    def to_text(self) -> str:
        """Return the text that `parse_cache_routing` reads."""
        return f"margin={self.margin:g},drop={self.drop:g}"


@dataclass(frozen=True, slots=True)
class LossyModes:
    """Lossy modes of one run; None: off.

    expert_activations: type to which bfloat16 experts round what they read. It decides nothing about experts.
    """

    dynamic_precision: DynamicPrecision | None = None
    big_little: BigLittle | None = None
    cache_routing: CacheRouting | None = None
    expert_activations: ExpertActivations | None = None

    @property
    def is_exact(self) -> bool:
        """True if all modes are off."""
        return not self.parts()

    @property
    def decides(self) -> bool:
        """True if a mode decides which experts are computed."""
        return self.reads_cache or self.big_little is not None

    @property
    def reads_cache(self) -> bool:
        """True if a decision depends on the cached experts, and so on earlier passes."""
        return self.dynamic_precision is not None or self.cache_routing is not None

    def parts(self) -> dict[str, str]:
        """Return the settings of the modes that are on, by name of the option."""
        values = {
            "big-little": self.big_little,
            "cache-routing": self.cache_routing,
            "dynamic-precision": self.dynamic_precision,
        }
        texts = {name: value.to_text() for name, value in values.items() if value is not None}
        return texts if self.expert_activations is None else texts | {"expert-activations": self.expert_activations}

    def to_text(self) -> str:
        """Return the text of the `mode:` line."""
        return " + ".join(f"{name} {value}" for name, value in self.parts().items())


def parse_modes(
    dynamic_precision: str | None,
    big_little: str | None,
    cache_routing: str | None,
    expert_activations: str | None = None,
) -> LossyModes:
    """Return the modes of four options. Raises OptionError."""
    return LossyModes(
        None if dynamic_precision is None else parse_dynamic_precision(dynamic_precision),
        None if big_little is None else parse_big_little(big_little),
        None if cache_routing is None else parse_cache_routing(cache_routing),
        None if expert_activations is None else parse_expert_activations(expert_activations),
    )


def parse_lossy(text: str | None) -> LossyModes:
    """Return the modes of one setting, like `big-little gamma=0.7 + cache-routing margin=0.2`. Raises OptionError."""
    if text is None:
        return LossyModes()
    if text.split(" ")[0] in (AUTO, PUBLISHED):
        raise OptionError(
            f"`--lossy {text[:60]}` takes thresholds from the records of a bundle, and here is none",
            "write them, like `--lossy 'dynamic-precision 0.6,0.9'`",
        )
    setting = _parse_setting(text, "lossy")
    return parse_modes(*(setting.get(name) for name in MODE_OPTIONS))


def parse_mode_list(text: str) -> list[dict[str, str]]:
    """Return each setting of `--modes`: the text of each of its modes, by name in records.

    Settings are separated by `;`, the modes of a setting by `+`. A mode is written as by `LossyModes.to_text`.
    Two settings: `big-little gamma=0.7; dynamic-precision 0.6,1 + cache-routing margin=0.2`.
    Raises OptionError.
    """
    return [_parse_setting(setting, "modes") for setting in text.split(";")]


def _parse_setting(text: str, option: str) -> dict[str, str]:
    names = {name.replace("_", "-"): name for name in MODE_OPTIONS}
    modes: dict[str, str] = {}
    for mode in text.split("+"):
        name, _, value = mode.strip().partition(" ")
        if name not in names or names[name] in modes:
            others = "`auto`, `published`" if option == "lossy" else "`sweep`"
            raise OptionError(
                f"`--{option} {text[:60]}`: `{mode.strip()[:40]}` is not a mode",
                f"write {others}, or a setting like `big-little gamma=0.7` or `dynamic-precision 0.6,1`",
            )
        modes[names[name]] = value.strip()
    return modes


def setting_text(setting: Mapping[str, str]) -> str | None:
    """Return a setting of `parse_mode_list` as `--lossy` takes it; None for one without modes. Raises OptionError."""
    return parse_modes(*(setting.get(name) for name in MODE_OPTIONS)).to_text() or None


def parse_dynamic_precision(text: str) -> DynamicPrecision:
    """Parse `T1,T2`, for example `0.6,0.9`. Raises OptionError."""
    remedy = "write T1,T2 with 0 <= T1 <= T2 <= 1, like `0.6,0.9`"
    parts = text.split(",")
    if len(parts) != 2:
        raise OptionError(f"`dynamic-precision {text[:60]}` is not two thresholds", remedy)
    low_above, skip_above = (_share("dynamic-precision", part, remedy) for part in parts)
    if low_above > skip_above:
        raise OptionError(f"`dynamic-precision {text[:60]}`: T1 is above T2", remedy)
    return DynamicPrecision(low_above, skip_above)


def parse_big_little(text: str) -> BigLittle:
    """Parse `gamma=G,k=N`. Both are optional. `k=K/2` is half of the experts of each layer. Raises OptionError."""
    remedy = "write it like `gamma=0.7,k=K/2`"
    given = _assignments("big-little", text, {"gamma": "0.7", "k": HALF}, remedy)
    if given["k"] != HALF and not _COUNT.fullmatch(given["k"]):
        raise OptionError(f"`big-little`: k is `{given['k'][:20]}`, expected K/2 or a number of experts", remedy)
    return BigLittle(_share("big-little", given["gamma"], remedy), 0 if given["k"] == HALF else int(given["k"]))


def parse_cache_routing(text: str) -> CacheRouting:
    """Parse `margin=M,drop=D`. One of them is optional. Raises OptionError."""
    remedy = "write it like `margin=0.2,drop=0.1`"
    given = _assignments("cache-routing", text, {"margin": "0", "drop": "0"}, remedy)
    routing = CacheRouting(*(_share("cache-routing", given[name], remedy) for name in ("margin", "drop")))
    if not (routing.margin or routing.drop):
        raise OptionError("`cache-routing` with neither margin nor drop changes nothing", remedy)
    return routing


def parse_expert_activations(text: str) -> ExpertActivations | None:
    """Return `bfloat16`, or None for `float32`, which is no lossy mode. Raises OptionError."""
    if text not in EXPERT_ACTIVATIONS:
        raise OptionError(f"`expert-activations {text[:60]}` is not a type", "write `bfloat16`")
    return "bfloat16" if text == "bfloat16" else None


def _assignments(option: str, text: str, defaults: Mapping[str, str], remedy: str) -> dict[str, str]:
    """Return defaults updated by `name=value` pairs. Raises OptionError for an unknown or repeated name."""
    given: dict[str, str] = {}
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if not sign or name not in defaults or name in given:
            raise OptionError(f"`{option} {text[:60]}`: `{part[:30]}` is not one of {', '.join(defaults)}", remedy)
        given[name] = value.strip()
    return {**defaults, **given}


def _share(option: str, text: str, remedy: str) -> float:
    if not _NUMBER.fullmatch(text.strip()) or not 0 <= float(text) <= 1:
        raise OptionError(f"`{option}`: `{text.strip()[:30]}` is not a number from 0 to 1", remedy)
    return float(text)
