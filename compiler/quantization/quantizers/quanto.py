"""The quantizer `quanto`: optimum-quanto's optimizers choose scales and shifts, its operators choose codes.

No object of optimum-quanto enters a bundle. Scales and minima become float16 here, and codes are chosen again on them.
optimum-quanto defines W ~ codes * scale - shift, so the minimum of a group is -shift.
Shapes: N rows, K columns, G groups, g columns of a group.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moec.manifests.errors import MissingDependency, OptionError
from moec.manifests.quant import QuantSpec

from ..quantized import QuantizedMatrix, to_half


def quantize_quanto(weight: Tensor, spec: QuantSpec) -> QuantizedMatrix:
    """Quantize with the best optimizer of optimum-quanto for the bitwidth.

    * 2 and 4 bits: HqqOptimizer (half-quadratic).
    * 3, 5 and 6 bits: MaxOptimizer. It alone accepts a bitwidth that the package does not offer.
    * 8 bits: AbsmaxOptimizer, one scale per row.

    weight: [N, K] floats, finite.
    Raises OptionError for formats that the package lacks: below 2 bits, 8 bits in groups, 2 to 6 bits symmetric.
    Raises ValueError if the format does not fit.
    Raises RangeExceeded if its scales would exceed float16.
    Raises MissingDependency without the package.
    """
    if spec.bitwidth == 16 or weight.ndim != 2 or not spec.fits(weight.shape[1]):
        raise ValueError(f"format {spec} cannot hold a matrix of shape {tuple(weight.shape)}")
    check_format(spec)
    rows = weight.shape[0]
    # The package treats a matrix of one row as a tensor without an axis, so it gets two rows.
    weight = weight.detach().float().expand(max(2, rows), -1).contiguous()
    scales, minima, codes = (_int8 if spec.bitwidth == 8 else _affine)(weight, spec)
    return QuantizedMatrix(spec, codes[:rows], scales[:rows], None if spec.symmetric else minima[:rows])


def check_format(spec: QuantSpec) -> None:
    """Raise OptionError for a format below 16 bits that the package cannot express."""
    if spec.bitwidth < 2:
        raise OptionError(
            f"optimum-quanto has no weights of {spec.bitwidth:g} bits",
            "choose 2 bits or more, or another `--quantizer`",
        )
    if spec.bitwidth == 8 and spec.group_size:
        raise OptionError(
            f"optimum-quanto has no 8-bit weights in groups, found format {spec}",
            "add `--group-size 0`, or choose another `--quantizer`",
        )
    if spec.bitwidth < 8 and spec.symmetric:
        raise OptionError(
            f"optimum-quanto has no symmetric weights of {spec.bitwidth:g} bits, found format {spec}",
            "leave out `--symmetric`, or choose another `--quantizer`",
        )


def _int8(weight: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, minima and codes. Each row has one scale over -128 to 127, stored as codes 0 to 255 about 128."""
    quanto = _quanto()
    scales = to_half(quanto.AbsmaxOptimizer()(weight, quanto.qint8, axis=0))
    codes = (weight / _divisor(scales)).round_().clamp_(-128, 127) + 128
    return scales, to_half(scales.float() * -128.0), codes.to(torch.uint8)


def _affine(weight: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, minima and codes. Each group has a scale and a shift."""
    quanto = _quanto()
    rows, columns = weight.shape
    size = spec.group_size or columns
    known = {2: quanto.qint2, 4: quanto.qint4}.get(int(spec.bitwidth))
    kind = known or _type_of(int(spec.bitwidth))
    optimizer = quanto.HqqOptimizer() if known else quanto.MaxOptimizer()
    scale, shift = optimizer(weight, kind, axis=0, group_size=size)
    scales, minima = to_half(scale), to_half(-shift)
    codes = torch.ops.quanto.quantize_affine(
        weight, bits=int(spec.bitwidth), axis=0, group_size=size, scale=_divisor(scales), shift=-minima.float()
    )
    return scales.reshape(rows, -1), minima.reshape(rows, -1), codes.reshape(rows, columns)


def _divisor(scales: Tensor) -> Tensor:
    """Return the scales as float32, 1 where a group has no range."""
    scales = scales.float()
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _quanto() -> Any:
    """Return the package. The first call sets it up."""
    with _setting_up:
        return set_up_quanto()


@cache
def set_up_quanto() -> Any:
    """Import the package and let it unpack in Python. Otherwise its first use compiles C++ into the installed package.

    Raises MissingDependency.
    """
    try:
        package = importlib.import_module("optimum.quanto")
    except ImportError as error:
        raise MissingDependency(
            "the quantizer `quanto` needs the package `optimum-quanto`", "pip install 'moec[compile]'"
        ) from error
    library: Any = torch.library.Library
    _registrations.append(library("quanto", "IMPL"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        _registrations[-1].impl("unpack", _unpack, "CPU", allow_override=True)
    return package


@cache
def _type_of(bits: int) -> Any:
    """Return a type of signed integers that the package lacks. MaxOptimizer uses only its width."""
    least = -(2.0 ** (bits - 1))
    qtype = importlib.import_module("optimum.quanto.tensor").qtype
    return qtype(f"qint{bits}", False, bits, torch.int8, least, -least - 1)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack blocks of rows that share the bits of each byte."""
    return torch.cat([(packed >> (bits * at)) & (2**bits - 1) for at in range(8 // bits)])


_registrations: list[Any] = []  # a registration ends with its Library object
_setting_up = threading.Lock()
