"""G15: what reaches a logit is computed by functions with one defined result, `runtime/kernels/elementary.py`.

The functions of numpy and of the C library differ in last bits between processors, and so do matrix products of BLAS.
The other tests of G15 compare the processors that they have. This one holds for those that they have not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "runtime"
_NAMES = (
    "acos|acosh|arccos|arccosh|arcsin|arcsinh|arctan|arctan2|arctanh|asin|asinh|atan|atan2|atanh|cbrt|cos|cosh|erf|erfc|"
    "exp|exp2|expm1|float_power|gamma|hypot|lgamma|log|log10|log1p|log2|logaddexp|logaddexp2|pow|power|sin|sinc|sinh|"
    "tan|tanh"
)
INEXACT = frozenset(_NAMES.split("|"))
"""Functions of `np` and `math` whose last bits no standard defines. Square roots are defined."""
PRODUCTS = frozenset(("dot", "einsum", "inner", "matmul", "tensordot", "vdot"))
"""Functions of `np` that sum in the order of BLAS."""
ANY_ORDER = frozenset(("argpartition",))
"""Functions of `np` that choose one of several equal values by the instruction set."""
CPP_CALL = re.compile(rf"\b((?:std::|__builtin_)(?:{_NAMES})[fl]?|(?:{_NAMES})[fl])\(")
"""Calls of the C library in C++. The kernels have their own `exp`."""
ALLOWED = {
    "kernels/reference/": "the numpy kernels, which make no promise",
    "kernels/elementary.py": "`exp` takes numpy's without the extension, which makes no promise",
    "kernels/lookahead.py": "the numpy kernels of lookahead, without the extension",
    "expert_cache/records.py": "eviction scores: which expert is evicted changes no logit of an exact run",
    "prefetch/read_ahead_margins.py": "how many experts are read ahead changes no logit of an exact run",
    "kernels/native/experts/residency.cpp": "eviction scores, as in expert_cache/records.py",
    "kernels/native/experts/prefetch_advice.cpp": "experts to read ahead, as in prefetch/read_ahead_margins.py",
    "accelerator/": "products of torch on a device; runs with an accelerator make no promise across machines",
}
"""Files and folders of runtime/ that may use them. docs/design/lossy-modes.md says what follows for lossy runs."""


def is_exact_power(node: ast.BinOp) -> bool:
    """Return whether a power is a square, a power of two or of minus one, or a constant."""
    base, exponent = ast.unparse(node.left), ast.unparse(node.right)
    is_constant = not any(isinstance(each, ast.Name | ast.Call | ast.Subscript) for each in ast.walk(node))
    return is_constant or exponent == "2" or base in ("2", "-1", "(-1)")


def inexact(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every function, product and power whose last bits depend on the machine."""
    names = {"np": INEXACT | PRODUCTS | ANY_ORDER, "numpy": INEXACT | PRODUCTS | ANY_ORDER, "math": INEXACT}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in names.get(node.value.id, ()):
                yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module in names:
            yield from ((node.lineno, f"from {node.module}") for each in node.names if each.name in names[node.module])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "pow":
            yield node.lineno, "pow"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node.lineno, "@"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not is_exact_power(node):
            yield node.lineno, ast.unparse(node)


def inexact_cpp(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every such function of the C library in C++."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, name) for name in CPP_CALL.findall(line.partition("//")[0]))


def allowance(path: Path) -> str | None:
    """Return the entry of ALLOWED that a file falls under, None if there is none."""
    name = path.relative_to(RUNTIME).as_posix()
    return next((each for each in ALLOWED if name == each or (each.endswith("/") and name.startswith(each))), None)


@pytest.mark.gate("G15")
def test_logits_are_computed_by_functions_with_one_result() -> None:
    used, wrong = set(), []
    for path in sorted(path for path in RUNTIME.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        text = path.read_text(encoding="utf-8")
        for line, name in inexact(ast.parse(text)) if path.suffix == ".py" else inexact_cpp(text):
            allowed = allowance(path)
            used.add(allowed)
            if allowed is None:
                wrong.append(f"runtime/{path.relative_to(RUNTIME)}:{line} {name}")
    assert wrong == [], "last bits depend on the machine: take the function of runtime/kernels/elementary.py"
    assert used == set(ALLOWED), "an entry of ALLOWED has no use"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("np.exp(x, out=x)", ["np.exp"]),
        ("list(map(math.tanh, x))", ["math.tanh"]),
        ("from math import exp, ceil", ["from math"]),
        ("length**penalty", ["length ** penalty"]),
        ("pow(x, y)", ["pow"]),
        ("10.0**-x", ["10.0 ** (-x)"]),
        ("a @ b", ["@"]),
        ("np.argpartition(x, 3)", ["np.argpartition"]),
        ("2**bits + (-1) ** n + weight**2 + 2.0**-126 + 10**9", []),
        ("np.sqrt(x), np.ldexp(x, n), elementary.exp(x)", []),
    ],
)
def test_uses_are_found(text: str, names: list[str]) -> None:
    assert [name for _, name in inexact(ast.parse(text))] == names


def test_uses_in_cpp_are_found() -> None:
    text = "x = std::exp(y);  // std::log(y)\nz = expf(y) + own::exp(y) + std::fmaf(a, b, c) + __builtin_powf(y, 2);\n"
    assert list(inexact_cpp(text)) == [(1, "std::exp"), (2, "expf"), (2, "__builtin_powf")]
