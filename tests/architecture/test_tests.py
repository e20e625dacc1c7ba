"""Every test can fail, and asks the library by its public names.

It asserts something, and what it asserts is not true by its form. A class may change inside without a change of its
tests.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Calls that raise where something is wrong.
CHECKS = ("check_", "validate", "verify_", "assert_")
PYTEST = {"pytest.raises", "pytest.warns", "pytest.fail"}
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


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def called(function: ast.FunctionDef) -> set[str]:
    """The last parts of the names of what a function calls."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {node.attr if isinstance(node, ast.Attribute) else ast.unparse(node) for node in calls}


def can_fail_itself(function: ast.FunctionDef) -> bool:
    """Return whether it asserts or raises, also in a function that replaces another one."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PYTEST:
            return True
    return any(name.startswith(CHECKS) for name in called(function))


def failing_names(trees: dict[Path, ast.Module]) -> set[str]:
    """Names of functions of the tests that assert, or call one that does."""
    by_name = defaultdict[str, list[ast.FunctionDef]](list)
    for tree in trees.values():
        for function in functions(tree):
            by_name[function.name].append(function)
    found = {name for name, all_of in by_name.items() if any(can_fail_itself(function) for function in all_of)}
    calls = {name: set().union(*map(called, all_of)) for name, all_of in by_name.items()}
    while more := {name for name in by_name if name not in found and calls[name] & found}:
        found |= more
    return found


def test_every_test_asserts_something(trees: dict[Path, ast.Module]) -> None:
    can_fail, seen = failing_names(trees), 0
    without = []
    for path, tree in trees.items():
        for function in functions(tree):
            if function.name.startswith("test_"):
                seen += 1
                if not can_fail_itself(function) and not called(function) & can_fail:
                    without.append(f"{path.relative_to(TESTS)}:{function.lineno} {function.name}")
    assert without == [] and seen > 1000


def is_true_by_form(test: ast.expr) -> bool:
    """A constant, a tuple, one of two by a condition that drops the other, or a value compared with itself."""
    if isinstance(test, (ast.Constant, ast.Tuple)):
        return True
    if isinstance(test, ast.IfExp):
        return any(isinstance(branch, ast.Constant) for branch in (test.body, test.orelse))
    if isinstance(test, ast.BoolOp):
        return any(is_true_by_form(value) for value in test.values)
    if not isinstance(test, ast.Compare) or any(isinstance(node, ast.Call) for node in ast.walk(test)):
        return False
    sides = [ast.dump(side) for side in (test.left, *test.comparators)]
    return len(set(sides)) < len(sides)


def test_no_assertion_is_true_by_its_form(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno} {ast.unparse(node.test)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and is_true_by_form(node.test)
    ]
    assert found == []


def test_no_test_is_content_with_any_exception(trees: dict[Path, ast.Module]) -> None:
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.raises" and not node.keywords
        if node.args and ast.unparse(node.args[0]) in ("Exception", "BaseException")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_true"),
    [
        ("True", True),
        ("(found, 'a message')", True),
        ("small < large if large else True", True),
        ("found == found", True),
        ("found and 'a text'", True),
        ("found == wanted == found", True),
        ("draw() == draw()", False),
        ("0.3 < found < 1.2 if wide else 0.1 < found < 0.4", False),
        ("found", False),
    ],
)
def test_what_is_true_by_form_is_known(text: str, is_true: bool) -> None:
    assert is_true_by_form(ast.parse(text, mode="eval").body) == is_true


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
def private(trees: dict[Path, ast.Module]) -> list[tuple[str, str]]:
    """Place and name of every access in the tests, those to other packages included. This file is left out."""
    return [
        (f"{path.relative_to(TESTS)}:{line}", name)
        for path, tree in trees.items()
        if path != Path(__file__)
        for line, name in accesses(tree)
    ]


def test_private_names_of_moec_are_left_alone(private: list[tuple[str, str]]) -> None:
    own = [f"{place} {name}" for place, name in private if name not in FOREIGN]
    assert len(own) <= LIMIT, "\n".join(
        [f"{len(own)} accesses to private names of moec, expected at most {LIMIT}: give them public names", *own]
    )


def test_every_exemption_is_used(private: list[tuple[str, str]]) -> None:
    assert FOREIGN.keys() <= {name for _, name in private}


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
