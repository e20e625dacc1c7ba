"""Figures and tables of the papers that are not measured here, with the reason."""

from __future__ import annotations

from .figure import NotMeasured

_NO_GPU = "It needs a GPU. This machine has none."
_NO_QUIET = "It is a time on this machine, which other processes share."
_BENCHMARKS = "[benchmarks](../benchmarks.md)"

NOT_MEASURED: tuple[NotMeasured, ...] = (
    NotMeasured(
        "edgemoe",
        "Figure 7b",
        "time to unpack weights, next to outlier-aware quantization",
        "The kernels multiply packed weights, so nothing is unpacked. The other quantizer is not part of moec.",
    ),
    NotMeasured("edgemoe", "Table I", "time of the offline stage", f"{_NO_QUIET} `NAME.log.json` of a compile has it."),
    NotMeasured("edgemoe", "Figure 15", "MiniCPM on a phone", "It needs the checkpoint and a phone. Neither is here."),
    NotMeasured(
        "edgemoe",
        "Figure 13",
        "measured energy",
        "This machine has no energy counter (RAPL, `/sys/class/powercap`). `python -m bench.papers "
        "edgemoe-energy-counted` measures it where one is.",
    ),
    NotMeasured("hobbit", "Figure 3a", "time of a layer on a GPU and a Jetson", _NO_GPU),
    NotMeasured(
        "hobbit",
        "Figures 14 and 15",
        "the other programs themselves, with a GPU",
        f"{_NO_GPU} The figure above simulates their kinds. Of the programs, {_BENCHMARKS} have llama.cpp, on CPUs.",
    ),
    NotMeasured(
        "hobbit",
        "Table 3",
        "accuracy on GSM8K and TruthfulQA",
        "It needs the data sets and a model that answers them. [Lossy modes](../benchmarks.md#lossy-modes) has "
        "the loss on the problems of the example.",
    ),
    NotMeasured(
        "twiddler",
        "Figures 4, 5 and 6",
        "measured times, and environment 2",
        f"{_NO_GPU} The figures above are simulated. `python -m bench.accelerator.measured` measures them where a GPU "
        "is. No profile describes environment 2.",
    ),
    NotMeasured(
        "twiddler",
        "Figure 7",
        "time of copies and of an expert on CPU and GPU, with deviations",
        f"{_NO_GPU} Simulated times have no deviation; those of an expert are next to figure 4. "
        "An [experiment](../experiments/2026-11.md) has parts of it, on an H200.",
    ),
    NotMeasured(
        "mobile",
        "Figures 3 and 5",
        "measured times, and Pre-gated MoE and AdapMoE themselves",
        f"{_NO_GPU} The figures above simulate flash and kinds of these programs.",
    ),
    NotMeasured("mobile", "Table II", "accuracy on GSM8K and HumanEval", "It needs the models and the data sets."),
)
