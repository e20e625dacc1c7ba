"""Strategies of dividing experts between CPU and GPU, simulated with stated rates. No GPU and no clock takes part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.accelerator.workload import STRATEGIES, Workload, decode_ns, prefill_ns
from moec.profiles.device import DeviceProfile
from moec.profiles.loading import load_profile
from moec.runtime.accelerator.latency import LatencyModel

from ..figure import Figure, Measured, Panel, Verdict, significant
from ..inputs import Inputs, mean
from ..models import PLANTED
from .popularity import popularity

PROFILE = "quadro-rtx-6000-host"
CPU_FLOPS_PER_S = 1e12
"""Estimate: half of the peak of two processors with 12 cores, 2.6 GHz and 32 operations per cycle (AVX2)."""
LAYERS, HIDDEN, WIDTH, KEY_WIDTH, VOCABULARY, TOP_K = 32, 4096, 14336, 1024, 32000, 2
"""Shape of Mixtral-8x7B."""
RESIDENTS = 56
"""Experts on the GPU in environment 1 of the paper."""
BYTES_PER_WEIGHT = 2
INPUTS, OUTPUTS = (32, 64, 128, 256, 512), (64, 128, 256)
PROMPTS, BEAMS = (512, 1024, 2048, 4096), (4, 8, 12, 16)
BEAM_INPUT, BEAM_OUTPUT = 32, 64
STEPS = 16
LEAST_GAIN = 1.05
"""Mean gain over static placement that counts as one."""
TWIDDLER, PLACED, COPIED = "published rule", "static placement", "copy only"


@dataclass(frozen=True)
class Costs:
    """Workload and times of an expert for one strategy."""

    work: Workload
    latency: LatencyModel
    residents: np.ndarray
    strategy: str

    def prefill_s(self, tokens: int) -> float:
        """Return the time to the first token."""
        return prefill_ns(self.work, self.latency, self.residents, self.strategy, tokens) / 1e9

    def generated_per_s(self, prompt: int, output: int, width: int = 1) -> float:
        """Return generated tokens of one sequence over the time of prompt and output."""
        step = decode_ns(self.work, self.latency, self.residents, self.strategy, width, STEPS) / 1e9
        return output / (self.prefill_s(prompt) + (output - 1) * step)


def expert_latency(profile: DeviceProfile) -> LatencyModel:
    """Return the times of one expert: its bytes over a rate of memory, and its products over a rate of operations.

    Raises ValueError if the profile does not state a GPU with a link and a rate of operations.
    """
    gpu = profile.gpu
    if gpu is None or gpu.link_bytes_per_s is None or gpu.flops_per_s is None:
        raise ValueError(f"expected a GPU with a link and a rate of operations in `{profile.name}`")
    weights = 3 * HIDDEN * WIDTH
    return LatencyModel(
        cpu_fixed_ns=1e9 * BYTES_PER_WEIGHT * weights / profile.memory_bytes_per_s,
        cpu_token_ns=1e9 * 2 * weights / CPU_FLOPS_PER_S,
        device_fixed_ns=1e9 * BYTES_PER_WEIGHT * weights / gpu.memory_bytes_per_s,
        device_token_ns=1e9 * 2 * weights / gpu.flops_per_s,
        staging_ns_per_byte=0.0,
        link_ns_per_byte=1e9 / gpu.link_bytes_per_s,
    )


def workload(counts: np.ndarray, memory_bytes_per_s: float, flops_per_s: float) -> Workload:
    """Return Mixtral's workload with dense weights on a side of these rates.

    counts: tokens of each expert, of any number of layers, [L, E]. They are repeated for further layers.
    """
    attention, head = 2 * HIDDEN * (HIDDEN + KEY_WIDTH), HIDDEN * VOCABULARY
    return Workload(
        np.resize(counts, (LAYERS, counts.shape[1])),
        TOP_K,
        BYTES_PER_WEIGHT * 3 * HIDDEN * WIDTH,
        dense_fixed_ns=1e9 * BYTES_PER_WEIGHT * attention / memory_bytes_per_s,
        dense_token_ns=1e9 * 2 * attention / flops_per_s,
        head_ns=1e9 * BYTES_PER_WEIGHT * head / memory_bytes_per_s,
    )


def strategies(inputs: Inputs) -> dict[str, Costs]:
    """Return the costs of each strategy. With CPU only, dense weights are on the CPU, else on the GPU."""
    profile, counts = load_profile(PROFILE), popularity(inputs, PLANTED, "train")
    latency, gpu = expert_latency(profile), profile.gpu
    found = {}
    for name, cooperation in STRATEGIES.items():
        if cooperation is None or gpu is None or gpu.flops_per_s is None:
            work = workload(counts, profile.memory_bytes_per_s, CPU_FLOPS_PER_S)
        else:
            work = workload(counts, gpu.memory_bytes_per_s, gpu.flops_per_s)
        found[name] = Costs(work, latency, work.residents(RESIDENTS), name)
    return found


def lengths(inputs: Inputs) -> Measured:
    """Predict generated tokens per second for all pairs of lengths."""
    rates = {
        name: {(prompt, output): costs.generated_per_s(prompt, output) for prompt in INPUTS for output in OUTPUTS}
        for name, costs in strategies(inputs).items()
    }
    panels = [
        Panel(
            "lines", f"{output} generated tokens", "tokens of the prompt", "tokens/s",
            points={name: [(float(prompt), rate[prompt, output]) for prompt in INPUTS] for name, rate in rates.items()},
        )
        for output in OUTPUTS
    ]  # fmt: skip
    told = [
        _expert_times(),
        *(f"{name}: {mean(list(rate.values())):.2f} tokens/s on average" for name, rate in rates.items()),
    ]
    return _compared(panels, told, {name: list(rate.values()) for name, rate in rates.items()})


def prompts(inputs: Inputs) -> Measured:
    """Predict the time to the first token of long prompts."""
    times = {name: [costs.prefill_s(prompt) for prompt in PROMPTS] for name, costs in strategies(inputs).items()}
    groups = [str(prompt) for prompt in PROMPTS]
    panel = Panel(
        "bars", "Time to the first token", "tokens of the prompt", "s", groups=groups, bars=times, is_log=True
    )
    told = [
        f"{name}: " + ", ".join(f"{significant(time)} s for {group}" for time, group in zip(line, groups, strict=True))
        for name, line in times.items()
    ]
    return _compared([panel], told, {name: [1 / time for time in line] for name, line in times.items()})


def beams(inputs: Inputs) -> Measured:
    """Predict generated tokens per second of beam search."""
    rates = {
        name: [costs.generated_per_s(BEAM_INPUT, BEAM_OUTPUT, width) for width in BEAMS]
        for name, costs in strategies(inputs).items()
    }
    groups = [str(width) for width in BEAMS]
    panel = Panel("bars", "Beam search", "beams", "tokens/s", groups=groups, bars=rates)
    told = [
        f"{name}: " + ", ".join(f"{significant(rate)} tokens/s with {group}" for rate, group in
                                zip(line, groups, strict=True))
        for name, line in rates.items()
    ]  # fmt: skip
    return _compared([panel], told, rates)


def _expert_times() -> str:
    """Return the stated times of an expert as a sentence."""
    latency = expert_latency(load_profile(PROFILE))
    copy_ms = latency.transfer_ns(BYTES_PER_WEIGHT * 3 * HIDDEN * WIDTH) / 1e6
    return (
        f"an expert of n tokens: CPU {latency.cpu_fixed_ns / 1e6:.2f} + {latency.cpu_token_ns / 1e6:.2f} n ms, GPU "
        f"{latency.device_fixed_ns / 1e6:.2f} + {latency.device_token_ns / 1e6:.2f} n ms; copy of its weights "
        f"{copy_ms:.1f} ms"
    )


def _compared(panels: list[Panel], told: list[str], rates: dict[str, list[float]]) -> Measured:
    """Return a result with the gain of Twiddler's rule over both rivals."""
    gains = {
        rival: [own / other for own, other in zip(rates[TWIDDLER], rates[rival], strict=True)]
        for rival in (PLACED, COPIED)
    }
    told = told + [
        f"published rule over {rival}: {mean(line):.2f} times on average ({min(line):.2f} to {max(line):.2f})"
        for rival, line in gains.items()
    ]
    never_slower = min(map(min, gains.values())) >= 0.995
    is_faster = mean(gains[PLACED]) >= LEAST_GAIN and mean(gains[COPIED]) > 1
    verdict: Verdict = "same" if never_slower and is_faster else "partly" if never_slower or is_faster else "different"
    return Measured(panels, told, verdict)


