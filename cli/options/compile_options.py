"""The options of `moec compile` that become a CompileOptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .task_options import task_settings

if TYPE_CHECKING:
    from moec.compiler.request.options import CompileOptions

MAX_DIGITS = 9
"""Digits of a number in a list."""
MAX_SHOWN = 80
"""Characters of a wrong value that an error repeats."""


def compile_options(values: dict[str, Any]) -> CompileOptions:
    """Return the options of the command line. Raises OptionError."""
    from moec.compiler.request.options import DEFAULT_BITS, CompileOptions
    from moec.compiler.request.targets import choose_target

    target = choose_target(values["loss"], values["kl"], values["bits_per_weight"], values["size"], values["uniform"])
    return CompileOptions(
        target=target,
        data=values["data"],
        tasks=tuple(values["tasks"]),
        dense_bits=values["dense_bits"],
        bits=_bitwidths(values["bits"]) if values["bits"] is not None else DEFAULT_BITS,
        group_sizes=_numbers(values["group_size"]),
        sensitivity=values["sensitivity"],
        search=values["search"],
        objective=values["objective"],
        quantizer=values["quantizer"],
        shots=values["shots"],
        limit=values["limit"],
        seed=values["seed"],
        comparisons=values["comparisons"],
        symmetric=values["symmetric"],
        confidence=values["confidence"],
        fallback_bits=values["fallback_bits"],
        prune=values["prune"],
        swaps=values["swaps"],
        path_keys=values["path_keys"],
        long_items=values["long_items"],
        task_settings=task_settings(values),
        torch_device=values["torch_device"],
    )


def _numbers(text: str | None) -> tuple[int, ...]:
    """Parse a list: `2,3,4` -> (2, 3, 4). Raises OptionError."""
    from moec.manifests.errors import OptionError

    if text is None:
        return ()
    numbers = text.split(",")
    if not all(number.strip().isdecimal() and len(number.strip()) <= MAX_DIGITS for number in numbers):
        raise OptionError(f"`{text[:MAX_SHOWN]}` is not a list of numbers", "write them with commas, like `32,64`")
    return tuple(map(int, numbers))


def _bitwidths(text: str) -> tuple[float, ...]:
    """Parse a list of bitwidths: `1,1.6,2` -> (1, 1.6, 2). Raises OptionError."""
    from moec.manifests.quant import TERNARY

    bitwidths: list[float] = []
    for number in text.split(","):
        bitwidths += (TERNARY,) if number.strip() == str(TERNARY) else _numbers(number)
    return tuple(bitwidths)
