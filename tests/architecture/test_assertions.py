"""Every test can fail: it asserts something, and what it asserts is not true by its form."""

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
