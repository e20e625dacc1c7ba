"""CPU and accelerator together: which of a layer's experts run where, and the devices that run them. Off by default.

Only `torch_device.py` and `torch_weights.py` know torch, and only `opening.py` loads them. Without an accelerator
nothing of this package is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moec.manifests.bundle import BundleManifest

    from ..options.runtime import RuntimeOptions
    from .opening import OpenedAccelerator


def open_accelerator(manifest: BundleManifest, options: RuntimeOptions) -> OpenedAccelerator | None:
    """The accelerator that the options name; None without one. Raises as `opening.open_device`."""
    if options.accelerator is None:
        return None
    from .opening import open_device

    return open_device(manifest, options, options.accelerator)
