"""Time per token, memory and energy of EdgeMoE, moec and simpler runtimes, simulated on the devices of the paper."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

from moec.cli.simulation.predictions import token_joules

from ..figure import Figure, Measured, Panel, Verdict, percent
from ..inputs import Inputs, mean
from ..models import PLANTED
from ..simulated import Device
from .arms import ARMS, EDGEMOE, STEPS, Runtime, expert_bytes, memory_mb, nothing, timelines, tpot_ms

TX2, PI = "jetson-tx2-ssd", "raspberry-pi-4b-sd"
STORAGE = {"SSD, 550 MB/s": None, "500 MB/s": 500_000_000, "90 MB/s": 90_000_000}
"""Storage next to a Jetson TX2, bytes per s; None for that of its profile."""
BUDGETS = (0.25, 0.5, 0.75, 1.0)
"""Memory for experts, as a share of the expert bytes of EdgeMoE's bundle."""
PUBLISHED_GAIN = 2.55
"""Least published ratio of the time of IO-EXP to that of EdgeMoE."""


def tpot(inputs: Inputs) -> Measured:
    """Predict the time per token of all arms on three storages."""
    devices = {name: Device(TX2, rate) for name, rate in STORAGE.items()} | {"Pi 4B, SD card": Device(PI)}
    bars = {
        arm: [tpot_ms(timelines(inputs, runtime, device)) for device in devices.values()]
        for arm, runtime in ARMS.items()
    }
    panel = Panel("bars", "Time per token", "", "ms", groups=list(devices), bars=bars, is_log=True)
    told = []
    for at, name in enumerate(devices):
        slower = ", ".join(f"{arm} {bars[arm][at] / bars['EdgeMoE'][at]:.2f}" for arm in ("IO-EXP", "IO-QEXP", "STI"))
        faster = ", ".join(f"{arm} {bars['EdgeMoE'][at] / bars[arm][at]:.2f}" for arm in ("EdgeMoE without P", "moec"))
        told.append(f"{name}: times as long as EdgeMoE: {slower}; times as fast: {faster}")
    gains = [exp / own for exp, own in zip(bars["IO-EXP"], bars["EdgeMoE"], strict=True)]
    return Measured([panel], told, "same" if min(gains) >= PUBLISHED_GAIN else "different")


def ablation(inputs: Inputs) -> Measured:
    """Predict EdgeMoE without its parts, added one after the other."""
    device = Device(TX2)
    times = [tpot_ms(timelines(inputs, runtime, device)) for runtime in STEPS.values()]
    memory = [memory_mb(inputs, runtime) for runtime in STEPS.values()]
    groups = list(STEPS)
    panels = [
        Panel("bars", f"Time per token, {TX2}", "", "ms", groups=groups, bars={"time per token": times}),
        Panel("bars", "Weights in memory", "", "MB", groups=groups, bars={"memory": memory}),
    ]
    told = [f"{name}: {time:.3g} ms, {size:.3g} MB" for name, time, size in zip(groups, times, memory, strict=True)]
    gains = [before / after for before, after in pairwise(times[: groups.index("+Q+P+C") + 1])]
    verdict: Verdict = "same" if min(gains) >= 1.05 else "partly" if gains[0] >= 1.05 else "different"
    return Measured(panels, told, verdict)


def io_share(inputs: Inputs) -> Measured:
    """Predict computing and waiting of a token whose experts are all read."""
    computing, waiting, ratios = [], [], []
    for device in (Device(TX2), Device(PI)):
        found = timelines(inputs, ARMS["IO-EXP"], device)
        free = tpot_ms(timelines(inputs, ARMS["IO-FREE"], device))
        total, stall = tpot_ms(found), mean([each.stall for each in found])
        computing.append((1 - stall) * total)
        waiting.append(stall * total)
        ratios.append(total / free)
    bars = {"computing": computing, "waiting for reads": waiting}
    panel = Panel("bars", "A token of IO-EXP", "", "ms", groups=[TX2, PI], bars=bars, is_log=True)
    told = [
        f"{name}: {ratio:.0f} times as long as with all experts in memory"
        for name, ratio in zip((TX2, PI), ratios, strict=True)
    ]
    return Measured([panel], told, "same" if max(ratios) <= 5 else "different")


