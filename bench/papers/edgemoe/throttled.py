"""Measured time per token of EdgeMoE, moec and simpler runtimes with throttled storage. Linux, root."""

from __future__ import annotations

import json
import sys
from typing import Any

from ...yardstick.commands import command_line
from ...yardstick.limits import drop_caches, run_limited
from ..figure import Figure, Measured, Panel
from ..inputs import Inputs
from ..models import PLANTED
from .arms import ARMS, Runtime, least_bytes
from .speed import PUBLISHED_GAIN

RATES = {"500 MB/s": 500_000_000, "90 MB/s": 90_000_000}
"""Limits of storage reads, bytes per s."""
MOST_RATE_ERROR = 0.1
"""Largest relative difference of direct reads from the limit."""
PROMPT_TOKENS, TOKENS = 8, 48
CONTEXT = 256
AS_EDGEMOE = ("--set", "prefetch-rule=until-routed", "--set", "prefetch-layers=1")


def command(inputs: Inputs, runtime: Runtime, tokens: int = TOKENS) -> list[str]:
    """Return the command line that decodes tokens of a held-out text with an arm."""
    bundle, text = inputs.bundle(runtime.bundle), inputs.text("test", 0)
    if runtime.streams_layers:
        module = "bench.yardstick.baselines.layer_streaming"
        return [sys.executable, "-m", module, str(bundle), str(text), "--tokens", str(tokens)]
    held = runtime.held_bytes(inputs)
    size = least_bytes(inputs, runtime.bundle) if held is None else held
    options = ["--expert-cache", size, "--set", f"policy={runtime.policy}", "--set", f"prefetch={runtime.prefetch}"]
    options += [*AS_EDGEMOE] if runtime.prefetch == "path" else []
    options += [] if runtime.is_warm else ["--set", "cache-state=cold"]
    common = (
        "--text",
        text,
        "--prompt-tokens",
        PROMPT_TOKENS,
        "--tokens",
        tokens,
        "--context",
        max(CONTEXT, PROMPT_TOKENS + tokens),
    )
    return command_line("bench", bundle, *common, *options)


def measured_ms(inputs: Inputs, name: str, rate: int) -> float:
    """Return the time per token of an arm under a limit of storage reads. Raises SystemExit if a run fails."""

    def run() -> dict[str, Any]:
        drop_caches()
        arguments = command(inputs, ARMS[name])
        done = run_limited(arguments, None, rate, inputs.folder)
        if done.status:
            raise SystemExit(f"{name}: `{' '.join(arguments)}` ended with {done.status}")
        told: dict[str, Any] = json.loads(done.output.splitlines()[-1])
        return told

    told = inputs.kept(f"throttled-{rate}-{name}", ARMS[name].bundle, command(inputs, ARMS[name]), run)
    return 1e3 / float(told["measured"]["tokens_per_s"])


def direct_rate(inputs: Inputs, rate: int) -> float:
    """Return the rate of direct reads under the limit, bytes per s. Raises SystemExit if it is not the limit."""
    probe = [sys.executable, "-m", "bench.yardstick.peers.probes", str(inputs.bundle("planted-16"))]
    done = run_limited(probe, None, rate, inputs.folder)
    found = float(json.loads(done.output)["storage_bytes_per_s"])
    if abs(found / rate - 1) > MOST_RATE_ERROR:
        raise SystemExit(f"direct reads take {found / 1e6:.0f} MB/s under a limit of {rate / 1e6:.0f} MB/s")
    return found


def tpot(inputs: Inputs) -> Measured:
    """Measure the time per token of all arms under two limits of storage reads."""
    rates = [direct_rate(inputs, rate) for rate in RATES.values()]
    bars = {name: [measured_ms(inputs, name, rate) for rate in RATES.values()] for name in ARMS}
    panel = Panel("bars", "Measured time per token", "limit of reads", "ms", groups=list(RATES), bars=bars, is_log=True)
    pairs = zip(RATES, rates, strict=True)
    told = [f"direct reads under the limit of {name}: {found / 1e6:.0f} MB/s" for name, found in pairs]
    told += [
        f"{limit}: " + ", ".join(f"{name} {line[at]:.3g} ms" for name, line in bars.items())
        for at, limit in enumerate(RATES)
    ]
    gains = [exp / own for exp, own in zip(bars["IO-EXP"], bars["EdgeMoE"], strict=True)]
    told.append("EdgeMoE over IO-EXP: " + ", ".join(f"{gain:.2f} times" for gain in gains))
    return Measured([panel], told, "same" if min(gains) >= PUBLISHED_GAIN else "different")


FIGURES = (
    Figure(
        name="edgemoe-tpot-measured",
        paper="edgemoe",
        source="Figure 11",
        title="Measured time per token with limited storage",
        reported="Over IO-EXP, EdgeMoE is 2.64 to 3.03 times as fast on a Jetson TX2 with an SSD, and 4.49 to 4.76 "
        "times with a hard disk.",
        models=(PLANTED,),
        how=f"`moec bench` decodes {TOKENS} tokens of a held-out text on this machine, once per arm. A control "
        "group limits the reads of storage, and the page cache is dropped before each run. EdgeMoE reads as "
        "by `--as edgemoe`.",
        why="Over IO-QEXP the gain is 1.7 and 1.2 times. Experts read ahead but not used delay others at 90 MB/s. moec "
        "holds all of its experts, with 1.7 bits, in the same memory.",
        measure=tpot,
        throttles=True,
    ),
)
