"""Use by one thread at a time. A second thread gets an error and does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from moec.manifests.errors import ExecutionError


class ExclusiveUse:
    """A lock that refuses a second thread while one is inside. The same thread may enter again.

    acquire: called with False, returns whether the caller may enter. Then the caller must call `release`.
    `with` does the same and takes longer.
    A generator leaves before it yields, so that several generators can take turns, in one thread or in several.
    """

    def __init__(self) -> None:
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> None:
        """Enter. Raises ExecutionError if another thread is inside."""
        if not self.acquire(False):
            raise self.refusal()

    def __exit__(self, *raised: object) -> None:
        self.release()

    def refusal(self) -> ExecutionError:
        """Return the error of a thread that may not enter."""
        return ExecutionError(
            "the engine is in use by another thread", "let the threads take turns, or load a second engine"
        )


class _Exclusive(Protocol):
    exclusive: ExclusiveUse


_Self = TypeVar("_Self", bound=_Exclusive)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def exclusively(
    method: Callable[Concatenate[_Self, _Parameters], _Result],
) -> Callable[Concatenate[_Self, _Parameters], _Result]:
    """Let one thread at a time run a method. Its object has a field `exclusive`."""

    @wraps(method)
    def call(self: _Self, /, *args: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        with self.exclusive:
            return method(self, *args, **options)

    return call
