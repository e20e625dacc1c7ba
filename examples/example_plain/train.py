"""Train the plain example: ``python -m example_plain.train``. The same command continues a run that was stopped.

It differs from the first example in its shape and in its start: all channels start with the same size.
"""

import os
import shutil
from pathlib import Path

from example_model.make_tokenizer import MODEL as FIRST_MODEL
from example_model.model import Shape
from example_model.train import Run, curriculum
from example_model.training_run import main

MODEL = Path(__file__).parents[1] / "plain_model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class PlainRun(Run):
    """The training of the plain example."""

    shape, has_spread_channels = Shape(experts=16, top_k=4, width=64), False

    def __init__(self, state: Path, log: Path, folder: Path, rank: int = 0) -> None:
        copy_tokenizer(folder)
        super().__init__(state, log, folder, rank)


def copy_tokenizer(folder: Path) -> None:
    """Copy the tokenizer of the first example, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if not (folder / name).exists():
            new = folder / f"{name}.{os.getpid()}.new"  # both processes may copy
            shutil.copyfile(FIRST_MODEL / name, new)
            os.replace(new, folder / name)


if __name__ == "__main__":
    main("Train the plain example.", PlainRun, curriculum, "plain-train", "plain_train.log", MODEL)