_HOW = (
    f"The profile `{PROFILE}` (environment 1) with the shape of Mixtral-8x7B in 16 bits. Nothing ran on a GPU. An "
    "expert takes its bytes over a rate of memory, and its products over a rate of operations "
    f"({CPU_FLOPS_PER_S / 1e12:g} TFLOPS of the CPU, an estimate). Tokens draw experts by the popularity of the "
    f"planted example, whose layers are repeated. The GPU holds the {RESIDENTS} most popular of 256 experts and all "
    "dense weights. Static placement computes all others on the CPU (llama.cpp type). Copy only copies them "
    "(DeepSpeed-MII and Mixtral-Offloading type). Attention over cached keys is left out. "
)
FIGURES = (
    Figure(
        name="twiddler-lengths",
        paper="twiddler",
        source="Figure 4",
        title="Generated tokens per second for 15 pairs of lengths",
        reported="Twiddler is 1.26 times as fast as the best baseline, llama.cpp, on average.",
        models=(PLANTED,),
        how=_HOW + "The paper's text names 12 pairs. Prompts of 512 tokens are added here.",
        why="The rule gains in the prompt alone. A single token is computed faster on the CPU than its expert is "
        "copied. llama.cpp has other kernels, which this simulation does not have.",
        measure=lengths,
        origin="Simulated",
    ),
    Figure(
        name="twiddler-prompts",
        paper="twiddler",
        source="Figure 5",
        title="Time to the first token of long prompts",
        reported="Over prompts of 512 to 4,096 tokens, Twiddler is 1.07 times as fast as DeepSpeed-MII on average, and "
        "1.17 times as fast as Mixtral-Offloading. llama.cpp is slower.",
        models=(PLANTED,),
        how="As figure 4.",
        why="An expert with many tokens takes longer on the CPU than its copy, so the rule copies. The planner of "
        "moec lets the link and the CPU work at the same time.",
        measure=prompts,
        origin="Simulated",
    ),
    Figure(
        name="twiddler-beams",
        paper="twiddler",
        source="Figure 6",
        title="Beam search",
        reported="With beams of 4, 8, 12 and 16, Twiddler is 11.57 times as fast as llama.cpp on average.",
        models=(PLANTED,),
        how=f"As figure 4. The prompt has {BEAM_INPUT} tokens, {BEAM_OUTPUT} are generated.",
        why="Even 16 beams give an expert few tokens, so the rule equals static placement. The published gain over "
        "llama.cpp is not one of placement. Copying everything is far slower, as published.",
        measure=beams,
        origin="Simulated",
    ),
)
