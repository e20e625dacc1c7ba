"""Eviction policies on held-out texts.

    python -m bench.expert_cache.eviction BUNDLE DATA --work FOLDER [--results FOLDER]

DATA holds train.jsonl and test.jsonl, or one folder with these files for each task. A text is a sequence of items of
one split and task. `moec bench --trace-out` records its routing trace. `moec tune` fits HOBBIT's weights to the traces
of the train split, which calibration saw, and compares policies on the traces of the test split.

Prints a Markdown table. A cell has:

* The mean ratio to the best of LRU, LFU and EdgeMoE, with its interval.
* The largest ratio of any text to the best of these three and static popularity on that text.
* The share of the gap from LRU to the offline optimum.

With `--modes` the traces are decided again under a lossy mode. The last part of a cell is then the shares of low and
skipped experts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..yardstick.commands import moec

PROMPT_TOKENS, TOKENS = 16, 200


def texts(data: Path, split: str, count: int, items: int) -> list[str]:
    """Return `count` texts of a split, with `items` items each. Tasks take turns."""
    sources = sorted(data.glob(f"*/{split}.jsonl")) or [data / f"{split}.jsonl"]
    rows = [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in sources]
    found = []
    for number in range(count):
        start = number // len(rows) * items
        found.append("\n".join(map(item_text, rows[number % len(rows)][start : start + items])))
    return found


def item_text(item: dict[str, Any]) -> str:
    """Return the text of an item, in the form in which the example model was trained on it."""
    if "text" in item:
        return str(item["text"])
    if "question" in item:
        return f"Question: {item['question']}\nAnswer: {item['answer']}"
    return f"Dialogue:\n{item['dialogue']}\nSummary: {item['summary']}"


def record(bundle: Path, text: str, name: str, work: Path) -> Path:
    """Return the path of the trace of a text. An existing trace is not recorded again."""
    source, trace = work / f"{name}.txt", work / f"{name}.trace"
    if not trace.exists():
        source.write_text(text, encoding="utf-8")
        common = ("--prompt-tokens", PROMPT_TOKENS, "--tokens", TOKENS, "--expert-cache", "50%")
        moec("bench", bundle, "--text", source, *common, "--trace-out", trace)
    return trace


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: a row per cache size, a column per policy."""
    sizes = sorted({row["capacity_bytes"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    largest = max(sizes) / 0.75
    lines = [f"| experts in memory | {' | '.join(policies)} |", "|" + "---|" * (len(policies) + 1)]
    for size in sizes:
        by_policy = {row["policy"]: row for row in rows if row["capacity_bytes"] == size}
        cells = []
        for policy in policies:
            row = by_policy[policy]
            low, high = row["interval"]
            closed = "-" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}"
            if row["decisions"] is not None:
                closed = f"{row['decisions']['low_share']:.0%}, {row['decisions']['skipped_share']:.0%}"
            fitted = f" ({row['weights']})" if row["weights"] else ""
            cells.append(f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}], {row['worst']:.3f}, {closed}{fitted}")
        lines.append(f"| {size / largest:.0%} (best of three: {by_policy['lru']['best']}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Eviction policies on held-out texts.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for texts and traces")
    parser.add_argument("--results", type=Path, help="folder for `eviction.json`")
    parser.add_argument("--training", type=int, default=8, help="number of texts that weights are fitted to")
    parser.add_argument("--held-out", type=int, default=24, help="number of texts that policies are compared on")
    parser.add_argument("--items", type=int, default=12, help="items of a text")
    parser.add_argument("--modes", help="fit to the decisions of this lossy setting, like `dynamic-precision 0,1`")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    arguments: list[object] = []
    for flag, split, count in (("--trace", "train", options.training), ("--held-out", "test", options.held_out)):
        for number, text in enumerate(texts(options.data, split, count, options.items)):
            arguments += [flag, record(options.bundle, text, f"{split}-{number}", options.work)]
            print(split, number, file=sys.stderr, flush=True)
    arguments += [] if options.modes is None else ["--modes", options.modes]
    told = moec("tune", options.bundle, "--expert-cache", "50%", *arguments)
    if options.results is not None:
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "eviction.json").write_text(json.dumps(told["rows"], indent=1) + "\n", encoding="utf-8")
    print(table(told["rows"]))


if __name__ == "__main__":
    main()
