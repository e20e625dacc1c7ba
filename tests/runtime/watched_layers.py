"""Watch the experts of layers, whether they take one call of the extension or steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from moec.runtime import kernels
from moec.runtime.prefetch.advisor import Advisor
from moec.runtime.prefetch.pass_state import PassState


@dataclass
class WatchedLayers:
    """What layers did. calls: layers that went in one call. advice: experts that each layer read ahead."""

    calls: int = 0
    advice: list[list[int]] = field(default_factory=list)


@contextmanager
def watched_layers() -> Iterator[WatchedLayers]:
    """Watch all layers within the block."""
    watched, one_call, advise = WatchedLayers(), kernels.experts_layer, Advisor.advise

    def counted(native: Any, layer: int, *rest: Any) -> Any:
        found = one_call(native, layer, *rest)
        watched.calls += 1
        watched.advice.append(list(native.advice))
        return found

    def noted(advisor: Advisor, state: PassState) -> Any:
        found = advise(advisor, state)
        watched.advice.append(list(found[1]))
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "experts_layer", counted)
        patched.setattr(Advisor, "advise", noted)
        yield watched
