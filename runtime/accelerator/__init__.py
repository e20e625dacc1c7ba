"""CPU and accelerator at the same time: where each expert of a layer runs, and the devices.

It is off by default: without an accelerator only this file is loaded.
`opening.py` imports torch when it opens a device. Of the other files `expert_form.py`, those named
`torch_*.py`, and `grouped/` do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moec.manifests.bundle import BundleManifest

    from ..expert_cache.records import ExpertRecords
    from ..layers.kv_cache import KVCache
    from ..model.forward import Model
    from ..options.runtime import RuntimeOptions
    from ..storage.interface import ExpertStorage
    from .cooperative import CooperativeExperts
    from .opening import OpenedAccelerator


@dataclass(frozen=True, slots=True)
class HostParts:
    """The parts of a run on the CPU, as they are before the cache begins to read.

    records: calibration frequencies of the experts.
    is_in_host: returns whether the bytes of a stored expert are in memory now.
    """

    model: Model
    kv: KVCache
    storage: ExpertStorage
    records: ExpertRecords
    is_in_host: Callable[[int], bool]


def open_accelerator(manifest: BundleManifest, options: RuntimeOptions) -> OpenedAccelerator | None:
    """Return the accelerator that the options name, or None without one.

    Raises the errors of `opening.open_device`.
    """
    if options.accelerator is None:
        return None
    from .opening import open_device

    return open_device(manifest, options, options.accelerator)


def start_cooperation(
    opened: OpenedAccelerator | None, manifest: BundleManifest, options: RuntimeOptions, host: HostParts
) -> CooperativeExperts | None:
    """Upload weights to the accelerator that was opened, and return its experts; None without one.

    Call it before the cache begins to read.
    Raises the errors of `opening.cooperate`.
    """
    if opened is None:
        return None
    from .opening import cooperate

    return cooperate(opened, manifest, options, host)
