"""Loss of dynamic precision by phase: in the prompt, in the answer, in both.

    python -m bench.lossy_prompts BUNDLE DATA --thresholds 0,1 --limit 1000 --results FOLDER

BUNDLE: a bundle with low versions. Every arm answers the same held-out items one at a time. Losses are paired with the
exact run. Bytes of a prompt are those read for the first TTFT_ITEMS prompts, each after the one before it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moec.cli.lossy_modes.mode_costs import loss_text
from moec.cli.lossy_modes.mode_sweep import TTFT_ITEMS, QualitySweep
from moec.cli.measuring.text_engines import BundleEngine
from moec.evaluation.data import load_splits
from moec.runtime.layers.routing import Routed
from moec.runtime.modes.decoder import LossyDecoder
from moec.runtime.modes.expert_choice import PassChoice
from moec.runtime.options.runtime import RuntimeOptions

PHASES = ("both", "answer", "prompt")


class OfAnswers(PassChoice):
    """Dynamic precision in answers alone. A prompt reads all experts in their high version."""

    def _select_for_prompt(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        return routed.chosen, routed.weights

    def advised_to_many(self, layer: int, unimportance: np.ndarray | None, experts: Sequence[int]) -> list[int]:
        return [self._versions.index(layer, expert) for expert in experts]


class OfPrompts(PassChoice):
    """Dynamic precision in prompts alone."""

    def select(self, routed: Routed) -> tuple[np.ndarray, np.ndarray]:
        return self._select_for_prompt(routed) if self._is_prompt else (routed.chosen, routed.weights)

    def advised(self, layer: int, scores: np.ndarray, experts: Sequence[int], top_k: int) -> list[int]:
        return [self._versions.index(layer, expert) for expert in experts]


CHOICES: dict[str, type[PassChoice]] = {"both": PassChoice, "answer": OfAnswers, "prompt": OfPrompts}


@dataclass(slots=True)
class PhaseSweep(QualitySweep):
    """A sweep whose settings name a phase as well."""

    @contextmanager
    def _opened(self, setting: dict[str, str], is_partial: bool) -> Iterator[BundleEngine]:
        options = {name: value for name, value in setting.items() if name != "phase"}
        with QualitySweep._opened(self, options, is_partial) as engine:
            lossy = engine.engine.lossy
            if lossy is not None:
                choices = CHOICES[setting["phase"]]
                engine.engine.lossy = LossyDecoder(lossy.modes, lossy.model, lossy.versions, lossy.cache, choices)
            yield engine

    def prompt_bytes(self, setting: dict[str, str]) -> float:
        """Return the bytes read per prompt."""
        with self._opened(setting, is_partial=False) as engine:
            before = engine.engine.cache.stats.copy()
            for item in self.items[:TTFT_ITEMS]:
                tokens = engine.engine.encode(self.task.prompt(item, self.shots))
                engine.engine.begin_sequence()
                engine.engine.prefill(tokens)
            return engine.engine.cache.stats.since(before).bytes_read / min(TTFT_ITEMS, len(self.items))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the arms."""
    head = ("arm", "value", "loss (95 %)", "KL", "KB read per prompt", "low in prompts", "skipped in prompts")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        decided = row["decisions"] or {}
        shares = [decided.get(name) for name in ("prompt_low_share", "prompt_skipped_share")]
        cells = (
            f"{row['mode']}, {row['options']['phase']}" if row["mode"] else "exact",
            f"{row['value']:.4f}",
            loss_text(row["loss"]) if row["mode"] else "-",
            f"{row['kl']['mean']:.5f}",
            f"{row['prompt_bytes'] / 1e3:.0f}",
            *("-" if share is None else f"{share:.1%}" for share in shares),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure and write."""
    parser = argparse.ArgumentParser(description="Loss of dynamic precision in prompts and in answers.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--expert-cache", default="25%")
    parser.add_argument("--thresholds", action="append", required=True, help="T1,T2. Repeatable.")
    parser.add_argument("--results", type=Path, required=True)
    chosen = parser.parse_args()
    split = load_splits(chosen.data, chosen.task)
    items = split.test.limit(chosen.limit, 0).items
    options = RuntimeOptions(expert_cache=chosen.expert_cache, slots=1)
    sweep = PhaseSweep(chosen.bundle, options, None, split.task, items, ())
    settings: list[dict[str, str]] = [{}]
    settings += [{"dynamic_precision": text, "phase": phase} for text in chosen.thresholds for phase in PHASES]
    record = sweep.run(settings)
    for row, setting in zip(record["rows"], settings, strict=True):
        row["prompt_bytes"] = sweep.prompt_bytes(setting)
    chosen.results.mkdir(parents=True, exist_ok=True)
    (chosen.results / "phases.json").write_text(json.dumps(record, indent=1) + "\n")
    print(table(record["rows"]))


if __name__ == "__main__":
    main()
