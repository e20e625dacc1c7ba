"""The quantizer `auto-gptq`: the class GPTQ of the package auto-gptq, on the second moments of a compile.

The package was archived in 2025, and importing it as a whole fails with transformers 5. So only the module of the class
is imported. The class needs no GPU. It makes one scale and one zero per group from the range of the group, without a
search of clips and without a fit of scales, which `gptq` has. Nothing of the package enters a bundle.
Source: AutoGPTQ 0.7.1, auto_gptq/quantization/gptq.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
import types
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moec.manifests.errors import MissingDependency, OptionError
from moec.manifests.quant import QuantSpec

from ..quantized import QuantizedMatrix, to_half

DAMPING = 0.01
"""Share of the mean diagonal that is added to the second moment: the package's default."""
_NAME = "auto_gptq"


def quantize_auto_gptq(weight: Tensor, spec: QuantSpec, second_moment: Tensor | None, tokens: int) -> QuantizedMatrix:
    """Quantize with AutoGPTQ.

    weight: [N, K] floats, finite.
    second_moment: [K, K], sum of x x^T over the inputs, or None: all inputs count alike, and the weights are rounded.
    tokens: number of inputs.
    Raises OptionError for formats that the class cannot express: below 2 bits.
    Raises ValueError if the format does not fit.
    Raises RangeExceeded if its scales would exceed float16.
    Raises MissingDependency without the package.
    """
    if spec.bitwidth == 16 or weight.ndim != 2 or not spec.fits(weight.shape[1]):
        raise ValueError(f"format {spec} cannot hold a matrix of shape {tuple(weight.shape)}")
    check_format(spec)
    rows, columns = weight.shape
    layer = torch.nn.Linear(columns, rows, bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight.detach().float().clone(), requires_grad=False)
    with torch.inference_mode(False), torch.no_grad():
        solver = gptq_class()(layer)
        solver.quantizer.configure(int(spec.bitwidth), perchannel=True, sym=spec.symmetric, mse=False)
        moment = torch.eye(columns) if second_moment is None or not tokens else second_moment.float() * (2 / tokens)
        solver.H, solver.nsamples = moment.clone(), max(tokens, 1)
        scale, zero, _ = solver.fasterquant(percdamp=DAMPING, group_size=spec.group_size or -1)
    rounded = layer.weight.data.reshape(rows, scale.shape[1], -1)
    codes = (rounded / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, spec.largest_code)
    scales, minima = to_half(scale), to_half(-scale * zero)
    return QuantizedMatrix(
        spec, codes.reshape(rows, columns).to(torch.uint8), scales, None if spec.symmetric else minima
    )


def check_format(spec: QuantSpec) -> None:
    """Raise OptionError for a format below 16 bits that the class cannot express."""
    if spec.bitwidth < 2:
        raise OptionError(
            f"AutoGPTQ has no weights of {spec.bitwidth:g} bits", "choose 2 bits or more, or another `--quantizer`"
        )


class _TorchWithoutCuda:
    """Torch for the module of the class, which waits for a GPU even where there is none."""

    cuda = types.SimpleNamespace(synchronize=lambda *_: None, empty_cache=lambda: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def gptq_class() -> Any:
    """Return the class. The first call imports it."""
    with _importing:
        return import_class()


@cache
def import_class() -> Any:
    """Import the module of the class without the package's own `__init__`. Raises MissingDependency."""
    remedy = "pip install --no-deps auto-gptq"
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.submodule_search_locations is None:
        raise MissingDependency("the quantizer `auto-gptq` needs the package `auto-gptq`", remedy)
    package, earlier = types.ModuleType(_NAME), sys.modules.get(_NAME)
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations)
    sys.modules[_NAME] = package
    try:
        module: Any = importlib.import_module(f"{_NAME}.quantization.gptq")
    except ImportError as error:
        raise MissingDependency(
            f"the module of AutoGPTQ's class cannot be imported: {error}", f"{remedy}, version 0.7.1"
        ) from error
    finally:
        for name in [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]:
            del sys.modules[name]
        if earlier is not None:
            sys.modules[_NAME] = earlier
    logging.getLogger(module.logger.name).setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        module.torch = _TorchWithoutCuda()
    return module.GPTQ


_importing = threading.Lock()