def memory_of_arms(inputs: Inputs) -> Measured:
    """Count the weights in memory of all arms."""
    sizes = {name: memory_mb(inputs, runtime) for name, runtime in ARMS.items()}
    panel = Panel("bars", "Weights in memory", "", "MB", groups=list(sizes), bars={"memory": list(sizes.values())})
    saved = sizes["IO-FREE"] / sizes["EdgeMoE"], sizes["IO-QFREE"] / sizes["EdgeMoE"]
    told = [f"IO-FREE holds {saved[0]:.1f} times as much as EdgeMoE, IO-QFREE {saved[1]:.1f} times"]
    return Measured([panel], told, "same" if saved[0] >= 2.1 and saved[1] >= 0.8 else "different")


def energy(inputs: Inputs) -> Measured:
    """Predict the energy of a token by the draw that the profile states."""
    device = Device(PI)
    joules = {}
    for name, runtime in ARMS.items():
        found = [token_joules(device.profile.power, each) or 0.0 for each in timelines(inputs, runtime, device)]
        joules[name] = 1000 * mean(found)
    panel = Panel(
        "bars", f"Energy of a token, {PI}, by stated power", "", "mJ", groups=list(joules),
        bars={"energy": list(joules.values())}, is_log=True,
    )  # fmt: skip
    more, less = joules["EdgeMoE"] / joules["IO-FREE"], joules["EdgeMoE"] / joules["IO-EXP"]
    told = [f"EdgeMoE takes {more:.1f} times the energy of IO-FREE, and {percent(less)} of that of IO-EXP"]
    return Measured([panel], told, "same" if more <= 1.5 else "different")


def _fixed(size_bytes: int, inputs: Inputs) -> int:
    return size_bytes


def budgets(inputs: Inputs) -> Measured:
    """Predict the time per token over the memory for experts."""
    device = Device(TX2)
    whole = expert_bytes(inputs, EDGEMOE)
    points = {}
    for arm in ("moec", "EdgeMoE", "EdgeMoE without P"):
        line = []
        for share in BUDGETS:
            sized = replace(ARMS[arm], held_bytes=partial(_fixed, int(share * whole)))
            line.append((share * whole / 1e6, tpot_ms(timelines(inputs, sized, device))))
        points[arm] = line
    for name, bundle in (("IO-QEXP INT4", "planted-4"), ("IO-QEXP INT2", "planted-2")):
        time = tpot_ms(timelines(inputs, Runtime(bundle, nothing), device))
        points[name] = [(share * whole / 1e6, time) for share in BUDGETS]
    panel = Panel("lines", f"Time per token, {TX2}", "memory for experts, MB", "ms", points=points)
    is_falling = all(before[1] > after[1] for before, after in pairwise(points["EdgeMoE"]))
    is_faster = all(
        own[1] < other[1]
        for rival in ("IO-QEXP INT4", "IO-QEXP INT2")
        for own, other in zip(points["EdgeMoE"], points[rival], strict=True)
    )
    told = [f"{name}: {line[0][1]:.3g} ms at {line[0][0]:.2g} MB, {line[-1][1]:.3g} ms at {line[-1][0]:.2g} MB"
            for name, line in points.items()]  # fmt: skip
    verdict: Verdict = "same" if is_falling and is_faster else "partly" if is_falling else "different"
    return Measured([panel], told, verdict)


