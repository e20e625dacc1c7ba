"""Find out whether Triton's kernels work on a device.

PyTorch for CUDA brings Triton. Triton needs a C compiler to start kernels.
"""

from __future__ import annotations

import torch

from moec.manifests.quant import QuantSpec

from .torch_weights import unpack


def why_no_triton(device: torch.device) -> str:
    """Return why a device computes without Triton, as text for people, or "" if its kernels work.

    One small matrix is unpacked, and its bits are compared. Triton fails in many ways (no package, no compiler, a
    device that is too old), so any error counts.
    """
    if device.type != "cuda":
        return "experts without Triton, which needs a GPU"
    spec, rows, columns = QuantSpec.parse("q4g32"), 16, 64
    data = (torch.arange(spec.packed_bytes(rows, columns)) % 64).to(device, torch.uint8)
    try:
        from . import triton_products

        if torch.equal(triton_products.unpack(data, rows, columns, spec), unpack(data, rows, columns, spec)):
            return ""
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return f"experts without Triton, which failed here ({type(error).__name__}: {first_line[:120]})"
    return "experts without Triton, whose kernels compute something else here"
