"""moec next to llama.cpp and its fork ik_llama.cpp.

    python -m bench.yardstick.peers.compare FOLDER --results RESULTS

`make bench` fills FOLDER: `checkpoint`, `q4` (a bundle), `q4_0.gguf` (the same weights for llama.cpp), FORK_GGUF (the
same for its fork), and the built fork.

Every condition runs all arms in turn, for several rounds. Memory limits go upward. All engines get the same forced
tokens of real text and the same control group. Direct reads are timed in that group before each run. If their rate is
not the wanted one, the program ends.

* Cold: the page cache is dropped, and nothing is read before the prompt.
* Warm: llama.cpp decodes the same ids a second time. moec reads experts while it loads.
* As found: llama.cpp with the read-ahead of the machine takes minutes per run. It runs in the first round only, not at
  90 MB/s, and not with less memory than the experts of a token take.

Another engine runs too with `--peer NAME COMMAND`. COMMAND may have {file}, the GGUF file; {ids}, the file of forced
ids; {prompt} and {tokens}; {cache_mib}, MiB that the limit leaves to experts, or those of all. The last line that it
prints is an object like that of `peer.py`.

RESULTS gets one JSON file per run, and `summary.json`. Two tables are printed at the end. `overlap.py` makes one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..checkpoint.write import text
from ..commands import command_line
from ..limits import drop_caches, read_ahead_path, run_limited
from .fork import LIBRARY_VARIABLE, library_path
from .overlap import COLD, NO_ADVICE, OWN, OWN_HALF, overlap_rows, overlap_table, run_path, runs

CONTEXT = 1024
SLACK_BYTES = 256 << 20
BUDGET_MARGIN_BYTES = 64 << 20  # the limit of the group minus `--memory`
TUNED_READ_AHEAD_KIB = 128
RATE_ERROR = 0.1  # largest relative difference of direct reads from the wanted rate

OWN_OPTIONS = {
    OWN: [],
    OWN_HALF: ["--kv", "float16"],
    COLD: ["--set", "cache-state=cold"],
    NO_ADVICE: ["--set", "prefetch=off"],
}
AS_FOUND, TUNED, WARM = "llama.cpp mmap as found", "llama.cpp mmap 128 KiB", "llama.cpp mmap 128 KiB, warm"
REPACKED = "llama.cpp repacked"
FORK_REPACKED, FORK_TUNED = "ik_llama.cpp repacked", "ik_llama.cpp mmap 128 KiB"
FORK_GGUF = "q4_0-qwen3moe.gguf"  # checkpoint/gguf_model.py says why the fork needs its own file
SLOWEST_AS_FOUND = 100_000_000  # bytes per second


@dataclass(frozen=True)
class Condition:
    """A condition of measurement.

    share: share of the expert bytes that fit in memory, in addition to everything else; None: no limit.
    rate: limit of storage reads, bytes per second; None: no limit.
    """

    name: str
    share: float | None
    prompt_tokens: int
    tokens: int
    rate: int | None = None


CONDITIONS = (
    Condition("memory", None, 128, 256),
    Condition("memory32", None, 32, 64),
    Condition("prefill512", None, 512, 8),
    Condition("memory900", None, 900, 64),
    Condition("disk90-25", 0.25, 8, 16, 90_000_000),
    Condition("disk500-25", 0.25, 8, 16, 500_000_000),
    Condition("cache-8", 0.08, 32, 16),  # less memory than the experts of one token
    Condition("cache-25", 0.25, 32, 64),
    Condition("prefill512-25", 0.25, 512, 4),
    Condition("cache-50", 0.50, 32, 64),
    Condition("cache-75", 0.75, 32, 64),
)


@dataclass(frozen=True)
class Yard:
    """The folder of the yardstick, the manifest of its bundle, and the commands of other engines by name."""

    folder: Path
    manifest: dict[str, Any]
    peers: Mapping[str, str] = field(default_factory=dict)

    @property
    def expert_bytes(self) -> int:
        return int(self.manifest["cost"]["expert_padded_bytes"])

    @property
    def fixed_bytes(self) -> int:
        """Bytes of dense weights, keys and values of the context, and slack: the same for all engines."""
        cost = self.manifest["cost"]
        kv_bytes = cost["kv_bytes_per_position"] * CONTEXT + 2 * cost.get("state_bytes", 0)
        return int(cost["dense_packed_bytes"] + kv_bytes) + SLACK_BYTES

    def limit_bytes(self, condition: Condition) -> int | None:
        """Return the memory limit of the group, or None."""
        return None if condition.share is None else self.fixed_bytes + int(condition.share * self.expert_bytes)


def arms(condition: Condition) -> Iterator[str]:
    """Yield the arms of a condition.

    moec also runs with keys and values of 16 bits, as the other engines have them. llama.cpp and its fork run with
    usual settings.
    """
    yield OWN
    yield OWN_HALF
    if condition.share is None:
        yield from (REPACKED, FORK_REPACKED)
        return
    if condition.rate is None and condition.tokens >= 64:
        yield from (COLD, NO_ADVICE, WARM)
    yield from (TUNED, FORK_TUNED)
    if condition.share >= 0.25 and (condition.rate is None or condition.rate > SLOWEST_AS_FOUND):
        yield AS_FOUND


def arm_command(yard: Yard, condition: Condition, arm: str) -> list[str]:
    """Return the command line of an arm."""
    limit = yard.limit_bytes(condition)
    common = ["--prompt-tokens", str(condition.prompt_tokens), "--tokens", str(condition.tokens)]
    if arm in OWN_OPTIONS:
        command = command_line("bench", yard.folder / "q4", *common, *OWN_OPTIONS[arm])
        command += ["--text", str(yard.folder / "text.txt"), "--context", str(CONTEXT), "--threads", "2"]
        return command + (
            ["--expert-cache", "100%"] if limit is None else ["--memory", str(limit - BUDGET_MARGIN_BYTES)]
        )
    if arm in yard.peers:
        share = 1.0 if condition.share is None else condition.share
        cache = int(share * yard.expert_bytes + SLACK_BYTES / 2)
        sizes = {"prompt": condition.prompt_tokens, "tokens": condition.tokens, "cache_mib": cache >> 20}
        places = {"file": yard.folder / "q4_0.gguf", "ids": yard.folder / "ids.json"}
        return [part.format(**places, **sizes) for part in shlex.split(yard.peers[arm])]
    gguf = yard.folder / (FORK_GGUF if arm in (FORK_REPACKED, FORK_TUNED) else "q4_0.gguf")
    command = [sys.executable, "-m", f"{__package__}.peer", str(gguf), str(yard.folder / "ids.json"), *common]
    command += ["--engine", arm.split()[0]]
    return command + ([] if arm in (REPACKED, FORK_REPACKED) else ["--mmap"]) + (["--warm"] if arm == WARM else [])


def run_arm(yard: Yard, condition: Condition, arm: str) -> dict[str, Any]:
    """Run one arm on a cold page cache. Raises SystemExit if storage does not have the wanted rate."""
    limit = yard.limit_bytes(condition)
    ahead = read_ahead_path(yard.folder)
    found = ahead.read_text()
    probe = [sys.executable, "-m", f"{__package__}.probes", str(yard.folder / "q4")]
    try:
        if arm in (TUNED, WARM, FORK_TUNED):
            ahead.write_text(str(TUNED_READ_AHEAD_KIB))
        drop_caches()
        command = arm_command(yard, condition, arm)
        done = run_limited(command, limit, condition.rate, yard.folder, before=[] if limit is None else probe)
    finally:
        ahead.write_text(found)
    probed = json.loads(done.before) if done.before else {}
    if condition.rate is not None and abs(probed["storage_bytes_per_s"] / condition.rate - 1) > RATE_ERROR:
        raise SystemExit(f"{condition.name}: storage gives {probed['storage_bytes_per_s']:.0f} bytes/s in the group")
    facts = {"limit_bytes": limit, "probe": probed, "group_peak_bytes": done.peak_bytes, "limit_hits": done.limit_hits}
    return facts | ({"failed": done.status} if done.status else json.loads(done.output.splitlines()[-1]))


def figures(arm: str, told: dict[str, Any]) -> dict[str, float]:
    """Return decode and prefill rates, and MiB read per token."""
    if "failed" in told:
        return {"decode": 0.0, "prefill": 0.0, "read_mib": 0.0}
    is_own = arm in OWN_OPTIONS
    measured = told["measured"] if is_own else told
    rate = measured["tokens_per_s"] if is_own else 1e9 / measured["tpot_mean_ns"]
    return {
        "decode": rate,
        "prefill": measured["prompt_tokens"] / measured["ttft_ns"] * 1e9,
        "read_mib": measured["decode_bytes_read_per_token"] / 2**20,
    }


def summary_row(condition: Condition, arm: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians and spread of an arm."""
    decode = [each["decode"] for each in rounds]
    return {
        "condition": condition.name,
        "arm": arm,
        "decode_tokens_per_s": statistics.median(decode),
        "decode_least": min(decode),
        "decode_most": max(decode),
        "rounds": len(rounds),
        "failed": sum(not rate for rate in decode),
        "prefill_tokens_per_s": statistics.median(each["prefill"] for each in rounds),
        "read_mib_per_token": statistics.median(each["read_mib"] for each in rounds),
    }


