"""Seeds of command lines: names of bundles and files that no system has, and extreme option values."""

from __future__ import annotations

from pathlib import Path

from tests.hostile.seed import Seed
from tests.hostile.seeds_manifest import RUN

PROMPTS = "{bundle}/../prompts.jsonl"


def _with_prompts(bundle: Path) -> None:
    bundle.with_name("prompts.jsonl").write_text('{"prompt": "a b"}\n')


def _generate(bundle: str, out: str) -> tuple[str, ...]:
    return ("generate", bundle, "--prompts", PROMPTS, "--out", out, "--max-new-tokens", "2")


def _commands(path: str) -> dict[str, tuple[str, ...]]:
    """Return the commands that take a bundle or an archive, with this path."""
    return {
        "run": ("run", path, "--prompt", "x"),
        "generate": _generate(path, "{work}/out.jsonl"),
        "inspect": ("inspect", path),
        "verify": ("verify", path),
        "pack": ("pack", path, "{work}/x.moec"),
        "unpack": ("unpack", path, "{work}/x"),
    }


REFUSED = frozenset({1, 2, 3})
NAMES = (
    *(
        Seed(f"{command} on the root folder", arguments, REFUSED, _with_prompts)
        for command, arguments in _commands("/").items()
    ),
    *(
        Seed(f"{command} on a path of 5,000 characters", arguments, REFUSED, _with_prompts)
        for command, arguments in _commands("{bundle}/" + "x" * 5000).items()
    ),
    Seed("pack into a path of 5,000 characters", ("pack", "{bundle}", "{work}/" + "x" * 5000), REFUSED),
    Seed("pack into the root folder", ("pack", "{bundle}", "/"), REFUSED),
    *(
        Seed(f"generate into {what}", _generate("{bundle}", out), REFUSED, _with_prompts)
        for what, out in {"nothing": "", "the root folder": "/", "a long name": "{work}/" + "x" * 300}.items()
    ),
)

OPTIONS = (
    Seed(
        "a repetition penalty of 1e-40",
        (*RUN, "--temperature", "1", "--repetition-penalty", "1e-40"),
        frozenset({0, 1, 2}),
    ),
)

SEEDS: tuple[Seed, ...] = (*NAMES, *OPTIONS)
