"""What `moec simulate` predicts beside what `moec bench` measures, storage throttled.

``python -m yardstick.simulation BUNDLE TEXT --work FOLDER``, in `bench`, Linux, root, twenty minutes. One trace is
recorded with storage as it is; every prediction comes from it, with the bandwidth of the throttle, if there is one, in
place of the measured one. Then the same tokens are decoded under each throttle, cold. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from commands import command_line, moec

from yardstick.limits import drop_caches, run_limited

RATES = (90_000_000, 500_000_000, None)  # None: storage as it is
SHARES = ("25%", "50%")


@dataclass(frozen=True)
class Setting:
    """policy and prefetcher of a run."""

    policy: str
    prefetch: str


SETTINGS = (Setting("lrfu", "lookahead"), Setting("lrfu", "off"), Setting("lru", "lookahead"))


class Comparison:
    """One bundle and text; files go to a folder."""

    def __init__(self, bundle: Path, text: Path, work: Path, tokens: int, prompt_tokens: int) -> None:
        self._bundle, self._work = bundle, work
        self._common = ["--text", text, "--prompt-tokens", prompt_tokens, "--tokens", tokens]
        self._common += ["--context", 512, "--threads", 2]

    def record(self) -> Path:
        """The trace all predictions are made from: half of the experts, storage as it is, advice of routers."""
        trace = self._work / "recorded.trace"
        if not trace.exists():
            moec("bench", self._bundle, *self._common, "--expert-cache", "50%", "--trace-out", trace)
        return trace

    def measure(self, rate: int | None, share: str, setting: Setting) -> dict[str, Any]:
        """Decode under a throttle, cold."""
        chosen = ["--expert-cache", share, "--policy", setting.policy, "--prefetch", setting.prefetch]
        command = command_line("bench", self._bundle, *self._common, *chosen)
        drop_caches()
        done = run_limited(command, None, rate, self._bundle)
        if done.status:
            raise SystemExit(f"`{command}` ended with {done.status}")
        told = json.loads(done.output.splitlines()[-1])["measured"]
        return {
            "tpot_ms": 1e3 / told["tokens_per_s"],
            "read_mib": told["decode_bytes_read_per_token"] / 2**20,
            "misses": told["misses"],
        }

    def predict(self, trace: Path, rate: int | None, share: str, setting: Setting) -> dict[str, Any]:
        """The same by replaying the trace."""
        chosen = ["--expert-cache", share, "--policy", setting.policy, "--prefetch", setting.prefetch]
        chosen += [] if rate is None else ["--read-rate", f"{rate}B"]
        told = moec("simulate", self._bundle, "--trace", trace, *chosen)
        row = told["rows"][0]
        return {
            "tpot_ms": row["tpot_mean_ns"] / 1e6,
            "read_mib": row["decode_bytes_read_per_token"] / 2**20,
            "misses": row["misses"],
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = ("storage", "experts in memory", "policy, prefetch", "measured ms a token", "predicted", "off by")
    heads += ("MiB read a token: measured", "predicted")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        cells = (
            "as it is" if row["rate"] is None else f"{row['rate'] / 1e6:.0f} MB/s",
            row["share"],
            f"{row['policy']}, {row['prefetch']}",
        )
        cells += (f"{measured['tpot_ms']:.0f}", f"{predicted['tpot_ms']:.0f}", f"{row['error']:+.1%}")
        cells += (f"{measured['read_mib']:.1f}", f"{predicted['read_mib']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, record, predict, measure."""
    parser = argparse.ArgumentParser(description="Predicted beside measured.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="where the trace and the results go")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    compared = Comparison(options.bundle, options.text, options.work, options.tokens, options.prompt_tokens)
    trace, rows = compared.record(), list[dict[str, Any]]()
    for rate, share, setting in product(RATES, SHARES, SETTINGS):
        predicted = compared.predict(trace, rate, share, setting)
        measured = compared.measure(rate, share, setting)
        error = predicted["tpot_ms"] / measured["tpot_ms"] - 1
        rows.append({"rate": rate, "share": share, "policy": setting.policy, "prefetch": setting.prefetch})
        rows[-1] |= {"measured": measured, "predicted": predicted, "error": error}
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    (options.work / "simulation.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
