"""CPU and accelerator together. The package decides where each expert of a layer runs, and drives the devices.

It is off by default: without an accelerator only this file is loaded.
Only `opening.py` and `torch_*.py` import torch, and `opening.py` does so when it opens a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moec.manifests.bundle import BundleManifest

    from ..options.runtime import RuntimeOptions
    from .opening import OpenedAccelerator


def open_accelerator(manifest: BundleManifest, options: RuntimeOptions) -> OpenedAccelerator | None:
    """Return the accelerator that the options name, or None without one.

    Raises the errors of `opening.open_device`.
    """
    if options.accelerator is None:
        return None
    from .opening import open_device

    return open_device(manifest, options, options.accelerator)
