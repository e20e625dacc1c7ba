"""HOBBIT next to runtimes of the kinds that it compares with, for several lengths of prompt and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moec.runtime.options.runtime import Prefetch
from moec.runtime.simulation.timeline import Timeline
from moec.runtime.trace.trace import Trace

from ..edgemoe.arms import streamed
from ..figure import Figure, Measured, Panel, Verdict
from ..inputs import Inputs, mean
from ..models import PLANTED
from ..simulated import Arm, Device, simulate
from .loading import BUNDLE, MOST_DEPTH, PUBLISHED, SHARE, TEXTS

DEVICES = ("jetson-agx-orin", "jetson-tx2-ssd")
GROUPS = ((16, 32), (16, 128), (32, 128), (128, 32), (128, 128))
"""Tokens of prompt and output."""
MOST_OUTPUT = 128
AS_PUBLISHED, OWN = MOST_DEPTH, ()
"""Options of the recording: HOBBIT's rule of lookahead, and moec's."""
BASELINES = {"MoE-Infinity type": 2.30, "MoE-Offloading type": 3.21, "mapped file type": 13.0, "layer streaming": 1.0}
"""Kinds of runtimes, and the least published gain of decoding over them with a GPU; 1: only a picture has it."""


@dataclass(frozen=True)
class System:
    """A kind of runtime, as a setting of the simulation.

    recorded: options of `moec bench` for its traces.
    layers_ahead: layers that lookahead asks; None: those of the recording.
    streams_layers: whether all experts of a layer are read for every token.
    """

    policy: str
    prefetch: Prefetch
    recorded: tuple[object, ...] = AS_PUBLISHED
    layers_ahead: int | None = None
    modes: tuple[tuple[str, str], ...] = ()
    streams_layers: bool = False


SYSTEMS = {
    "HOBBIT": System("hobbit", "lookahead", layers_ahead=2, modes=(("dynamic_precision", PUBLISHED),)),
    "moec": System("lrfu", "lookahead", OWN),
    "MoE-Infinity type": System("lfu", "path", OWN),
    "MoE-Offloading type": System("lru", "lookahead", layers_ahead=1),
    "mapped file type": System("lru", "off"),
    "layer streaming": System("lru", "off", streams_layers=True),
}


def shortened(trace: Trace, output: int) -> Trace:
    """Return a trace with the first output tokens alone. The first one follows from the prompt."""
    return replace(trace, passes=trace.passes[: trace.prompt_passes + output - 1])


def predicted(inputs: Inputs, system: System, device: Device, prompt: int, output: int) -> list[Timeline]:
    """Return the prediction of a system on each text."""
    bundle, found = inputs.opened(BUNDLE), []
    size = int(SHARE * bundle.manifest.cost.expert_padded_bytes)
    lengths = ("--prompt-tokens", prompt, "--tokens", MOST_OUTPUT)
    for trace in inputs.traces(BUNDLE, TEXTS, *system.recorded, *lengths):
        told = shortened(trace, output)
        if system.streams_layers:
            found.append(streamed(bundle, device.with_own_times(told, bundle), device, size))
            continue
        if system.layers_ahead is not None:
            told = replace(told, header=replace(told.header, prefetch_layers=system.layers_ahead))
        found.append(simulate(bundle, told, device, Arm(size, system.policy, system.prefetch, system.modes)).timeline)
    return found


def end_to_end(inputs: Inputs) -> Measured:
    """Predict decode speed and time to the first token of all systems."""
    groups = [f"{prompt}|{output}" for prompt, output in GROUPS]
    panels, told, gains = [], [], dict[str, list[float]]()
    for name in DEVICES:
        device = Device(name)
        rates, times = dict[str, list[float]](), dict[str, list[float]]()
        for label, system in SYSTEMS.items():
            found = [predicted(inputs, system, device, *group) for group in GROUPS]
            rates[label] = [mean([float(each.tokens_per_s or 0) for each in of_group]) for of_group in found]
            times[label] = [mean([each.ttft_ns / 1e6 for each in of_group]) for of_group in found]
        panels += [
            Panel("bars", f"Decoding, {name}", "prompt|output", "tokens/s", groups=groups, bars=rates, is_log=True),
            Panel("bars", f"Prompt, {name}", "prompt|output", "ms to the first token", groups=groups, bars=times),
        ]  # fmt: skip
        for rival in ("moec", *BASELINES):
            faster = quotients(rates["HOBBIT"], rates[rival])
            gains.setdefault(rival, []).extend(faster)
            told.append(f"{name}, HOBBIT over {rival}: decoding {span(faster)} times as fast, "
                        f"prompt {span(quotients(times[rival], times['HOBBIT']))} times")  # fmt: skip
    is_faster = [min(gains[rival]) > 1 for rival in BASELINES]
    is_published = [min(gains[rival]) >= least for rival, least in BASELINES.items()]
    verdict: Verdict = "same" if all(is_published) else "partly" if all(is_faster) else "different"
    return Measured(panels, told, verdict)


def quotients(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the quotients of values."""
    return [one / other for one, other in zip(above, below, strict=True)]


def span(values: Sequence[float]) -> str:
    """Return the least and the largest value as text."""
    return f"{min(values):.2f} to {max(values):.2f}"


FIGURES = (
    Figure(
        name="hobbit-end-to-end",
        paper="hobbit",
        source="Figures 14 and 15",
        title="Decoding and prompts next to other kinds of runtimes",
        reported="On a Jetson AGX Orin HOBBIT decodes 3.64 and 9.93 times as fast as MoE-Infinity (two models), and "
        "13.0 and 18.9 times as fast as llama.cpp with a mapped file. Prompts take 60 to 80 % less time. On an RTX "
        "4090 it decodes 3.2 to 3.3 times as fast as MoE-Offloading.",
        models=(PLANTED,),
        how="Two held-out texts, a quarter of the experts in memory. HOBBIT has 16 and 4 bits by thresholds "
        "0.55,0.82, and looks two layers ahead; all others have 16 bits. The other programs themselves were not "
        "run.",
        why="HOBBIT decodes faster than every other kind. The gains are smaller, because all kinds have the same "
        "reads and kernels here. moec comes nearest, and loses nothing.",
        origin="Simulated",
        measure=end_to_end,
    ),
)
