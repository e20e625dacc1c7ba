"""Compile a grammar once, in a process of its own, and tell what it takes.

`masks.py` starts the process, and `limited_child.py` of the runtime runs this file in it, under limits. It imports only
the standard library and llguidance. The settings are limits of llguidance. A request has `grammar`. The time and memory
of compiling depend on the grammar, not on the vocabulary, so one of single bytes will do.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Mapping, Sequence
from typing import Any

IS_FORKED = True
"""Each grammar is compiled in a process of its own, so that what it takes can be measured, and is given back."""
_END = 256


def prepare() -> None:
    import llguidance  # noqa: F401


class _Bytes:
    """A vocabulary of all bytes and an end token."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = _END
    special_token_ids = (_END,)
    tokens = (*(bytes([value]) for value in range(_END)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Job:
    """Compiles grammars."""

    def __init__(self, settings: Mapping[str, Any], files: Sequence[bytes | None]) -> None:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        self._matcher: Any = LLMatcher
        vocabulary: Any = _Bytes()
        self._tokenizer = LLTokenizer(vocabulary, _END + 1, [_END], LLTokenizer.json_slices())
        self._limits = LLParserLimits(**settings)

    def answer(self, request: Mapping[str, Any]) -> tuple[str, str]:
        """Return `sound` with the memory and the time, or `refused` and why.

        The memory is `memory_bytes`, the time is `cpu_s`, as JSON. `memory` says that there was not enough.
        """
        before_bytes = _own_bytes()
        try:
            matcher = self._matcher(self._tokenizer, request["grammar"], log_level=0, limits=self._limits)
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                return "refused", str(matcher.get_error())
        except MemoryError:
            return "memory", ""
        except Exception as error:
            return "refused", str(error)
        size = max(_own_bytes() - before_bytes, 0)
        return "sound", json.dumps({"memory_bytes": size, "cpu_s": time.process_time()})


def _own_bytes() -> int:
    """Return the resident memory that belongs to no file."""
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, shared = map(int, file.read().split()[:3])
    return (resident - shared) * resource.getpagesize()
