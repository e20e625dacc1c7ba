"""The target of the search, of which a compile has exactly one, and the cost of a byte, which the search minimises.

The cost of a byte of each unit on the device follows an objective:

* `size`: each byte counts once.
* `bytes-per-token`: a byte counts as often as a token reads it.
* `tpot`: the larger of compute time and storage time decides. Bytes count by reads if storage is the bottleneck, else
  once.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec
from moec.manifests.quant import BITWIDTHS
from moec.manifests.sizes import parse_bytes

TargetKind = Literal["loss", "kl", "bits_per_weight", "size", "uniform"]
Objective = Literal["tpot", "bytes-per-token", "size"]
OBJECTIVES: tuple[Objective, ...] = ("tpot", "bytes-per-token", "size")
# Weight of plain size in the read objectives. It decides between plans with equal reads, and limits the size of
# experts that calibration never saw.
SIZE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Target:
    """The kind of target and its value.

    loss: relative loss.
    kl: nats per token.
    bits_per_weight: bits per routed weight.
    size: bytes of routed experts.
    uniform: a bitwidth.
    keeps_codes: with a uniform target: it counts for weights without codes of their own that a format holds.
    """

    kind: TargetKind
    value: float
    keeps_codes: bool = False

    def __str__(self) -> str:
        if self.keeps_codes:
            return "the checkpoint's own codes"
        return {
            "loss": f"loss {self.value:.3%}",
            "kl": f"KL {self.value:g} nats per token",
            "bits_per_weight": f"{self.value:g} bits per weight",
            "size": f"{self.value:.0f} bytes of routed experts",
            "uniform": f"uniform {self.value:g} bits",
        }[self.kind]

    @property
    def option(self) -> str:
        """The option of a uniform target, for people."""
        return "--keep-codes" if self.keeps_codes else "--uniform"


def parse_loss(text: str, option: str = "--loss") -> float:
    """Parse a loss: `2%` or `0.02` -> 0.02.

    option: names it in errors.

    Raises OptionError, also for a bare number of 1 or more, which is ambiguous.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise OptionError(f"`{option} {text}` is not a loss", "write a loss like `2%` or `0.02`")
    value = float(match[1]) / (100 if match[2] else 1)
    if not match[2] and value >= 1:
        raise OptionError(f"`{option} {text}` is ambiguous", f"write `{match[1]}%`")
    if not 0 < value < 1:
        raise OptionError(f"`{option} {text}` must be more than 0 and less than 100%", "write a loss like `2%`")
    return value


SWEEP_LOSSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def parse_sweep(text: str) -> tuple[float, ...]:
    """Parse a sweep, ascending: `0.5%..20%` -> both ends and the round losses between; `1%,2%,5%` -> these losses.

    Raises OptionError.
    """
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(sorted({parse_loss(loss_text, "--sweep") for loss_text in text.split(",")}))
    low, high = parse_loss(first, "--sweep"), parse_loss(last, "--sweep")
    if low >= high:
        raise OptionError(f"`--sweep {text}` does not go up", "write `--sweep 0.5%..20%`")
    return (low, *(loss for loss in SWEEP_LOSSES if low < loss < high), high)


def choose_target(
    loss: str | None,
    kl: float | None,
    bits_per_weight: float | None,
    size: str | None,
    uniform: float | None,
    keep_codes: bool = False,
) -> Target:
    """Return the only target that was given. Raises OptionError for none, for several, or for values out of range."""
    given: dict[str, object] = {
        "--loss": loss,
        "--kl": kl,
        "--bits-per-weight": bits_per_weight,
        "--size": size,
        "--uniform": uniform,
    }
    given["--keep-codes"] = True if keep_codes else None
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        listed = "none" if not named else " and ".join(named)
        raise OptionError(f"expected exactly one target, found {listed}", f"give one of {', '.join(given)}")
    if loss is not None:
        return Target("loss", parse_loss(loss))
    if size is not None:
        return Target("size", parse_bytes(size, "--size"))
    if keep_codes:
        return Target("uniform", 16, keeps_codes=True)
    if uniform is not None:
        if uniform not in BITWIDTHS:
            raise OptionError(f"`--uniform {uniform:g}` is not a bitwidth", "choose 1, 1.6, 2, 3, 4, 5, 6, 8 or 16")
        return Target("uniform", uniform)
    if kl is not None:
        if not 0 < kl < math.inf:
            raise OptionError(f"`--kl {kl:g}` must be a number above 0", "write `--kl 0.05`")
        return Target("kl", kl)
    value = float(bits_per_weight or 0)
    if not 0 < value <= 16:
        raise OptionError(f"`--bits-per-weight {value:g}` must be more than 0 and at most 16", "write 3.25")
    return Target("bits_per_weight", value)


def require_data(target: Target, data: str | None) -> None:
    """Raise OptionError for a target that is measured on text if no data are given."""
    if data is None and target.kind in ("loss", "kl"):
        raise OptionError(
            f"a target of {target} is measured on text, and none was given",
            "add `--data DATA`, or take `--bits-per-weight`, `--size` or `--uniform`",
        )


@dataclass(frozen=True, slots=True)
class ByteWeights:
    """Cost of one packed byte.

    experts: float64 [L, E].
    dense: cost of any dense byte.
    size_share: cost of a byte that no token reads. The rest of an expert's cost is for the tokens that read it.
    """

    experts: np.ndarray
    dense: float
    size_share: float = 1.0


def byte_weights(model: ModelSpec, popularity: np.ndarray | None, reads: bool) -> ByteWeights:
    """Return weights for reads (bytes per token) or for plain size, normalised so that a mean expert byte costs 1.

    A dense byte costs as much as a mean expert byte: it is read only once, but it takes a byte from the expert cache.
    A byte of an encoder's expert costs the same: a prompt reads each of them once, popular or not.
    popularity: uint32 [L, E], tokens per expert, or None for even use.
    reads: weigh bytes by reads.
    """
    layers, experts = model.num_layers, max(layer.experts.count for layer in model.layers)
    if not reads or popularity is None:
        return ByteWeights(np.ones((layers, experts)), 1.0)
    share = popularity / np.maximum(popularity.sum(axis=1, keepdims=True), 1)
    counts = np.array([[layer.experts.count] for layer in model.layers])
    weights = (1 - SIZE_SHARE) * share * counts + SIZE_SHARE
    weights[: model.first_decoder_layer] = 1.0
    return ByteWeights(weights, 1.0, SIZE_SHARE)


def reads_decide(objective: Objective, compute_ns: float, missed_bytes: float, storage_bytes_per_s: float) -> bool:
    """Return whether bytes are weighed by reads. For `tpot`: if storage takes longer than compute.

    TPOT = max(compute, expected missed bytes / storage bandwidth). Source: docs/design/compile.md, Objective.
    """
    if objective == "tpot":
        return missed_bytes / storage_bytes_per_s * 1e9 > compute_ns
    return objective == "bytes-per-token"
