"""Routers of the loaded model: which experts they leave out, and which they take of equal scores.

The logits of experts that are left out become minus infinity.
All families have one operation in common: the product of a router with its weight. The weight is therefore replaced by
a tensor that masks the result of that product.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class _FewerExperts(Tensor):
    """A router's weight [E, D] whose products leave experts out. A subclass per layer holds the list."""

    left_out: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not functional.linear:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        plain = [argument.as_subclass(Tensor) if isinstance(argument, Tensor) else argument for argument in args]
        logits = func(*plain, **(kwargs or {}))
        logits[..., cls.left_out] = -torch.inf
        return logits


class FirstOfEqual(TorchFunctionMode):
    """Lets `topk` take the first of equal scores, as the runtime does. Rows without a tie are unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a call of torch."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, (values, indices) = args[0], result
        is_tied = (scores >= values.amin(-1, keepdim=True)).sum(-1, keepdim=True) > values.shape[-1]
        if not is_tied.any():
            return result
        ordered = scores.sort(dim=-1, descending=True, stable=True).indices[..., : values.shape[-1]]
        indices = torch.where(is_tied, ordered, indices)
        return torch.return_types.topk((scores.gather(-1, indices), indices))


class RouterMasks:
    """The experts that the routers of one model leave out."""

    def __init__(self, model: Any) -> None:
        """model: the transformers model."""
        self._model = model
        self._plain: dict[str, nn.Parameter] = {}

    def leave_out(self, router: str, experts: Collection[int]) -> None:
        """Leave out these experts from now on. An empty list restores all experts.

        router: name of the router's weight in the model.
        experts: indices of the experts to leave out.
        """
        path, _, attribute = router.rpartition(".")
        module = self._model.get_submodule(path)
        plain = self._plain.setdefault(router, module.get_parameter(attribute))
        if experts:
            fewer: Any = type("_FewerExperts", (_FewerExperts,), {"left_out": sorted(experts)})
            module._parameters[attribute] = nn.Parameter(plain.detach().as_subclass(fewer), requires_grad=False)
        else:
            module._parameters[attribute] = plain
