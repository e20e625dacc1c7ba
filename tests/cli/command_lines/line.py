"""One call of a command with options, and where a test finds their values.

A `Line` is one call of a command. A test follows it to its seam: a function or class that gets the work of the command.
The test notes the arguments of the seam and ends the call. `given` maps each parameter of the command to the words on
the command line, the path to its value in the arguments of the seam, and the value. A path has attributes, keys and
indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

MODES = "big-little gamma=0.5"


class Given(NamedTuple):
    """One parameter of a command line.

    words: words on the command line. `{folder}` is replaced by the folder of the test's files.
    way: path to the value in the arguments of the seam. Empty: the value is not followed.
    """

    words: str
    way: str
    value: Any


@dataclass(frozen=True)
class Line:
    """One call of a command.

    more: further words that the call needs.
    """

    command: str
    seam: str
    given: dict[str, Given]
    more: str = ""
