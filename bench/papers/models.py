"""The examples on which figures are measured, and the texts that they are measured on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = ROOT / "examples" / "data"
TASKS = ("gsm8k", "samsum")
"""Tasks of the trained examples. The first one is the task whose texts are routed."""
_DIGEST_LENGTH = 12


@dataclass(frozen=True)
class Model:
    """A checkpoint and its texts.

    name: begins the names of its bundles and of files that are kept.
    label: its name in a picture.
    described: its description, Markdown.
    folder: the checkpoint.
    data: folder with a folder for each task, which has `train.jsonl` and `test.jsonl`.
    task: the task whose texts are routed.
    texts: what these texts are, a plural noun.
    train_tokens, test_tokens: tokens that are routed of each split, multiples of a pass.
    made_by: command that makes the folder; empty if it is in the tree.
    metric: quality of its answers, a name in words: exact match, or perplexity.
    """

    name: str
    label: str
    described: str
    folder: Path
    data: Path = DATA
    task: str = TASKS[0]
    texts: str = "problems"
    train_tokens: int = 20_224
    test_tokens: int = 8_192
    made_by: str = ""
    metric: str = "exact match"

    def is_there(self) -> bool:
        """Return whether the checkpoint and its texts exist."""
        return (self.folder / "config.json").exists() and (self.data / self.task / "test.jsonl").exists()

    def tokens(self, split: str) -> int:
        """Return the number of tokens that are routed of a split."""
        return {"train": self.train_tokens, "test": self.test_tokens}[split]

    def digest(self) -> str:
        """Return the beginning of a digest of the weights. A model that was made again has another one."""
        digest = hashlib.sha256()
        for path in sorted(self.folder.glob("*.safetensors")):
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
        return digest.hexdigest()[:_DIGEST_LENGTH]


PLANTED = Model(
    "planted",
    "planted, 2 of 8",
    "`examples/model`: 6 layers, 2 of 8 experts, rounding sensitivity planted, trained for ten minutes",
    ROOT / "examples" / "model",
)
PLAIN = Model(
    "plain",
    "plain, 4 of 16",
    "`examples/plain_model`: 6 layers, 4 of 16 experts, nothing planted, trained for 26 minutes",
    ROOT / "examples" / "plain_model",
)
NATURAL = Model(
    "natural",
    "natural, 6 of 16",
    "`build/example-smollm2/model`: SmolLM2-135M-Instruct divided into experts and trained for another hour, 30 "
    "layers, 6 of 16 experts and a shared one",
    ROOT / "build" / "example-smollm2" / "model",
    ROOT / "build" / "example-smollm2" / "data",
    "prose",
    "prose",
    12_800,
    4_096,
    "make example-smollm2",
    "perplexity",
)
RANDOM = Model(
    "random",
    "random",
    "random weights of the shapes that the figure names; they say nothing of quality",
    PLANTED.folder,
)
SWITCH = Model(
    "switch",
    "Switch, 1 of 8",
    "`examples/switch_model`: a Switch Transformer with 4 + 4 layers, of which all of the decoder route, to 1 of 8 "
    "experts, trained for four minutes",
    ROOT / "examples" / "switch_model",
    task=TASKS[1],
    texts="dialogues",
    metric="Rouge-2",
)
TRAINED = (PLANTED, PLAIN)
"""Models in the tree."""
MODELS = (*TRAINED, NATURAL)
"""Models whose routing is measured."""
DESCRIBED = (*MODELS, SWITCH, RANDOM)
"""Models that a page describes."""
