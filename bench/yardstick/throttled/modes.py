"""Speed of lossy modes if storage is the limit.

    python -m bench.yardstick.throttled.modes BUNDLE TEXT RECORD

Runs on Linux, as root.

BUNDLE: the yardstick with low versions.
RECORD: output of `moec eval --modes sweep --json` for the trained example. Its decisions are replayed
(`replayed.py`), except with `--own-scores`.

Reads are throttled so that they take at least three times as long as computing. Every round runs all arms in turn, on a
cold page cache. Prints a Markdown table and writes every run.

``--mixed BUNDLE2 --mixed-quality FILE`` adds the result of a search over bitwidths at the same loss. FILE is the
quality.json of a compile of the example. BUNDLE2 is the yardstick at about as many bits. It runs exact with as many
bytes of cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.options.runtime import parse_cache

from ..limits import drop_caches, run_limited

EXACT = ""
MIXED = "mixed bitwidths"
RATE = 500_000_000


def arms_of(record: dict[str, Any], wanted: list[str]) -> list[dict[str, Any]]:
    """Return the exact row, then the rows of the wanted modes. Raises SystemExit for a mode without measurement."""
    rows = {row["mode"]: row for row in record["rows"]}
    missing = [mode for mode in wanted if mode not in rows]
    if missing:
        raise SystemExit(f"the record has no `{missing[0]}`; it has {', '.join(f'`{mode}`' for mode in rows if mode)}")
    return [rows[mode] for mode in (EXACT, *(wanted or (mode for mode in rows if mode)))]


def run_arm(bundle: Path, text: Path, row: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run one arm on a cold page cache under the throttle."""
    is_mixed, cache = row["mode"] == MIXED, options.expert_cache
    if is_mixed:  # as many bytes as for the bundle of the modes
        cache = str(parse_cache(cache, open_bundle(bundle).manifest.cost.expert_padded_bytes))
        bundle = options.mixed
    command = [sys.executable, "-m", f"{__package__}.replayed", str(bundle), str(text), "--tokens", str(options.tokens)]
    command += ["--prompt-tokens", str(options.prompt_tokens), "--expert-cache", cache]
    command += ["--own-scores"] * options.own_scores
    command += ["--row", json.dumps({} if is_mixed or not row["mode"] else row)]
    drop_caches()
    done = run_limited(command, None, options.rate, bundle)
    if done.status:
        raise SystemExit(f"`{' '.join(command[:5])}`, `{row['mode']}`, ended with {done.status}")
    told: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return told


def mixed_arm(path: Path) -> dict[str, Any]:
    """Return the arm of a compile of the example, from its quality.json. Its loss is relative to the checkpoint."""
    quality = json.loads(path.read_text(encoding="utf-8"))
    (task,) = quality["tasks"].values()
    return {"mode": MIXED, "loss": task["loss"], "bits_per_weight": quality["sizes"]["expert_bits_per_weight"]}


def table(arms: list[dict[str, Any]], runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table: medians of rates and TTFT with their ranges, and medians of the gains in each round."""
    head = ["mode", "loss on the example (95 %)", "tokens/s", "x exact", "MB read per token", "busy", "TTFT, s"]
    head.append("decisions")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    base = [run["measured"]["tokens_per_s"] for run in runs[EXACT]]
    for row in arms:
        found = [run["measured"] for run in runs[row["mode"]]]
        rates, firsts = (
            [each[name] / unit for each in found] for name, unit in (("tokens_per_s", 1), ("ttft_ns", 1e9))
        )
        gain = statistics.median(rate / own for rate, own in zip(rates, base, strict=True))
        read = statistics.median(each["decode_bytes_read_per_token"] for each in found) / 1e6
        busy = statistics.median(each["decode_shares"]["storage_busy"] for each in found)
        cells = (
            (row["mode"] or "exact") + (f", {row['bits_per_weight']:.2f} bits" if row["mode"] == MIXED else ""),
            _loss(row),
            f"{statistics.median(rates):.3f} ({min(rates):.3f} to {max(rates):.3f})",
            f"{gain:.2f}",
            f"{read:.0f}",
            f"{busy:.0%}",
            f"{statistics.median(firsts):.2f} ({min(firsts):.2f} to {max(firsts):.2f})",
            _decided(runs[row["mode"]][0]["decisions"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _loss(row: dict[str, Any]) -> str:
    if not row["mode"]:
        return "-"
    low, high = row["loss"]["interval95"]
    return f"{row['loss']['loss']:.2%}" + ("" if low is None else f" ({low:.2%} to {high:.2%})")


def _decided(decisions: dict[str, Any] | None) -> str:
    if decisions is None:
        return "-"
    names = ["missed", "low", "skipped", "replaced", "dropped", "fallback", "foretold_right"]
    names += ["prompt_missed", "prompt_low", "prompt_skipped"]
    told = ((name, decisions.get(f"{name}_share")) for name in names)
    return ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in told if share) or "-"


def main() -> None:
    """Read the command line, run and write."""
    parser = argparse.ArgumentParser(description="Lossy modes under throttled storage.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--mode", action="append", default=[], help="Only this mode of the record. Repeatable.")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--own-scores", action="store_true", help="Decide by the yardstick's own router scores.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=int, default=RATE, help="Limit of storage reads, bytes per second.")
    parser.add_argument("--expert-cache", default="25%")
    parser.add_argument("--mixed", type=Path, help="The yardstick at the bits of a search over bitwidths.")
    parser.add_argument("--mixed-quality", type=Path, help="quality.json of that search on the example.")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    arms = arms_of(json.loads(options.record.read_text(encoding="utf-8")), options.mode)
    if (options.mixed is None) != (options.mixed_quality is None):
        parser.error("--mixed and --mixed-quality go together")
    arms += [] if options.mixed is None else [mixed_arm(options.mixed_quality)]
    runs: dict[str, list[dict[str, Any]]] = {row["mode"]: [] for row in arms}
    for turn in range(1, options.rounds + 1):
        for row in arms:
            runs[row["mode"]].append(run_arm(options.bundle, options.text, row, options))
            rate = runs[row["mode"]][-1]["measured"]["tokens_per_s"]
            print(f"round {turn}, {row['mode'] or 'exact'}: {rate:.3f} tokens/s", file=sys.stderr, flush=True)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "modes.json").write_text(json.dumps({"arms": arms, "runs": runs}, indent=1) + "\n")
    print(table(arms, runs))


if __name__ == "__main__":
    main()
