"""Random calls of the extension, one argument spoiled in four of ten: each computes, or raises ValueError or TypeError.

As a program: python -m tests.fuzz.native SECONDS SEED NOTE [FIRST]; NOTE takes the number of the call under way.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.guarded import guarded
from tests.fuzz.native_calls import BUILDERS, NATIVE, Draw

SPOILED = 0.4
ODD: tuple[Any, ...] = (
    None, -1, 0, 1, 1 << 31, 1 << 63, -(1 << 63), 0.5, float("nan"), "text", b"bytes", [], [None], {}, object(),
)  # fmt: skip


def spoiled(value: Any, source: random.Random) -> Any:
    """Something else in place of an argument: another shape, type, order, length, or another object."""
    if isinstance(value, np.ndarray) and source.random() < 0.8:
        ways = [
            lambda: guarded(value.reshape(-1)[: max(0, value.size - 1)].copy()),
            lambda: guarded(np.resize(value, (*value.shape[:-1], value.shape[-1] + 1))) if value.ndim else value,
            lambda: guarded(np.resize(value, (value.shape[0] + 1, *value.shape[1:]))) if value.ndim else value,
            lambda: value[:0],
            lambda: value.astype(np.float64),
            lambda: value.astype(np.int8),
            lambda: np.asfortranarray(value),
            lambda: value[..., ::2],
            lambda: value.byteswap().view(value.dtype.newbyteorder()),
            lambda: guarded(np.full_like(value, -1)),
            lambda: guarded(np.full_like(value, np.iinfo(value.dtype).max if value.dtype.kind in "iu" else np.inf)),
        ]
        with np.errstate(invalid="ignore", over="ignore"):
            return source.choice(ways)()
    if isinstance(value, list) and value and source.random() < 0.8:
        changed = list(value)
        at = source.randrange(len(changed))
        way = source.randrange(4)
        if way == 0:
            changed.append(changed[at])
        elif way == 1:
            del changed[at]
        elif way == 2:
            changed[at] = source.choice(ODD)
        else:
            changed[at] = spoiled(changed[at], source)
        return changed
    return source.choice(ODD)


def one_call(seed: int, number: int) -> str:
    """Make one call and say how it ended. Raises whatever is neither a result nor a refusal."""
    draw = Draw(seed * 1_000_003 + number)
    NATIVE.select(draw.source.choice(NATIVE.available()))
    NATIVE.set_threads(draw.source.randint(1, 3))
    call = draw.source.choice(BUILDERS)(draw)
    is_spoiled = bool(call.arguments) and draw.source.random() < SPOILED
    if is_spoiled:
        at = draw.source.randrange(len(call.arguments))
        call.arguments[at] = spoiled(call.arguments[at], draw.source)
    try:
        call.function(*call.arguments)
    except (ValueError, TypeError):
        if not is_spoiled:
            raise
        return "refused"
    return "accepted" if is_spoiled else "computed"


def main(seconds: float, seed: int, note: Path, first: int) -> None:
    """Call until the time is over."""
    end, counts, number = time.monotonic() + seconds, {"computed": 0, "refused": 0, "accepted": 0}, first
    with note.open("w") as file:
        while time.monotonic() < end:
            file.seek(0)
            file.write(f"{seed} {number}\n")
            file.flush()
            counts[one_call(seed, number)] += 1
            number += 1
    print(f"{number - first} calls: {counts}")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 0)
