"""constraints.txt pins one tested version of every package that `make` installs, inside the range of pyproject.toml."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
SUPPORTED_PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def _ranges() -> Iterator[Requirement]:
    """Yield what pyproject.toml asks for, its own extras and what builds it apart."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for extra in (project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()):
        for line in extra:
            requirement = Requirement(line)
            if requirement.name != "moec":
                yield requirement


def _pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if not line.startswith("#")]


def _pinned_version(name: str, python: str) -> str | None:
    """Return the version of a package that one Python gets on Linux, None if it gets any."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    found = [
        str(pin.specifier).removeprefix("==")
        for pin in _pins()
        if pin.name.replace("_", "-") == name.replace("_", "-")
        and (pin.marker is None or pin.marker.evaluate({**environment, "platform_machine": "x86_64"}))
    ]
    assert len(found) <= 1, f"{name} is pinned twice for Python {python}: {found}"
    return found[0] if found else None


def test_every_pin_is_exact() -> None:
    pins = _pins()
    assert len(pins) > 50
    assert [str(pin) for pin in pins if not str(pin.specifier).startswith("==")] == []


TOOLS = ("auto-gptq",)
"""Packages that `make` installs alone, in a folder of their own, in the exact versions of the Makefile."""
OF_TORCH = ("triton",)
"""Packages whose exact version some builds of PyTorch name, so that constraints.txt must not. The Makefile does."""
CLIENTS = ("lm_eval",)
"""Packages that `make serving-clients` installs in an environment of its own, in the versions of clients.txt."""


def _value_of_make(name: str) -> str:
    (line,) = re.findall(rf"^{name} \??= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    return str(line)


def test_what_constraints_leave_out_has_exact_versions_inside_the_ranges() -> None:
    clients = (ROOT / "tests" / "serving" / "clients" / "clients.txt").read_text(encoding="utf-8").splitlines()
    triton = Requirement(_value_of_make("TRITON"))
    lines = [line for line in clients if not line.startswith("#")]
    lines += [*_value_of_make("TOOL_PACKAGES").split(), f"{triton.name}{triton.specifier}"]
    versions = dict(line.split("==") for line in lines)
    ranges = {need.name: need for need in _ranges() if need.name in (*TOOLS, *CLIENTS, *OF_TORCH)}
    assert set(ranges) == {*TOOLS, *CLIENTS, *OF_TORCH} <= set(versions)
    assert str(triton.marker) == str(ranges["triton"].marker)
    assert [name for name, need in ranges.items() if not need.specifier.contains(versions[name])] == []


@pytest.mark.parametrize("python", SUPPORTED_PYTHONS)
def test_every_dependency_is_pinned_inside_its_range(python: str) -> None:
    environment = {"python_version": python, "sys_platform": "linux", "extra": ""}
    asked = [need for need in _ranges() if need.marker is None or need.marker.evaluate(environment)]
    assert len(asked) > 20
    wrong = []
    for need in asked:
        if need.name in (*TOOLS, *CLIENTS, *OF_TORCH):
            continue
        version = _pinned_version(need.name, python)
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need} has the pin {version}")
    assert wrong == [], "run `make update-dependencies`"


def test_every_range_has_a_floor() -> None:
    """`make test-oldest` installs the floors: a range without one would test nothing."""
    missing = [str(need) for need in _ranges() if not any(part.operator == ">=" for part in need.specifier)]
    assert missing == []
