"""EdgeMoE, moec and simpler runtimes, as settings of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moec.cli.simulation.traces import replayed_bundle
from moec.runtime.bundle.open_bundle import Bundle
from moec.runtime.options.runtime import Prefetch
from moec.runtime.simulation.timeline import SimulatedMachine, Timeline, predict_steps, timed_pass
from moec.runtime.trace.trace import Trace

from ..inputs import SHIPPED, Inputs, mean
from ..simulated import Arm, Device, advice_of, simulate

TEXTS = 2
BUDGET_SHARE = 0.5
"""Memory for experts of EdgeMoE and moec, as a share of the expert bytes of EdgeMoE's bundle."""
EDGEMOE, MOEC = "planted-edgemoe", SHIPPED
"""Bundles at a loss of 2 %. The first is that of EdgeMoE's own search, with its quantizer."""
LAYERS_HELD = 2


@dataclass(frozen=True)
class Runtime:
    """One arm of the comparison.

    bundle: name of its bundle.
    held_bytes: returns the bytes of experts in memory; None: the least that the bundle runs with.
    streams_layers: whether all experts of a layer are read for every token.
    """

    bundle: str
    held_bytes: Callable[[Inputs], int | None]
    policy: str = "lru"
    prefetch: Prefetch = "off"
    is_warm: bool = False
    streams_layers: bool = False


def all_of(bundle: str) -> Callable[[Inputs], int]:
    """Return a function that gives the bytes of all experts of a bundle."""
    return lambda inputs: expert_bytes(inputs, bundle)


def budget(inputs: Inputs) -> int:
    """Return the memory for experts that EdgeMoE and moec share."""
    return int(BUDGET_SHARE * expert_bytes(inputs, EDGEMOE))


def nothing(inputs: Inputs) -> None:
    """Keep no expert."""


def expert_bytes(inputs: Inputs, bundle: str) -> int:
    """Return the bytes of all experts of a bundle, in whole pages."""
    return inputs.opened(bundle).manifest.cost.expert_padded_bytes


def layers_held(inputs: Inputs) -> int:
    """Return the bytes of the layers that layer streaming keeps."""
    bundle = inputs.opened("planted-4")
    return LAYERS_HELD * expert_bytes(inputs, "planted-4") // bundle.manifest.model.num_layers


ARMS = {
    "moec": Runtime(MOEC, budget, "lrfu", "lookahead", is_warm=True),
    "EdgeMoE": Runtime(EDGEMOE, budget, "edgemoe", "path", is_warm=True),
    "EdgeMoE without P": Runtime(EDGEMOE, budget, "edgemoe", is_warm=True),
    "IO-QFREE": Runtime("planted-8", all_of("planted-8"), is_warm=True),
    "IO-FREE": Runtime("planted-16", all_of("planted-16"), is_warm=True),
    "IO-QEXP": Runtime("planted-4", nothing),
    "STI": Runtime("planted-4", layers_held, streams_layers=True),
    "IO-EXP": Runtime("planted-16", nothing),
}
STEPS = {
    "none": Runtime("planted-16", nothing),
    "+Q": Runtime(EDGEMOE, nothing),
    "+Q+P": Runtime(EDGEMOE, lambda inputs: LAYERS_HELD * least_bytes(inputs, EDGEMOE), "edgemoe", "path"),
    "+Q+P+C": ARMS["EdgeMoE"],
    "+Q+C": ARMS["EdgeMoE without P"],
}


def least_bytes(inputs: Inputs, bundle: str) -> int:
    """Return the bytes of the experts that one token needs in a layer."""
    return inputs.opened(bundle).manifest.cost.minimum_expert_bytes


def timelines(inputs: Inputs, runtime: Runtime, device: Device) -> list[Timeline]:
    """Return the prediction of an arm on each text."""
    return [predicted(inputs, runtime, device, trace) for trace in inputs.traces(runtime.bundle, TEXTS)]


def predicted(inputs: Inputs, runtime: Runtime, device: Device, trace: Trace) -> Timeline:
    """Return the prediction of an arm on a trace of its bundle."""
    bundle, held = inputs.opened(runtime.bundle), runtime.held_bytes(inputs)
    if runtime.streams_layers:
        return streamed(bundle, device.with_own_times(trace, bundle), device, held or 0)
    told = as_edgemoe(trace) if runtime.prefetch == "path" else trace
    arm = Arm(held, runtime.policy, runtime.prefetch, is_warm=runtime.is_warm)
    return simulate(bundle, told, device, arm).timeline


def as_edgemoe(trace: Trace) -> Trace:
    """Return the trace as of a run that reads the next layer's likeliest experts until its router has run."""
    return replace(trace, header=replace(trace.header, prefetch_rule="until-routed", prefetch_layers=1))


def streamed(bundle: Bundle, trace: Trace, device: Device, held_bytes: int) -> Timeline:
    """Predict layer streaming: all experts of a layer are read for every token, and the next layer meanwhile."""
    replayed, first = replayed_bundle(bundle), trace.header.first_expert
    layers = [tuple(range(start, end)) for start, end in pairwise(first)]
    following = (*layers[1:], layers[0])
    steps = []
    for each in trace.passes:
        timed = timed_pass(each, first, advice_of(bundle, trace, "off"))
        steps.append((replace(timed, tokens=1, accesses=tuple(enumerate(layers)), advice=following, loads=()),))
    machine = SimulatedMachine(device.rates, None, replayed.next_in_file)
    return predict_steps(steps, trace.prompt_passes, replayed.cache_spec(held_bytes), "lru", machine)


def tpot_ms(found: Sequence[Timeline]) -> float:
    """Return the mean time per token of all texts."""
    return mean([float(each.tpot_mean_ns or 0) for each in found]) / 1e6


def memory_mb(inputs: Inputs, runtime: Runtime) -> float:
    """Return the weights in memory: those outside the experts, and the experts that are held."""
    cost = inputs.opened(runtime.bundle).manifest.cost
    held = runtime.held_bytes(inputs)
    return (cost.dense_packed_bytes + (least_bytes(inputs, runtime.bundle) if held is None else held)) / 1e6
