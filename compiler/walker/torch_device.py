"""The device of torch on which a compile passes texts through layers and quantizes experts.

Texts between layers, codes and every result stay in host memory. The loaded layer, one batch, the second moments of a
layer and the output head are on the device while they are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moec.manifests.errors import DoesNotFit, OptionError

CPU = torch.device("cpu")


def find_device(name: str) -> torch.device:
    """Return the device of `--torch-device`. Raises OptionError for one that torch cannot use."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise OptionError(
            f"torch has no device `{name}` here: {reason}", "leave out `--torch-device` to compute on the CPU"
        ) from error
    return device


@contextmanager
def device_errors(name: str) -> Iterator[None]:
    """Raise DoesNotFit where a device other than the CPU runs out of its own memory.

    name: value of `--torch-device`.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"`{name}` has too little memory for a layer with its second moments, or for the output head",
            "free memory of the device and give `--resume`, or leave out `--torch-device` to begin again on the CPU",
        ) from error
