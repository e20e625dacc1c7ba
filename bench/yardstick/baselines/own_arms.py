"""moec next to simpler versions of itself.

    python -m bench.yardstick.baselines.own_arms FOLDER --results RESULTS

These are the arms that EdgeMoE compares with. All use this runtime and its kernels, so only the bytes that are read and
kept differ:

* IO-FREE and IO-QFREE hold everything, at 16 and 4 bits.
* IO-EXP and IO-QEXP read the experts of every token and keep none.
* STI reads whole layers.

Three more arms hold the same weights in memory at 4, 3 and 2 bits. FOLDER holds the bundles q2, q3, q4 and q16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..commands import command_line
from ..limits import drop_caches, run_limited

ALL, NONE, STREAMED = "100%", "least", "layers"


@dataclass(frozen=True)
class OwnArm:
    """An arm. keeps: all experts (ALL), only those of the running layer (NONE), or whole layers in turn (STREAMED)."""

    name: str
    bundle: str
    keeps: str
    tokens: int


ARMS = (
    OwnArm("4 bits", "q4", ALL, 128),
    OwnArm("3 bits", "q3", ALL, 128),
    OwnArm("2 bits", "q2", ALL, 128),
    OwnArm("IO-FREE", "q16", ALL, 64),
    OwnArm("IO-QFREE", "q4", ALL, 64),
    OwnArm("IO-EXP", "q16", NONE, 16),
    OwnArm("IO-QEXP", "q4", NONE, 32),
    OwnArm("STI", "q4", STREAMED, 8),
)


def run_own_arm(folder: Path, arm: OwnArm) -> dict[str, Any]:
    """Run one arm on a cold page cache. Return its rate, bytes per token, ceiling and peak memory."""
    bundle, text = folder / arm.bundle, folder / "text.txt"
    least = json.loads((bundle / "moec.json").read_text(encoding="utf-8"))["cost"]["minimum_expert_bytes"]
    if arm.keeps == STREAMED:
        command = [
            sys.executable,
            "-m",
            f"{__package__}.layer_streaming",
            str(bundle),
            str(text),
            "--tokens",
            str(arm.tokens),
        ]
    else:
        command = command_line("bench", bundle, "--text", text)
        command += ["--tokens", str(arm.tokens), "--prompt-tokens", "8", "--context", "512", "--threads", "2"]
        command += (
            ["--expert-cache", ALL] if arm.keeps == ALL else ["--expert-cache", str(least), "--set", "prefetch=off"]
        )
    drop_caches()
    done = run_limited(command, place=folder)
    if done.status:
        raise SystemExit(f"{arm.name}: `{' '.join(command)}` ended with {done.status}")
    record = json.loads(done.output.splitlines()[-1])
    return {
        "tokens_per_s": record["measured"]["tokens_per_s"],
        "read_mib": record["measured"]["decode_bytes_read_per_token"] / 2**20,
        "weights_mib": record["ceiling"]["compute_bytes_per_token"] / 2**20 if "ceiling" in record else None,
        "of_ceiling": record.get("ratio"),
        "peak_gib": record["measured"]["peak_memory_bytes"] / 2**30,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    head = ("arm", "tokens/s (least to most)", "MiB of weights per token", "MiB read per token", "peak GiB")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        weights = "" if row["weights_mib"] is None else f"{row['weights_mib']:.0f}"
        rate = f"{row['tokens_per_s']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        lines.append(f"| {row['arm']} | {rate} | {weights} | {row['read_mib']:.0f} | {row['peak_gib']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, run and write."""
    parser = argparse.ArgumentParser(description="moec next to simpler versions of itself.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of arms; by default all run")
    options = parser.parse_args()
    arms = [arm for arm in ARMS if not options.only or arm.name in options.only]
    by_arm: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for turn in range(1, options.rounds + 1):
        for arm in arms:
            by_arm[arm.name].append(run_own_arm(options.folder, arm))
            print(arm.name, turn, json.dumps(by_arm[arm.name][-1]), file=sys.stderr, flush=True)
    rows = []
    for name, rounds in by_arm.items():
        rates = [each["tokens_per_s"] for each in rounds]
        rows.append({"arm": name, **rounds[0], "tokens_per_s": statistics.median(rates)})
        rows[-1] |= {"least": min(rates), "most": max(rates)}
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "own_arms.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
