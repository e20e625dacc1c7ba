"""Workers of a cluster in this process, and texts for them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.cluster.ray_pool import Job, Pool
from moec.compiler.cluster.site import Site, checkpoint_identity
from moec.compiler.request.ports import OpenRuntime
from moec.compiler.walker.texts import AnswerTexts, TokenTexts, divided_pairs
from moec.evaluation.text_pairs import forced_rows
from moec.manifests.model import ModelSpec
from moec.manifests.quant import QuantSpec
from tests.tiny_compile import WORDS
from tests.tiny_families import TINY_FAMILIES, save_tiny_family
from tests.tiny_models import tiny_tokenizer
from tests.tiny_switch import TINY_SWITCHES, save_tiny_switch

SPECS = (QuantSpec(2, 32), QuantSpec(4, 32))
WORKERS = pytest.mark.parametrize(
    ("count", "threads"), [(3, 1), (2, 2), *(pytest.param(*few, marks=pytest.mark.slow) for few in ((1, 1), (7, 3)))]
)
FAMILIES = ("deepseek-v2-groups-yarn", "gpt-oss", "qwen2-plain-between", "granite-scaled")


class PoolHere(Pool):
    """Sites in this process that take turns. Everything between them is pickled, as between machines."""

    def __init__(
        self,
        folder: Path,
        workers: int,
        threads: int,
        open_runtime: OpenRuntime = open_partial,
        memory_bytes: int = 0,
    ) -> None:
        self.count, self.threads = workers, threads
        self._objects: list[bytes] = []
        identity = checkpoint_identity(open_checkpoint(str(folder)))
        opened = str(folder), identity, threads, open_runtime, self._fetch, memory_bytes
        self.sites = [Site(*opened) for _ in range(workers)]
        self.jobs: list[Job] = []

    def _fetch(self, handles: Sequence[int]) -> list[Any]:
        return [pickle.loads(self._objects[handle]) for handle in handles]

    def put(self, value: Any) -> int:
        self._objects.append(pickle.dumps(value))
        return len(self._objects) - 1

    def in_order(self, jobs: Iterable[Job]) -> Iterator[Any]:
        for job in jobs:
            self.jobs.append(job)
            result = pickle.loads(pickle.dumps(job)).run(self.sites[len(self.jobs) % self.count])
            yield pickle.loads(pickle.dumps(result))

    def on_all(self, job: Job) -> None:
        for site in self.sites:
            job.run(site)


def save_family(folder: Path, name: str) -> Path:
    """Write a tiny checkpoint of a family, with an encoder or without."""
    if name in TINY_SWITCHES:
        return save_tiny_switch(folder, TINY_SWITCHES[name])
    return save_tiny_family(folder, TINY_FAMILIES[name])


def text_pairs(count: int) -> list[tuple[str, str]]:
    """Return prompts and answers of many lengths. Some answers are empty."""
    draw = random.Random(count)
    return [
        (" ".join(draw.choices(WORDS, k=draw.randint(1, 12))), " ".join(draw.choices(WORDS, k=draw.randint(0, 6))))
        for _ in range(count)
    ]


def token_pairs(count: int) -> list[tuple[list[int], list[int]]]:
    """Return `text_pairs` as tokens."""
    encode = tiny_tokenizer().encode
    return [(encode(prompt), encode(answer) if answer else []) for prompt, answer in text_pairs(count)]


def scored(model: ModelSpec, count: int) -> AnswerTexts:
    """Return texts whose answers are scored, end token included. Half of them are of each of two tasks."""
    pairs = token_pairs(count)
    prompts, decoded = divided_pairs(model, pairs)
    rows, answers, counts = forced_rows(decoded, model.eos_token_ids[:1])
    targets = [answer[len(answer) - count :] for answer, count in zip(answers, counts, strict=True)]
    return AnswerTexts(TokenTexts(rows, prompts), counts, targets, pairs, [count // 2, count - count // 2])
