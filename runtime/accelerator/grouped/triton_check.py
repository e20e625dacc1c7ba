"""Find out whether Triton's kernels work on a device.

PyTorch for CUDA brings Triton. Triton needs a C compiler to start kernels.
"""

from __future__ import annotations

import numpy as np
import torch

from moec.manifests.quant import QuantSpec

from ..image import ExpertForm, MatrixForm, Part
from ..torch_weights import LayerRows, compute_expert

_SIZE = 64
_COUNTS = (1, 8, 40)
"""Tokens of the expert that is computed. Each number takes another kernel."""


_SCALE_BYTES, _RECORD_BYTES = 2 * 16, 2 * 16 + 4 * 64
"""Bytes of the scales of a group of 16 rows, and with its codes; see docs/format.md, Packing."""


def why_no_triton(device: torch.device) -> str:
    """Return why a device computes without Triton, as text for people, or "" if its kernels work.

    A small expert is computed with each kernel, twice, so that it is also recorded. Triton fails in many ways (no
    package, no compiler, a device that is too old), so any error counts.
    """
    if device.type != "cuda":
        return "experts without Triton, which needs a GPU"
    try:
        with torch.cuda.device(device):
            differs = differs_from_torch(device)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        return f"experts without Triton, which failed here ({type(error).__name__}: {first_line[:120]})"
    return "experts without Triton, whose kernels compute something else here" if differs else ""


def differs_from_torch(device: torch.device) -> bool:
    """Return whether results of Triton's kernels differ from torch's by more than roundings."""
    from .grouped_experts import GroupedExperts

    image, form = _expert(device)
    grouped = GroupedExperts(device)
    for count in (*_COUNTS, *_COUNTS):
        rows = np.random.default_rng(count).standard_normal((count, _SIZE)).astype(np.float32)
        tokens = np.arange(count, dtype=np.int32)
        grouped.begin_layer()
        (read,) = grouped.compute([Part(image, form, tokens)], rows, lambda: None)
        at = torch.arange(count, device=device)
        expected = compute_expert(image, form, LayerRows(torch.from_numpy(rows).to(device)), at).cpu().numpy()
        if not np.allclose(read(), expected, rtol=0, atol=0.05 * float(np.abs(expected).max())):
            return True
    return False


def _expert(device: torch.device) -> tuple[torch.Tensor, ExpertForm]:
    """Return the image and form of an expert of three matrices of 4 bits, with codes drawn and scales of 2^-5."""
    spec = QuantSpec.parse("q4g32s")
    size = spec.packed_bytes(_SIZE, _SIZE)
    data = np.random.default_rng(0).integers(0, 256, (3, size // _RECORD_BYTES, _RECORD_BYTES)).astype(np.uint8)
    data[:, :, :_SCALE_BYTES].view(np.float16)[:] = np.float16(2**-5)
    gate, up, down = (MatrixForm(at * size, (at + 1) * size, _SIZE, _SIZE, spec) for at in range(3))
    return torch.from_numpy(data.reshape(-1)).to(device), ExpertForm(gate, up, down, (), "silu", 0.0)
