"""Whole compiles of a tiny random model on generated texts: seconds, from preflight to certificate."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moec.cli.commands.bundles.report import draw_card
from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.plan import CompileResult
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.targets import Target, TargetKind
from moec.compiler.walker.memory import NOTHING_KEPT
from moec.compiler.workspace.durable import Disk
from moec.profiles.device import DeviceProfile
from moec.profiles.loading import load_profile
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

SPLITS = {"train": 8, "validation": 8, "test": 40}
WORDS = ("a", "pen", "box", "lamp", "green", "red", "seven", "two", "of", "the", "and", "with", "under", "near", "tall")
SUMMARY = "lamp box"  # no letter twice
# One group size, no search over dense weights and few swaps keep a compile under two seconds.
QUICK: dict[str, Any] = {"bits": (2, 4, 16), "group_sizes": (32,), "dense_bits": 8, "comparisons": False, "swaps": 4}


def save_model(folder: Path, **shape: Any) -> Path:
    """A random checkpoint whose widths all group sizes up to 64 divide."""
    return save_tiny_mixtral(folder, TinyMixtral(**{"width": 64, "seed": 31, **shape}))


def save_texts(folder: Path, **counts: int) -> Path:
    """train, validation and test of short texts, no two equal."""
    draw = random.Random(5)
    rows: dict[str, None] = {}
    wanted = SPLITS | counts
    while len(rows) < sum(wanted.values()):
        rows[" ".join(draw.choices(WORDS, k=draw.randint(3, 7)))] = None
    return _save(folder, [{"text": row} for row in rows], wanted)


def save_problems(folder: Path, **counts: int) -> Path:
    """Sums in GSM8K's form, which a random model cannot do."""
    wanted = {"train": 3, "validation": 3, "test": 4} | counts
    rows = [
        {"question": f"What is {n} plus {n}, if a pen is small?", "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n}"}
        for n in range(sum(wanted.values()))
    ]
    return _save(folder, rows, wanted)


def save_dialogues(folder: Path, **counts: int) -> Path:
    """Dialogues in SAMSum's form, no two equal, whose summary is always the same."""
    wanted = SPLITS | counts
    lines = [f"{at}: {' '.join(random.Random(at).choices(WORDS, k=4))}" for at in range(sum(wanted.values()))]
    return _save(folder, [{"dialogue": line, "summary": SUMMARY} for line in lines], wanted)


def _save(folder: Path, rows: list[dict[str, str]], counts: dict[str, int]) -> Path:
    folder.mkdir(parents=True)
    left = iter(rows)
    for split, count in counts.items():
        lines = [json.dumps(next(left)) + "\n" for _ in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(lines))
    return folder


def pi() -> DeviceProfile:
    """A named device: nothing is probed."""
    return load_profile("raspberry-pi-4b-sd")


def little_memory(patch: Callable[[str, Any], None]) -> None:
    """Let every later compile keep no layer between passes, as if memory did not hold the model.

    patch: sets what has a name, like `monkeypatch.setattr`.
    """
    patch("moec.compiler.preflight.preparation.choose_kept_layers", lambda *_: NOTHING_KEPT)


def make_request(
    source: Path, output: Path, kind: TargetKind, value: float, *, quick: bool = True, **values: Any
) -> CompileRequest:
    """values: fields of CompileRequest (disk, resume, overwrite, plan_only, open_runtime, talk, profile) or options."""
    fields = {name: values.pop(name) for name in CompileRequest.__dataclass_fields__ if name in values}
    chosen = QUICK if quick and kind != "uniform" else {}
    if "search" in values or "data" not in values:  # another search, or none: it has no swaps
        chosen = {name: value for name, value in chosen.items() if name != "swaps"}
    options = CompileOptions(Target(kind, value), **{**chosen, **values})
    fixed: dict[str, Any] = {"profile": pi(), "open_runtime": open_partial, "disk": Disk(), "draw_card": draw_card}
    return CompileRequest(str(source), output, options, **{**fixed, **fields})


def compile_tiny(source: Path, output: Path, kind: TargetKind, value: float, **values: Any) -> CompileResult:
    """Compile; arguments as for make_request."""
    return compile_checkpoint(make_request(source, output, kind, value, **values))


def contents(folder: Path) -> dict[str, bytes]:
    """File name -> bytes of everything below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names(folder: Path) -> set[str]:
    """Return the names in a folder, hidden files included."""
    return {path.name for path in folder.iterdir()}


def check_bundle(folder: Path) -> dict[str, Any]:
    """Verify a bundle to the last byte; its quality.json."""
    bundle = open_bundle(folder)
    verify_bundle(bundle)
    assert bundle.manifest.certified
    quality: dict[str, Any] = json.loads((folder / "quality.json").read_bytes())
    return quality
