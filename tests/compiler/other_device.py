"""A second device of torch without hardware: tensors say that they are on it, and compute on the CPU.

Torch's device `meta` lends its name. Inside `other_device()`, a tensor that is made on `meta` or moved there keeps its
numbers. As on a GPU, an operation refuses tensors of two devices, and numpy refuses a tensor of the other device.
Results are those of the CPU, bit for bit. Threads of a compile run their jobs at once, because torch keeps the mode in
one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moec.compiler.workspace.parallel import Workers

OTHER = torch.device("meta")
_MOVES = ("aten._to_copy", "aten.copy_", "aten.to.")
"""Operations that take tensors of both devices."""


class OtherTensor(Tensor):
    """A tensor of the other device. host: its numbers, on the CPU."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> OtherTensor:
        maker: Any = Tensor._make_wrapper_subclass
        made: OtherTensor = maker(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=OTHER,
        )
        made.host = host
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OtherTensor({self.host!r})"


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operation of torch on the CPU, and return its tensors on the device that it would leave them on."""
    given = list(_leaves((*args, *kwargs.values())))
    others = [value for value in given if isinstance(value, OtherTensor)]
    asked = next((value for value in given if isinstance(value, torch.device)), None)
    if not others and asked != OTHER:
        return func(*args, **kwargs)
    name, is_other = str(func), bool(others) if asked is None else asked == OTHER
    if not name.startswith(_MOVES):
        here = [value for value in given if isinstance(value, Tensor) and not isinstance(value, OtherTensor)]
        if others and any(value.dim() for value in here):
            raise RuntimeError(f"{name}: expected all tensors on one device, found {OTHER} and {here[0].device}")
    elif asked is not None and is_other != bool(others):
        OtherMode.moved["there" if is_other else "back"] += 1
    if name.startswith("aten.copy_"):
        is_other = isinstance(args[0], OtherTensor)
    owner = {id(value.host): value for value in others}
    plain, named = _on_cpu(tuple(args)), {key: _on_cpu(value) for key, value in kwargs.items()}
    if func is torch.ops.aten.histc.default:  # GPUs count whole numbers, the CPU does not
        plain = (plain[0].float(), *plain[1:])
    result = func(*plain, **named)
    if not is_other:
        return result
    OtherMode.computed[name] += 1
    return _there(result, owner)


def _leaves(values: Any) -> Iterator[Any]:
    """Yield the tensors and devices among values, within lists and tuples."""
    for value in values:
        if isinstance(value, (Tensor, torch.device)):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _leaves(value)


def _on_cpu(value: Any) -> Any:
    """Return tensors and devices of the other device as those of the CPU."""
    if isinstance(value, OtherTensor):
        return value.host
    if isinstance(value, torch.device) and value == OTHER:
        return torch.device("cpu")
    return type(value)(map(_on_cpu, value)) if isinstance(value, (list, tuple)) else value


def _there(value: Any, owner: dict[int, OtherTensor]) -> Any:
    """Return the tensors of a result on the other device. owner: the tensors of the inputs, by id of their numbers."""
    if isinstance(value, Tensor):
        return owner[id(value)] if id(value) in owner else OtherTensor(value)
    if isinstance(value, (list, tuple)):
        found = [_there(part, owner) for part in value]
        return found if isinstance(value, list) else tuple(found)
    return value


class OtherMode(TorchDispatchMode):
    """Makes tensors of the other device where torch is asked for one.

    computed: number of operations on the other device, by name.
    moved: number of tensors moved `there` and `back`.
    """

    computed: ClassVar[Counter[str]] = Counter()
    moved: ClassVar[Counter[str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _at_once(self: Workers, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Run a job of Workers in this thread."""
    found: Future[Any] = Future()
    try:
        found.set_result(work(*args, **kwargs))
    except Exception as error:
        found.set_exception(error)
    return found


def _enter(self: Any) -> None:
    """Begin a block of inference mode without gradients alone. Its views do not allow tensors of this file."""
    self.without_gradients = torch.no_grad()
    self.without_gradients.__enter__()


def _exit(self: Any, *error: Any) -> None:
    self.without_gradients.__exit__(*error)


def _made(make: Callable[..., Tensor], values: Any, **named: Any) -> Tensor:
    """Make a tensor from values as `torch.tensor` does, which asks no mode."""
    device = named.pop("device", None)
    found = make(values, **named)
    return found if device is None else found.to(device)


@contextmanager
def other_device() -> Iterator[type[OtherMode]]:
    """Offer the other device inside this block. Yields the counts of what happens on it."""
    OtherMode.computed.clear()
    OtherMode.moved.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", partial(_made, torch.tensor))
        patch.setattr(Workers, "submit", _at_once)
        patch.setattr(torch.inference_mode, "__enter__", _enter)
        patch.setattr(torch.inference_mode, "__exit__", _exit)
        with OtherMode():
            yield OtherMode