FIGURES = (
    Figure(
        name="edgemoe-tpot",
        paper="edgemoe",
        source="Figure 11",
        title="Time per token of EdgeMoE, moec and the baselines",
        reported="Over IO-EXP, EdgeMoE is 2.64 to 3.03 times as fast on a Jetson TX2 with an SSD, and 4.49 to 4.76 "
        "times with a hard disk. On a Raspberry Pi 4B it is 2.55 to 3.25 times. Over IO-QEXP it is 1.19 to 2.12 "
        "times, over STI 1.22 to 2.77 times.",
        models=(PLANTED,),
        how="Two held-out texts of 200 tokens. At a loss of 2 %, EdgeMoE's own search gives 40 experts 4 bits and 8 "
        "experts 8 bits (`moec compile --as edgemoe`). Its arm is that bundle, with its buffer, eviction and path "
        "dictionary. Each row of its matrices has a scale and a minimum; as published, a scale alone. EdgeMoE and moec "
        "have memory for half of the bytes of EdgeMoE's experts. IO-QEXP and STI have 4 bits, IO-QFREE 8.",
        why="EdgeMoE is faster than IO-EXP, as published. With preloading (P) it is slower than IO-QEXP: all wait for "
        "storage nearly all the time, and P reads experts that are mostly not chosen. Without P it is 1.8 to 2.0 times "
        "as fast as IO-QEXP. All experts of moec, with 1.7 bits, fit into the same memory. An "
        "[experiment](../experiments/2026-11.md#21-simpler-versions-of-moec-"
        "experts-read-for-every-token-cost-most-of-the-speed-neutral) "
        "measured the baselines on a checkpoint of 13.8 GB.",
        origin="Simulated",
        measure=tpot,
    ),
    Figure(
        name="edgemoe-ablation",
        paper="edgemoe",
        source="Figure 18",
        title="Parts of EdgeMoE, added one after the other",
        reported="On a Jetson TX2 a token takes 0.789 s. Quantization (Q) takes it to 0.392 s, preloading (P) to 0.305 "
        "s, the expert buffer (C) to 0.245 s. Memory is 2.5, 1.21, 0.78 and 0.81 GB.",
        models=(PLANTED,),
        how="Arms of figure 11. Without the buffer, the experts of one layer are in memory, with preloading those "
        "of two. Memory counts weights only.",
        why="Quantization and the buffer bring most. Preloading pays only in time that computing takes, which is "
        "short here. So +Q+C is the best step.",
        origin="Simulated",
        measure=ablation,
    ),
    Figure(
        name="edgemoe-io-share",
        paper="edgemoe",
        source="Figure 3",
        title="Computing and reading of a token",
        reported="Reading experts makes a token take 3.2 to 3.9 times as long on a Jetson TX2, and 3.3 to 3.8 times "
        "on a Raspberry Pi 4B.",
        models=(PLANTED,),
        how="Arms of figure 11. All experts of a token are read, in 16 bits.",
        why="Reading takes a far larger share than published. Here computing is bound by the memory rate, 36 times "
        "the rate of the SSD. The paper's runtime computes more slowly.",
        origin="Simulated",
        measure=io_share,
    ),
    Figure(
        name="edgemoe-memory",
        paper="edgemoe",
        source="Figure 10",
        title="Weights in memory",
        reported="IO-FREE takes 2.1 to 38.6 times the memory of EdgeMoE, IO-QFREE 0.8 to 24.3 times.",
        models=(PLANTED,),
        how="Bytes of the weights outside the experts and of the experts held, by the arms of figure 11.",
        why="The ratio depends on the share of the experts in the model and on the budget.",
        measure=memory_of_arms,
    ),
    Figure(
        name="edgemoe-budgets",
        paper="edgemoe",
        source="Figure 16",
        title="Time per token over the memory budget",
        reported="A token takes less time with a larger buffer. EdgeMoE is faster than IO-QEXP in INT4 and INT2 at "
        "every budget.",
        models=(PLANTED,),
        how="Arms of figure 11. IO-QEXP keeps no expert.",
        why="Time falls with the size of the buffer. With preloading, small buffers are slower than IO-QEXP, "
        "as the ablation shows.",
        origin="Simulated",
        measure=budgets,
    ),
    Figure(
        name="edgemoe-energy",
        paper="edgemoe",
        source="Figure 13",
        title="Energy of a token, by stated power",
        reported="EdgeMoE takes 1.1 % more energy than IO-FREE at least, and 17 % more on average.",
        models=(PLANTED,),
        how="Time of figure 11, multiplied by the draw that the device profile states: 6.4 W computing and 2.7 W "
        "waiting. Nothing was measured with a power meter.",
        why="The paper's tokens are mostly computing. Here they are mostly waiting, which also takes power.",
        origin="Simulated",
        measure=energy,
    ),
)
