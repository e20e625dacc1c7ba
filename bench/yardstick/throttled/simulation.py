"""Predictions of `moec simulate` next to measurements of `moec bench`, with throttled storage.

    python -m bench.yardstick.throttled.simulation BUNDLE TEXT --work FOLDER

Runs on Linux, as root. Takes twenty minutes.

One trace is recorded without a throttle. Every prediction comes from it, with the bandwidth of the throttle, if any,
instead of the measured one. Then the same tokens are decoded under each throttle, on a cold page cache. Prints a
Markdown table. With `--modes`, lossy modes are compared instead of policies and prefetchers. Each run decides them
itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ..commands import command_line, moec
from ..limits import drop_caches, run_limited

RATES = (90_000_000, 500_000_000, 0)  # 0: no throttle
SHARES = ("25%", "50%")


@dataclass(frozen=True)
class Setting:
    """The policy, prefetcher and lossy modes of a run. modes: one setting in the form of `moec simulate --modes`."""

    policy: str = "lrfu"
    prefetch: str = "lookahead"
    modes: str = ""

    def options(self) -> list[str]:
        """Options of `moec bench`."""
        chosen = ["--lossy", self.modes] if self.modes else []
        return ["--set", f"policy={self.policy}", "--set", f"prefetch={self.prefetch}", *chosen]


SETTINGS = (Setting("lrfu", "lookahead"), Setting("lrfu", "off"), Setting("lru", "lookahead"))


class Comparison:
    """One bundle and one text. Files go to a folder."""

    def __init__(self, bundle: Path, text: Path, work: Path, tokens: int, prompt_tokens: int) -> None:
        self._bundle, self._work = bundle, work
        self._common = ["--text", text, "--prompt-tokens", prompt_tokens, "--tokens", tokens]
        self._common += ["--context", 512, "--threads", 2]

    def record(self) -> Path:
        """Record the trace of all predictions: half of the experts in memory, no throttle, advice from routers."""
        trace = self._work / "recorded.trace"
        if not trace.exists():
            moec("bench", self._bundle, *self._common, "--expert-cache", "50%", "--trace-out", trace)
        return trace

    def measure(self, rate: int, share: str, setting: Setting) -> dict[str, Any]:
        """Decode under a throttle, on a cold page cache."""
        command = command_line("bench", self._bundle, *self._common, "--expert-cache", share, *setting.options())
        drop_caches()
        done = run_limited(command, None, rate or None, self._bundle)
        if done.status:
            raise SystemExit(f"`{command}` ended with {done.status}")
        record = json.loads(done.output.splitlines()[-1])
        measured = record["measured"]
        return {
            "tpot_ms": 1e3 / measured["tokens_per_s"],
            "read_mib": measured["decode_bytes_read_per_token"] / 2**20,
            "misses": measured["misses"],
            "decisions": record["decisions"],
            "load": os.getloadavg()[0],
        }

    def predict(self, trace: Path, rate: int, share: str, setting: Setting) -> dict[str, Any]:
        """Predict the figures of `measure` by replaying the trace."""
        chosen = ["--expert-cache", share, "--set", f"policy={setting.policy}", "--set", f"prefetch={setting.prefetch}"]
        chosen += ["--read-rate", f"{rate}B"] if rate else []
        chosen += ["--modes", setting.modes] if setting.modes else []
        predicted = moec("simulate", self._bundle, "--trace", trace, *chosen)
        row = predicted["rows"][-1]  # after the exact one
        return {
            "tpot_ms": row["tpot_mean_ns"] / 1e6,
            "read_mib": row["decode_bytes_read_per_token"] / 2**20,
            "misses": row["misses"],
            "decisions": row["decisions"],
        }


def shares(decisions: dict[str, Any] | None) -> str:
    """Return decisions in per cent of the chosen experts, and fallbacks in per cent of the tokens."""
    names = ("missed", "low", "skipped", "replaced", "dropped", "fallback")
    shares = [] if decisions is None else [(name, decisions[f"{name}_share"]) for name in names]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share) or "-"


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    heads = ["storage", "experts in memory", "policy, prefetch", "measured ms per token", "predicted", "error"]
    heads += ["MiB read per token: measured", "predicted"]
    has_modes = any(row["modes"] for row in rows)
    heads += ["decided: measured", "predicted"] if has_modes else []
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        measured, predicted = row["measured"], row["predicted"]
        cells: list[str] = [
            f"{row['rate'] / 1e6:.0f} MB/s" if row["rate"] else "no throttle",
            row["share"],
            row["modes"] or f"{row['policy']}, {row['prefetch']}",
        ]
        cells += [f"{measured['tpot_ms']:.0f}", f"{predicted['tpot_ms']:.0f}", f"{row['error']:+.1%}"]
        cells += [f"{measured['read_mib']:.1f}", f"{predicted['read_mib']:.1f}"]
        cells += [shares(measured["decisions"]), shares(predicted["decisions"])] if has_modes else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, record, predict and measure."""
    parser = argparse.ArgumentParser(description="Predictions next to measurements.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="folder for the trace and the results")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--modes", default="", help="Lossy settings separated by `;`, next to the exact run.")
    parser.add_argument("--rate", type=int, action="append", help="Throttle, bytes per second; 0: none. Repeatable.")
    parser.add_argument("--share", action="append", help="Share of experts in memory, like `25%%`. Repeatable.")
    options = parser.parse_args()
    modes = [setting.strip() for setting in options.modes.split(";") if setting.strip()]
    settings = [Setting(), *(Setting(modes=text) for text in modes)] if modes else SETTINGS
    options.work.mkdir(parents=True, exist_ok=True)
    compared = Comparison(options.bundle, options.text, options.work, options.tokens, options.prompt_tokens)
    trace, rows = compared.record(), list[dict[str, Any]]()
    for rate, share, setting in product(options.rate or RATES, options.share or SHARES, settings):
        predicted = compared.predict(trace, rate, share, setting)
        measured = compared.measure(rate, share, setting)
        error = predicted["tpot_ms"] / measured["tpot_ms"] - 1
        rows.append({"rate": rate, "share": share, "policy": setting.policy, "prefetch": setting.prefetch})
        rows[-1] |= {"modes": setting.modes}
        rows[-1] |= {"measured": measured, "predicted": predicted, "error": error}
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    (options.work / "simulation.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
