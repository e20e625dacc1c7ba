"""Curves from elsewhere that a report draws next to the bundle: a sweep of moec, or files of the same small form.

A file is the JSON of `moec compile --sweep`, or a list of
`{"name": TEXT, "points": [{"bytes": N, "loss": SHARE or null, "kl": NATS or null}]}`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moec.manifests.errors import InputError
from moec.manifests.files.limits import JsonLimits
from moec.manifests.files.strict_json import load_strict_json

CURVE_JSON = JsonLimits(16 << 20, containers=1 << 17, values=1 << 20, texts=1 << 19, depth=16)
"""A file of `--curve`."""
MAX_CURVES = 32
"""Curves of one file."""
_GREATEST = 1e6
"""Greatest loss and KL of a point. Greater ones leave no room for others in a chart."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One plan.

    expert_bytes: bytes of its experts.
    loss: relative loss; None if unknown.
    kl: mean KL, nats per token; None if unknown.
    """

    expert_bytes: int
    loss: float | None
    kl: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """Plans of one kind."""

    name: str
    points: Sequence[CurvePoint]


def read_curves(data: bytes, place: str) -> list[Curve]:
    """Return the curves of a file.

    place: name of the file, for messages.
    Raises InputError.
    """
    try:
        plain = load_strict_json(data, CURVE_JSON)
        is_sweep = isinstance(plain, dict) and "curve" in plain
        curves = (
            curves_of_sweep(_list(plain["curve"]))
            if is_sweep
            else [
                Curve(_name(plain_curve["name"]), [_point(point) for point in plain_curve["points"]])
                for plain_curve in _list(plain)
            ]
        )
    except (ValueError, KeyError, TypeError) as problem:
        fault = f"no field {problem}" if isinstance(problem, KeyError) else str(problem)
        raise InputError(
            f"`{place}`: expected the JSON of a sweep or a list of curves, found {fault}",
            "give the JSON file that `moec compile --sweep` writes",
        ) from problem
    if len(curves) > MAX_CURVES:
        raise InputError(f"`{place}`: expected at most {MAX_CURVES} curves, found {len(curves)}", "split the file")
    return curves


def curves_of_sweep(rows: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return the curve of a sweep, and those of its baselines. They share the losses that were asked for.

    rows: points of the sweep, as its JSON has them.
    """
    plans, others = list[CurvePoint](), dict[str, list[CurvePoint]]()
    for row in rows:
        loss = _number(row["target"])
        if row["expert_packed_bytes"] is not None:
            plans.append(CurvePoint(_bytes(row["expert_packed_bytes"]), loss, _optional(row.get("kl"))))
        for name, size in row.get("baselines", {}).items():
            if size is not None:
                others.setdefault(_name(name), []).append(CurvePoint(_bytes(size), loss, None))
    return [Curve("moec", plans), *(Curve(name, points) for name, points in others.items())]


def _point(plain: Mapping[str, Any]) -> CurvePoint:
    return CurvePoint(_bytes(plain["bytes"]), _optional(plain.get("loss")), _optional(plain.get("kl")))


def _name(value: Any) -> str:
    """Return the beginning of a name. Raises TypeError, or ValueError for text that no page can hold."""
    if not isinstance(value, str):
        raise TypeError("a name that is no text")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError("a name that is not Unicode")
    return value[:80]


def _list(plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise TypeError(f"{type(plain).__name__} in place of a list")
    return plain


def _bytes(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 50:
        raise ValueError(f"a size of {value!r}"[:80])
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{type(value).__name__} in place of a number")
    if not -_GREATEST <= value <= _GREATEST:
        raise ValueError(f"a number beyond {_GREATEST:g}")
    return float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else _number(value)
