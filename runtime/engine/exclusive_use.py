"""One thread at a time: a lock that is tried and not waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from moec.manifests.errors import ExecutionError


class ExclusiveUse:
    """Refuses a second thread while one is inside. The same thread may enter again.

    A generator leaves before it yields, so that several can take turns in one thread or in several.
    """

    def __init__(self) -> None:
        """acquire(False): whether the caller may enter, who then calls `release`; as `with`, which takes longer."""
        lock = threading.RLock()
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> None:
        """Raises ExecutionError if another thread is inside."""
        if not self.acquire(False):
            raise self.refusal()

    def __exit__(self, *raised: object) -> None:
        self.release()

    def refusal(self) -> ExecutionError:
        """Return the error of a thread that may not enter."""
        return ExecutionError(
            "the engine is in use by another thread", "let the threads take turns, or load a second engine"
        )

    def taken_over(self) -> ExecutionError:
        """Return the error of a generation that another call came between."""
        return ExecutionError(
            "another call has taken over the keys and values of this generation",
            "finish one generation before the next, or load a second engine",
        )


class _Exclusive(Protocol):
    exclusive: ExclusiveUse


_Self = TypeVar("_Self", bound=_Exclusive)
_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def exclusively(
    method: Callable[Concatenate[_Self, _Parameters], _Result],
) -> Callable[Concatenate[_Self, _Parameters], _Result]:
    """Decorate a method that one thread at a time may be in, of an object with a field `exclusive`."""

    @wraps(method)
    def call(self: _Self, /, *args: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
        with self.exclusive:
            return method(self, *args, **options)

    return call
