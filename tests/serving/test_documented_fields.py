"""The guide lists all paths, and all fields that a request may have without an effect."""

from __future__ import annotations

import ast
from pathlib import Path

from moec.serving.app import FACTS, HANDLERS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "serve.md").read_text(encoding="utf-8")


def names_without_effect(path: Path) -> set[str]:
    """Return the texts that a file hands to `without_effect`, and those in its tuples of names."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "without_effect":
            values = node.args
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            names = {name.id for name in node.targets if isinstance(name, ast.Name)}
            values = node.value.elts if names & {"_NO_EFFECT", "_OF_ANSWERS"} else []
        found |= {each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def test_fields_without_effect_are_listed() -> None:
    files = (ROOT / "serving" / "api").rglob("*.py")
    names = set[str]().union(*map(names_without_effect, files))
    assert {"user", "signature", "prompt_cache_key"} <= names
    assert {name for name in names if f"`{name}`" not in GUIDE} == set()


def test_all_paths_are_listed() -> None:
    paths = {path for path in (*HANDLERS, *FACTS) if f"`{path}`" not in GUIDE}
    assert paths == set()
