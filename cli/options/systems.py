"""`--as SYSTEM`: everything that the paper of one of the four systems prescribes, from a file in `cli/systems/`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from moec.manifests.errors import OptionError
from moec.manifests.files.strict_toml import load_strict_toml

from ..terminal import output
from ..terminal.help_sections import SectionOption
from .set_option import as_arguments

F = TypeVar("F", bound=Callable[..., Any])
SYSTEMS = ("edgemoe", "hobbit", "mobile", "twiddler")
COMPILED_SYSTEMS = ("edgemoe", "hobbit")
"""Systems with a search of their own, or with files that a bundle needs."""
_FOLDER = Path(__file__).parents[1] / "systems"


@dataclass(frozen=True, slots=True)
class System:
    """Prescriptions of a paper.

    needs: what a bundle must have, `statistics` or `low-versions`, and the option of a compile that adds it.
    run, compile: options by field.
    """

    title: str
    needs: dict[str, str]
    run: dict[str, Any]
    compile: dict[str, Any]


def load_system(name: str) -> System:
    """Return the prescriptions of one of SYSTEMS."""
    plain = load_strict_toml((_FOLDER / f"{name}.toml").read_bytes())
    run, compiling = (
        {field.replace("-", "_"): value for field, value in plain.get(section, {}).items()}
        for section in ("run", "compile")
    )
    return System(plain["title"], plain.get("needs", {}), run, compiling)


def as_option(systems: Collection[str] = SYSTEMS) -> Callable[[F], F]:
    """Return the option `preset` of a command."""
    return click.option(
        "--as",
        "preset",
        cls=SectionOption,
        type=click.Choice(tuple(systems)),
        help="Do what the paper of this system prescribes. Options of the command line come first.",
    )


def prescribed(
    name: str, given: Collection[str], bundle: Path | None, offered: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the options of a run that a system sets, by field, and print them.

    given: fields that the command line sets.
    bundle: the bundle that is run; None for a checkpoint.
    offered: fields that the command has; None: all.
    Raises OptionError if the bundle lacks what the system needs, and the errors of `open_bundle`.
    """
    from moec.runtime.bundle.open_bundle import open_bundle

    from .opening import bundle_folder

    system = load_system(name)
    if bundle is not None:
        manifest = open_bundle(bundle_folder(bundle)).manifest
        has = {"statistics": manifest.calibration is not None, "low-versions": bool(manifest.low_experts)}
        for need, option in system.needs.items():
            if not has[need]:
                remedy = f"--as {name} or {option}" if name in COMPILED_SYSTEMS and need == "low-versions" else option
                lacking = f"`{bundle}` has no {need.replace('-', ' ')}, which {system.title} needs"
                raise OptionError(lacking, f"compile it with {remedy}")
    names = [field for field in system.run if field not in given and (offered is None or field in offered)]
    chosen = {field: system.run[field] for field in names}
    output.say(f"as {system.title}: {as_arguments(chosen)}")
    return chosen


def prescribed_compile(name: str | None, given: Collection[str]) -> dict[str, Any]:
    """Return the options of a compile that a system sets, by parameter, and print them; none without a system."""
    if name is None:
        return {}
    system = load_system(name)
    chosen = {field: value for field, value in system.compile.items() if field not in given}
    output.say(f"as {system.title}: {as_arguments(chosen)}")
    return chosen
