"""Bundles, texts, traces and routes on which figures are measured. All are made once and kept in a folder.

Shapes: T tokens, L layers, E experts, K top-k.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moec.cli.simulation.traces import open_traces
from moec.runtime.bundle.open_bundle import Bundle, open_bundle
from moec.runtime.trace.trace import Trace
from moec.runtime.tuning.tune_file import bundle_sha256

from ..expert_cache.eviction import item_text, texts
from ..prefetch.learned_routers import Routing
from ..yardstick.commands import moec
from .models import DATA, MODELS, NATURAL, PLAIN, PLANTED, ROOT, SWITCH, Model

SHIPPED = "planted-moec"
"""Name of `examples/bundle`, which is not compiled here."""

_CALIBRATED = ("--data", DATA, "--task", "gsm8k")
BUNDLES: dict[str, tuple[Model, tuple[object, ...]]] = {
    "planted-16": (PLANTED, ("--uniform", 16, "--dense-bits", 16, *_CALIBRATED)),
    "planted-16-4": (PLANTED, ("--uniform", 16, "--dense-bits", 16, "--fallback-bits", 4, *_CALIBRATED)),
    "planted-8": (PLANTED, ("--uniform", 8, *_CALIBRATED)),
    "planted-4": (PLANTED, ("--uniform", 4, *_CALIBRATED)),
    "planted-edgemoe": (PLANTED, ("--as", "edgemoe", "--loss", "2%", *_CALIBRATED)),
    "planted-2": (PLANTED, ("--uniform", 2, *_CALIBRATED)),
    "plain-16": (PLAIN, ("--uniform", 16, "--dense-bits", 16, *_CALIBRATED)),
    "natural-16": (NATURAL, ("--uniform", 16, "--dense-bits", 16)),
    "switch-16": (SWITCH, ("--uniform", 16, "--dense-bits", 16, "--data", DATA, "--task", "samsum")),
    "planted-2-samsum": (PLANTED, ("--uniform", 2, "--data", DATA, "--task", "samsum")),
    **{
        f"{model.name}-experts-{width}": (model, ("--uniform", width, "--dense-bits", 16))
        for model in MODELS
        for width in (2, 4, 8)
    },
    **{
        f"{model.name}-all-{width}": (model, ("--uniform", width, "--dense-bits", width))
        for model in MODELS
        for width in (4, 8)
    },
}
"""Name -> model, and options of `moec compile`."""

PROMPT_TOKENS, TOKENS, ITEMS = 16, 200, 12
_PIECE_LENGTH = 12


@dataclass(frozen=True)
class Routes:
    """Routing of tokens.

    chosen: experts of each token, best first, uint8 [T, L, K].
    weights: their normalised weights, float32 [T, L, K].
    """

    chosen: np.ndarray
    weights: np.ndarray


class Inputs:
    """Files in a folder. Each is complete or absent, so a run that was stopped goes on."""

    def __init__(
        self, folder: Path, say: Callable[[str], object] = lambda sentence: None, throttles: bool = False
    ) -> None:
        """Take a folder. throttles: whether this run may limit reads of storage, which needs root."""
        self.folder, self._say, self.throttles = folder, say, throttles
        self.compiling_s = 0.0  # seconds of all compiles of this run

    def bundle(self, name: str) -> Path:
        """Return the folder of a bundle. Compiles it if it is not there."""
        if name == SHIPPED:
            return ROOT / "examples" / "bundle"
        if name not in BUNDLES:  # one of random weights, which its figure compiles
            return self.folder / "bundles" / name
        model, options = BUNDLES[name]
        version = f"-{model.digest()}" if model.made_by else ""  # a model that is not in the tree may change
        path = self.folder / "bundles" / f"{name}{version}"
        if not (path / "moec.json").exists():
            self.compile(model.folder, path, *options)
        return path

    def compile(self, model: Path, path: Path, *options: object) -> None:
        """Compile a checkpoint to a bundle. This is no time of the figure that needs it."""
        self._say(f"compiling {path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        moec("compile", model, *options, "-o", path, "--overwrite")
        self.compiling_s += time.monotonic() - began

    def opened(self, name: str) -> Bundle:
        """Return an open bundle."""
        return open_bundle(self.bundle(name))

    def quality(self, name: str) -> dict[str, Any]:
        """Return the content of a bundle's quality.json."""
        found: dict[str, Any] = json.loads((self.bundle(name) / "quality.json").read_text(encoding="utf-8"))
        return found

    def _version(self, name: str) -> str:
        """Return the beginning of the digest of a bundle's manifest. A renewed bundle has another one."""
        return bundle_sha256(self.bundle(name))[:_PIECE_LENGTH]

    def told(self, command: str, bundle: str, *options: object) -> dict[str, Any]:
        """Return what `moec COMMAND BUNDLE OPTIONS --json` prints."""
        return self.kept(command, bundle, options, lambda: moec(command, self.bundle(bundle), *options))

    def kept(
        self, name: str, bundle: str, options: Sequence[object], run: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the JSON of a run. It runs once for each bundle and options."""
        told = json.dumps([name, bundle, self._version(bundle), *map(str, options)])
        digest = hashlib.sha256(told.encode()).hexdigest()[:_PIECE_LENGTH]
        path = self.folder / "told" / f"{name}-{bundle}-{digest}.json"
        if not path.exists():
            self._say(f"{name} {bundle} {' '.join(map(str, options))[:60]}")
            found = run()
            with complete_file(path) as partial:
                partial.write_text(json.dumps(found), encoding="utf-8")
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept

    def text(self, split: str, number: int) -> Path:
        """Return a file with ITEMS items of a split. Even numbers have problems, odd ones dialogues."""
        path = self.folder / "texts" / f"{split}-{number}.txt"
        if not path.exists():
            with complete_file(path) as partial:
                partial.write_text(texts(DATA, split, number + 1, ITEMS)[number], encoding="utf-8")
        return path

    def trace(self, bundle: str, number: int, *options: object) -> Trace:
        """Return the trace of a bundle on a held-out text, with room for half of its experts.

        options: further options of `moec bench`.
        """
        lengths = ("--prompt-tokens", PROMPT_TOKENS, "--tokens", TOKENS)
        told = [str(number), *(str(option).lstrip("-") for option in options)]
        return self.recorded(bundle, told, self.text("test", number), *lengths, *options)

    def recorded(self, bundle: str, told: Sequence[str], text: Path, *options: object) -> Trace:
        """Return the trace of a bundle on a text. It is recorded once.

        told: parts of the name of the kept file. They must name text and options.
        options: options of `moec bench`.
        """
        name = "-".join(["trace", bundle, self._version(bundle), *told])
        path = self.folder / "traces" / f"{name}.trace"
        if not path.exists():
            self._say(f"recording {name}")
            with complete_file(path) as partial:
                common = ("--text", text, "--expert-cache", "50%", *options)
                moec("bench", self.bundle(bundle), *common, "--trace-out", partial)
        return open_traces([path], self.opened(bundle))[0]

    def traces(self, bundle: str, count: int, *options: object) -> list[Trace]:
        """Return the traces of a bundle on the first held-out texts."""
        return [self.trace(bundle, number, *options) for number in range(count)]

    def routes(self, model: Model, split: str, task: str | None = None) -> Routes:
        """Return the routing of a checkpoint on texts of a split.

        task: None for the task of the model.
        """
        task = task or model.task
        path = self.folder / "routes" / f"{model.name}-{model.digest()}-{task}-{split}.npz"
        if not path.exists():
            self._say(f"routing of {model.name} on {task}, {split}")
            chosen, weights = list[np.ndarray](), list[np.ndarray]()
            for routing in self.routed(model, split, task=task):
                of_pass = [routing.chosen(layer) for layer in range(routing.count)]
                chosen.append(np.stack([each[0].numpy().astype(np.uint8) for each in of_pass], 1))
                weights.append(np.stack([each[1].numpy() for each in of_pass], 1))
            with complete_file(path) as partial, partial.open("wb") as file:
                np.savez(file, chosen=np.concatenate(chosen), weights=np.concatenate(weights))
        with np.load(path) as kept:
            return Routes(kept["chosen"], kept["weights"])

    def routed(self, model: Model, split: str, tokens: int | None = None, task: str | None = None) -> Iterator[Routing]:
        """Run a checkpoint over texts of a split. Yield it after each pass, with what its routers read.

        tokens: None for those of the model.
        task: None for the task of the model.
        """
        import torch

        task = task or model.task
        rows = self.folder / "texts" / f"{task}-{split}.jsonl"
        if not rows.exists():
            source = (model.data / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            with complete_file(rows) as partial:
                lines = (json.dumps({"text": item_text(json.loads(line))}) + "\n" for line in source)
                partial.write_text("".join(lines), encoding="utf-8")
        with torch.no_grad():
            routing = Routing(model.folder)
            for _ in routing.passes(rows, tokens or model.tokens(split)):
                yield routing


@contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. It becomes `path` when all of it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return float(np.mean(values))
