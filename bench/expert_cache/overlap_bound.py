"""A bound on the gain of prefetching.

    python -m bench.expert_cache.overlap_bound BUNDLE SHARE=TRACE ... [--compute-ms C]

Replays traces, each recorded with a share of the experts in memory, on an ideal device. Its storage has the recorded
rate and two readers. Reads do not slow down computing, and bookkeeping takes no time. Advice is one of three: none, the
advice of the recorded run, or perfect knowledge of the next one, two or four layers.

No real predictor has perfect knowledge. So no engine with this cache and this routing can take less time per token than
these rows. Takes seconds. Prints a Markdown table of the time per token over max(C, I):

* C: computing per token.
* I: time to read the bytes missed without advice, at the storage rate.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moec.cli.simulation.traces import ReplayedBundle, open_traces, replayed_bundle
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.simulation.recorded_advice import no_advice, recorded_advice
from moec.runtime.simulation.timeline import Advice, DeviceRates, SimulatedMachine, Timeline, predict_steps, timed_pass
from moec.runtime.trace.trace import Trace, TracedPass

POLICY, READERS, DEPTHS = "lrfu", 2, (1, 2, 4)


def perfect_advice(first_expert: list[int], depth: int) -> Advice:
    """Return advice that names all experts of the next `depth` layers of a pass, nearest first."""

    def advise(step: TracedPass, layer: int) -> list[int]:
        ahead = [experts for at, experts in step.accesses(first_expert) if layer < at <= layer + depth]
        return [expert for experts in ahead for expert in experts]

    return advise


def compute_ns(trace: Trace) -> float:
    """Return the time per decoded token without waiting, ns."""
    decoded = trace.passes[trace.prompt_passes :]
    parts = (sum((*p.dense_ns, *p.experts_ns, *p.shared_ns)) + p.head_ns + p.other_ns for p in decoded)
    return sum(parts) / len(decoded)


def replayed_timeline(trace: Trace, replayed: ReplayedBundle, capacity: int, advice: Advice, scale: float) -> Timeline:
    """Replay a trace on the ideal device. scale: factor of the recorded computing times."""
    header = trace.header
    rates = DeviceRates(header.storage_bytes_per_s, header.storage_latency_ns, READERS, scale)
    steps = [(timed_pass(step, header.first_expert, advice),) for step in trace.passes]
    machine = SimulatedMachine(rates, next_in_file=replayed.next_in_file)
    spec = replayed.cache_spec(capacity)
    return predict_steps(steps, trace.prompt_passes, spec, POLICY, machine, replayed.warm)


def main() -> None:
    """Read the command line and print one row per trace and kind of advice."""
    parser = argparse.ArgumentParser(description="A bound on the gain of prefetching.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("traces", nargs="+", metavar="SHARE=TRACE", help="0.5=FILE: recorded with half in memory")
    parser.add_argument("--compute-ms", type=float, help="computing per token in memory; by default the recorded time")
    options = parser.parse_args()
    bundle = open_bundle(options.bundle)
    replayed = replayed_bundle(bundle)
    print("| in memory | GB/s | C, I ms | advice | time per token / max(C, I) | storage busy | MiB a token |")
    print("|---|---|---|---|---|---|---|")
    for argument in options.traces:
        share, path = argument.split("=", 1)
        (trace,) = open_traces([Path(path)], bundle)
        capacity, own_ns = int(replayed.total_bytes * float(share)), compute_ns(trace)
        at_work_ns = own_ns if options.compute_ms is None else options.compute_ms * 1e6
        first, rate = trace.header.first_expert, trace.header.storage_bytes_per_s
        kinds: dict[str, Advice] = {"none": no_advice, "as recorded": recorded_advice}
        kinds |= {f"perfect, {depth} ahead": perfect_advice(first, depth) for depth in DEPTHS}
        missed_ns = 0.0
        for name, advice in kinds.items():
            timeline = replayed_timeline(trace, replayed, capacity, advice, at_work_ns / own_ns)
            read = timeline.decode_bytes_read_per_token
            missed_ns = missed_ns or read / rate * 1e9
            ratio = (timeline.tpot_mean_ns or 0) / max(at_work_ns, missed_ns)
            times = f"{at_work_ns / 1e6:.1f}, {missed_ns / 1e6:.1f}"
            row = f"{name} | {ratio:.2f} | {timeline.busy:.2f} | {read / 2**20:.0f}"
            print(f"| {float(share):.0%} | {rate / 1e9:.2f} | {times} | {row} |", flush=True)


if __name__ == "__main__":
    main()
