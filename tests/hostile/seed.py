"""Seeds: small hostile inputs that once showed a defect, each with its command line and the required end.

`tests/gates/test_g10_seeds.py` replays all of them through the command line. Every defect by hostile input adds a
seed to `SEEDS` of a module `tests/hostile/seeds_*.py`. The gate finds these modules by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Seed:
    """One hostile input.

    name: the fault in it.
    arguments: arguments of `moec`. `{bundle}` is the folder of the changed bundle, `{work}` an empty folder next to it.
    exit_codes: allowed exit codes, of 0, 1, 2, 3 and 130.
    change: changes a new tiny bundle. It may put other files next to the folder.
    standard_input: bytes of standard input.
    seal: whether the digests are corrected after the change.
    """

    name: str
    arguments: tuple[str, ...]
    exit_codes: frozenset[int]
    change: Callable[[Path], None] | None = None
    standard_input: bytes = b""
    seal: bool = True
