"""All figures, in the order of the pages, and what is not measured."""

from __future__ import annotations

from .edgemoe import bits, counted, experts, latency, paths, sensitivity, speed, storage, switch, throttled
from .edgemoe import caches as edgemoe_caches
from .figure import Figure, NotMeasured
from .hobbit import caches as hobbit_caches
from .hobbit import loading, prompts, routers, stacked, systems
from .mobile import little_models, rivals
from .twiddler import popularity, strategies

FIGURES: tuple[Figure, ...] = (
    *speed.FIGURES,
    *throttled.FIGURES,
    *counted.FIGURES,
    *latency.FIGURES,
    *storage.FIGURES,
    *experts.FIGURES,
    *sensitivity.FIGURES,
    *bits.FIGURES,
    *paths.FIGURES,
    *edgemoe_caches.FIGURES,
    *switch.FIGURES,
    *routers.FIGURES,
    *loading.FIGURES,
    *prompts.FIGURES,
    *systems.FIGURES,
    *stacked.FIGURES,
    *hobbit_caches.FIGURES,
    *popularity.FIGURES,
    *strategies.FIGURES,
    *little_models.FIGURES,
    *rivals.FIGURES,
)

_NO_GPU = "It needs a GPU."
_NO_QUIET = "Other processes share this machine."
_BENCHMARKS = "[Benchmarks](../benchmarks.md)"

NOT_MEASURED: tuple[NotMeasured, ...] = (
    NotMeasured(
        "edgemoe",
        "Figure 7b",
        "time to unpack weights, next to outlier-aware quantization",
        "The kernels multiply packed weights. The other quantizer is not part of moec.",
    ),
    NotMeasured("edgemoe", "Table I", "time of the offline stage", f"{_NO_QUIET} `NAME.log.json` of a compile has it."),
    NotMeasured("edgemoe", "Figure 15", "MiniCPM on a phone", "It needs the checkpoint and a phone."),
    NotMeasured(
        "edgemoe",
        "Figure 13",
        "measured energy",
        "It needs an energy counter (RAPL). `python -m bench.papers edgemoe-energy-counted` measures it.",
    ),
    NotMeasured("hobbit", "Figure 3a", "time of a layer on a GPU and a Jetson", _NO_GPU),
    NotMeasured(
        "hobbit",
        "Figures 14 and 15",
        "the other programs themselves, with a GPU",
        f"{_NO_GPU} {_BENCHMARKS} have llama.cpp, on CPUs.",
    ),
    NotMeasured(
        "hobbit",
        "Table 3",
        "accuracy on GSM8K and TruthfulQA",
        "It needs data sets and models. [Lossy modes](../benchmarks.md#lossy-modes) has the loss on the example.",
    ),
    NotMeasured(
        "twiddler",
        "Figures 4, 5 and 6",
        "measured times, and environment 2",
        f"{_NO_GPU} `python -m bench.accelerator.measured` measures them. No profile describes environment 2.",
    ),
    NotMeasured(
        "twiddler",
        "Figure 7",
        "time of copies and of an expert on CPU and GPU, with deviations",
        f"{_NO_GPU} An [experiment](../experiments/2026-11.md) has parts of it, on an H200.",
    ),
    NotMeasured(
        "mobile",
        "Figures 3 and 5",
        "measured times, and Pre-gated MoE and AdapMoE themselves",
        f"{_NO_GPU} The figures above simulate flash and kinds of these programs.",
    ),
    NotMeasured("mobile", "Table II", "accuracy on GSM8K and HumanEval", "It needs the models and the data sets."),
)
