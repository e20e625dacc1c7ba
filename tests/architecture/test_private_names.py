"""Tests ask the library by its public names, so that a class may change inside without a change of its tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIMIT = 3
"""Accesses to private names of moec that all tests may have together."""
FOREIGN = {
    "_C": "torch",
    "_attn_implementation": "transformers",
    "_disabled_torch_function_impl": "torch",
    "_exit": "os",
    "_experts_implementation": "transformers",
    "_forward_hooks": "torch",
    "_make_wrapper_subclass": "torch",
    "_relative_position_bucket": "transformers",
    "_replace": "named tuples",
}
"""Private names of other packages that tests use, and whose they are."""
BY_NAME = {"setattr", "getattr", "delattr", "hasattr"}
"""Calls, also of `monkeypatch`, whose second argument is the name of an attribute."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def is_private_path(text: str) -> bool:
    """Return whether a text is a dotted name of moec with a private part."""
    parts = text.split(".")
    return parts[0] == "moec" and all(map(str.isidentifier, parts)) and any(map(is_private, parts))


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the dotted names that an import binds."""
    prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return (prefix + alias.name for alias in node.names)


def own_program(text: str) -> ast.Module | None:
    """Return the syntax tree of a program in a text that imports moec; None if the text is something else."""
    if "moec" not in text or "import " not in text:
        return None
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def names_in(node: ast.AST) -> Iterator[str]:
    """Yield the private names that one node reaches for, those of other packages included."""
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls"):
            yield node.attr
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from filter(is_private_path, imported(node))
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
        second = node.args[1] if len(node.args) > 1 else None
        if isinstance(second, ast.Constant) and isinstance(second.value, str) and is_private(second.value):
            yield second.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if is_private_path(node.value):
            yield node.value
        elif (program := own_program(node.value)) is not None:
            yield from (name for _, name in accesses(program))


def accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of every access to a private name. `self` and `cls` may have their own."""
    for node in ast.walk(tree):
        for name in names_in(node):
            yield getattr(node, "lineno", 0), name


@pytest.fixture(scope="module")
def found() -> list[tuple[str, str]]:
    """Place and name of every access in the tests, those to other packages included. This file is left out."""
    return [
        (f"{path.relative_to(TESTS)}:{line}", name)
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for line, name in accesses(ast.parse(path.read_text()))
    ]


def test_private_names_of_moec_are_left_alone(found: list[tuple[str, str]]) -> None:
    own = [f"{place} {name}" for place, name in found if name not in FOREIGN]
    assert len(own) <= LIMIT, "\n".join(
        [f"{len(own)} accesses to private names of moec, expected at most {LIMIT}: give them public names", *own]
    )


def test_every_exemption_is_used(found: list[tuple[str, str]]) -> None:
    assert FOREIGN.keys() <= {name for _, name in found}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("engine.cache._leases.any()", ["_leases"]),
        ("model._cache = None", ["_cache"]),
        ("super()._path(name)", ["_path"]),
        ("from moec.runtime.kernels import _native", ["moec.runtime.kernels._native"]),
        ("import moec.runtime.kernels._native", ["moec.runtime.kernels._native"]),
        ("monkeypatch.setattr(Trials, '_measure_kl', fails)", ["_measure_kl"]),
        ("patch.setattr('moec.cli.commands.measuring.tune._fit', fails)", ["moec.cli.commands.measuring.tune._fit"]),
        ("run('import moec.runtime as m; print(m._state)')", ["_state"]),
        ("self._seen, cls._count", []),
        ("os._exit(1)", ["_exit"]),
        ("engine.__class__, name.startswith('_')", []),
        ("from ray import _private", []),
        ("count, _ = cache.counts()", []),
    ],
)
def test_accesses_are_found(text: str, names: list[str]) -> None:
    assert [name for _, name in accesses(ast.parse(text))] == names
