"""Compile a checkpoint of two layers on a GPU from end to end, and check that every stage of torch computed there.

    python -m bench.accelerator.compile [--torch-device cuda] [--folder FOLDER]

The checkpoint is the yardstick with two layers: OLMoE's shape and random weights. Random weights give no answers that
can be right. So the target is a KL on forced answers, and no answer is generated.

Prints JSON Lines: machine and command, then the time of each stage and the floating-point operations of its products of
matrices by kind of device, then the result. Status 1 if a stage has products on another device. Without the device
it prints "not run". `--torch-device cpu` rehearses the script on a small shape.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bench.yardstick.checkpoint.weights import Shape, Weights
from bench.yardstick.checkpoint.write import TOKENIZER_TOKENS, text, write
from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.pipeline import compile_checkpoint
from moec.compiler.request.options import CompileOptions, Talk
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.targets import Target
from moec.compiler.workspace.parallel import Workers
from moec.manifests.progress import Progress
from moec.profiles.loading import load_profile

YARDSTICK = Shape(layers=2)
SMALL = Shape(hidden=64, layers=2, heads=2, experts=4, top_k=2, width=64, vocabulary=TOKENIZER_TOKENS, context=512)
KL = 0.05
ITEM_CHARACTERS = 500
SPLITS = {"train": 50, "validation": 24, "test": 40}
QUICK: dict[str, Any] = {"bits": (3, 16), "group_sizes": (32,), "comparisons": False, "swaps": 2, "limit": 32}
"""Options of the rehearsal."""
ALL_SHARE = 0.99
"""Share of a stage's products that its device must compute. The rest are tables of positions."""
OF_THE_HOST = ("learning to look ahead",)
"""Stages that fit small matrices to what the runtime recorded, on the CPU."""


class Stages:
    """Time and products of each stage of a compile.

    flop: floating-point operations of products by stage and kind of device.
    """

    def __init__(self) -> None:
        self.seconds, self.flop = defaultdict[str, float](float), dict[str, Counter[str]]()
        self._title, self._began, self._lock = "preparing", time.perf_counter(), threading.Lock()

    def begin(self, title: str) -> None:
        """Begin a stage, or go on with it."""
        if title == self._title:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._title] += now - self._began
        self._title, self._began = title, now

    def progress(self, title: str) -> Progress:
        """Return what a stage reports to. A stage begins when it asks for it, and whenever it reports."""
        self.begin(title)
        return lambda done, total: self.begin(title)

    def add(self, kind: str, flop: int) -> None:
        """Count the operations of one product."""
        with self._lock:
            self.flop.setdefault(self._title, Counter())[kind] += flop


class CountedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products of one thread."""

    def __init__(self, stages: Stages) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stages = stages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        count = flop_registry.get(func.overloadpacket)
        if count is None and func is not torch.ops.prim.device.default:
            with self:  # products in its parts, such as those of a linear layer
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if count is not None:
            tensor = result if isinstance(result, torch.Tensor) else result[0]
            self._stages.add(tensor.device.type, count(*args, **kwargs, out_val=result))
        return result


def compiled(request: CompileRequest, stages: Stages) -> dict[str, Any]:
    """Compile, and count the products of this thread and of the threads that it starts. Return quality.json."""
    submit = Workers.submit

    def submit_counted(pool: Workers, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def counted() -> Any:
            with CountedProducts(stages):
                return work(*args, **kwargs)

        return submit(pool, counted)

    with patch.object(Workers, "submit", submit_counted), CountedProducts(stages):
        quality = compile_checkpoint(request).quality
    stages.begin("end")
    return dict(quality)


def elsewhere(flop: Mapping[str, Mapping[str, int]], kind: str) -> list[str]:
    """Return the stages whose products were not computed on a kind of device."""
    return [
        title
        for title, counts in flop.items()
        if title not in OF_THE_HOST and counts.get(kind, 0) < ALL_SHARE * sum(counts.values())
    ]


def save_texts(folder: Path) -> None:
    """Write the items of each split."""
    whole = text()
    folder.mkdir(exist_ok=True)
    items = [whole[start : start + ITEM_CHARACTERS] for start in range(0, len(whole), ITEM_CHARACTERS)]
    for split, count in SPLITS.items():
        rows = [items.pop() for _ in range(count)]
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")


def run(folder: Path, name: str) -> int:
    """Write the checkpoint, compile it, print the rows, and return the exit status."""
    kind = torch.device(name).type
    machine = {"processor": platform.processor() or platform.machine(), "processors": os.cpu_count()}
    machine["device"] = torch.cuda.get_device_name(name) if kind == "cuda" else kind
    print(json.dumps({"machine": machine, "torch": torch.__version__, "command": shlex.join(sys.argv)}), flush=True)
    stages = Stages()
    stages.begin("writing the checkpoint")
    with redirect_stdout(sys.stderr):
        write(folder / "checkpoint", Weights(SMALL if kind == "cpu" else YARDSTICK))
    save_texts(folder / "texts")
    stages.begin("reading the checkpoint")
    chosen: dict[str, Any] = {"data": str(folder / "texts"), "tasks": ("perplexity",), "torch_device": name}
    options = CompileOptions(Target("kl", KL), **chosen, **(QUICK if kind == "cpu" else {}))
    talk = Talk(lambda sentence: print(sentence, file=sys.stderr, flush=True), stages.progress)
    profile = load_profile("laptop")
    source, output = str(folder / "checkpoint"), folder / "bundle"
    quality = compiled(CompileRequest(source, output, options, profile, open_partial, talk, overwrite=True), stages)
    for title, seconds in stages.seconds.items():
        print(json.dumps({"stage": title, "seconds": round(seconds, 2), "flop": stages.flop.get(title, {})}))
    sizes = quality["sizes"]
    result = {"verdict": quality["verdict"], "bits_per_weight": sizes["expert_bits_per_weight"]}
    wrong = elsewhere(stages.flop, kind)
    print(json.dumps({**result, "seconds": round(sum(stages.seconds.values()), 2), "not on the device": wrong}))
    return 1 if wrong or not stages.flop else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--folder", type=Path, help="keep checkpoint and bundle here; 5 GB for a GPU")
    arguments = parser.parse_args()
    if arguments.torch_device != "cpu" and not torch.cuda.is_available():
        print("not run")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return run(folder, arguments.torch_device)


if __name__ == "__main__":
    sys.exit(main())