def summary_rows(results: Path, peers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of all runs in a folder, including those of earlier calls."""
    found = []
    for condition in CONDITIONS:
        for arm in (*arms(condition), *peers):
            rounds = [figures(arm, told) for told in runs(results, condition.name, arm)]
            found += [summary_row(condition, arm, rounds)] if rounds else []
    return found


def write_summary(results: Path, states: list[dict[str, Any]], peers: Mapping[str, str]) -> None:
    """Write `summary.json`. states: of the machine, before and after the runs."""
    told = {"machine": states, "rows": summary_rows(results, peers), "overlap": overlap_rows(results)}
    (results / "summary.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    lines = ["| condition | arm | decode, tokens/s (least to most) | prefill, tokens/s | MiB read per token |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        decode = f"{row['decode_tokens_per_s']:.2f} ({row['decode_least']:.2f} to {row['decode_most']:.2f})"
        decode += f"; {row['failed']} of {row['rounds']} runs died" if row["failed"] else ""
        rest = f"{row['prefill_tokens_per_s']:.1f} | {row['read_mib_per_token']:.0f}"
        lines.append(f"| {row['condition']} | {row['arm']} | {decode} | {rest} |")
    return "\n".join(lines)


def prepare_fork(folder: Path) -> tuple[str, ...]:
    """Name the library of the fork in the environment. Return the arms to leave out if it or its file is missing."""
    is_installed = find_spec("ik_llama_cpp") is not None
    if not (is_installed and library_path(folder).exists() and (folder / FORK_GGUF).exists()):
        remedy = f"`python -m bench.yardstick {folder} --results FOLDER` makes its missing files"
        print(f"ik_llama.cpp is left out: {remedy}", file=sys.stderr)
        return FORK_REPACKED, FORK_TUNED
    os.environ[LIBRARY_VARIABLE] = str(library_path(folder).resolve())
    return ()


def prepare(folder: Path) -> Yard:
    """Write the text and its ids, and read the manifest."""
    tokenizer = Tokenizer.from_file(str(folder / "checkpoint" / "tokenizer.json"))
    (folder / "text.txt").write_text(text(), encoding="utf-8")
    (folder / "ids.json").write_text(json.dumps(tokenizer.encode(text()).ids[: 2 * CONTEXT]))
    return Yard(folder, json.loads((folder / "q4" / "moec.json").read_text(encoding="utf-8")))


def machine(folder: Path) -> dict[str, Any]:
    """Return the machine that the figures belong to, and its state."""
    from moec.runtime.memory.bandwidth import MOST_BYTES, read_bytes_per_s

    told = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    found = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    return {name: found.get(name, "?").strip() for name in ("Model name", "CPU(s)", "L3 cache")} | {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "kernel": os.uname().release,
        "governor": governor.read_text().strip() if governor.exists() else "none told",
        "read_ahead_kib": int(read_ahead_path(folder).read_text()),
        "load": Path("/proc/loadavg").read_text().strip(),
        "processor_ticks": Path("/proc/stat").read_text().splitlines()[0].split()[1:],  # the eighth is stolen time
        "memory_bytes_per_s": read_bytes_per_s(MOST_BYTES, 2),
    }


def main() -> None:
    """Read the command line, run and write."""
    parser = argparse.ArgumentParser(description="moec next to llama.cpp and its fork on the yardstick.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of conditions; by default all run")
    parser.add_argument("--arms", nargs="*", help="names of arms; by default all run")
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    options = parser.parse_args()
    left_out = prepare_fork(options.folder)
    yard, states = replace(prepare(options.folder), peers=dict(options.peer)), [machine(options.folder)]
    options.results.mkdir(parents=True, exist_ok=True)
    for condition in CONDITIONS:
        if options.only and condition.name not in options.only:
            continue
        chosen = [arm for arm in arms(condition) if arm not in left_out and (not options.arms or arm in options.arms)]
        chosen += yard.peers
        for turn in range(1, options.rounds + 1):
            for arm in chosen:
                if arm == AS_FOUND and turn > 1:
                    continue
                told = run_arm(yard, condition, arm)
                path = run_path(options.results, condition.name, arm, turn)
                path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
                print(condition.name, arm, turn, json.dumps(figures(arm, told)), flush=True)
        write_summary(options.results, [*states, machine(yard.folder)], yard.peers)
    print(table(summary_rows(options.results, yard.peers)), overlap_table(overlap_rows(options.results)), sep="\n\n")


if __name__ == "__main__":
    main()
