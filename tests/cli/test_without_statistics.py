"""A run of a bundle without statistics says which options need them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Invoke

EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--set", "prefetch=path"), "`prefetch=path` begins"),
        (
            ("--set", "prefetch=popularity", "--set", "policy=edgemoe"),
            "`prefetch=popularity` and `policy=edgemoe` begins",
        ),
        ((), ""),
    ],
)
def test_options_without_statistics(options: tuple[str, ...], named: str, invoke: Invoke, bundle: Path) -> None:
    arguments = ("--prompt", "a", "--max-new-tokens", 1, "--expert-cache", "50%", *options)
    said = invoke("run", bundle, *arguments)
    assert said.exit_code == 0, said.stderr
    assert ("compiled without data and has no statistics" in said.stderr) == bool(named) and named in said.stderr
    with_statistics = invoke("run", EXAMPLE, *arguments)
    assert "has no statistics" not in with_statistics.stderr
