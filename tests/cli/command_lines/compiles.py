"""Command lines that give every option of `moec compile`."""

from __future__ import annotations

from pathlib import Path

from moec.cli.commands.bundles.report import draw_card
from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.lossy_modes.mode_sweep import ModesMeasurement
from moec.cli.simulation.compile_eviction import fit_to_texts
from moec.compiler.request.targets import Target

from .line import MODES, Given, Line

COMPILE = "moec.compiler.pipeline.compile_checkpoint"
OPTIONS = "request.options"
LAPTOP = "--device laptop"
"""A named device, so that nothing is probed."""
UNIFORM = f"--uniform 4 {LAPTOP}"
LOSS = Given("--loss 3%", f"{OPTIONS}.target", Target("loss", 0.03))
COMPILES = {
    "compile": Line(
        "compile",
        COMPILE,
        {
            "loss": LOSS,
            "target_path": Given("-o {folder}/made", "request.output", Path("{folder}/made")),
            "data": Given("--data {folder}/texts.jsonl", f"{OPTIONS}.data", "{folder}/texts.jsonl"),
            "tasks": Given("--task gsm8k --task samsum", f"{OPTIONS}.tasks", ("gsm8k", "samsum")),
            "devices": Given("--device raspberry-pi-4b-sd", "request.profile.name", "raspberry-pi-4b-sd"),
            "dense_bits": Given("--dense-bits 4", f"{OPTIONS}.dense_bits", 4),
            "bits": Given("--bits 1.6,2,8", f"{OPTIONS}.bits", (1.6, 2, 8)),
            "group_size": Given("--group-size 64,128", f"{OPTIONS}.group_sizes", (64, 128)),
            "sensitivity": Given("--sensitivity proxy", f"{OPTIONS}.sensitivity", "proxy"),
            "objective": Given("--objective size", f"{OPTIONS}.objective", "size"),
            "quantizer": Given("--quantizer rtn", f"{OPTIONS}.quantizer", "rtn"),
            "torch_device": Given("--torch-device cuda:1", f"{OPTIONS}.torch_device", "cuda:1"),
            "shots": Given("--shots 3", f"{OPTIONS}.shots", 3),
            "confidence": Given("--confidence 0.9", f"{OPTIONS}.confidence", 0.9),
            "long_items": Given("--long-items skip", f"{OPTIONS}.long_items", "skip"),
            "chat": Given("--chat", f"{OPTIONS}.task_settings.chat", True),
            "system": Given("--system kind", f"{OPTIONS}.task_settings.system", "kind"),
            "prompt_template": Given(
                "--prompt-template a.jinja", f"{OPTIONS}.task_settings.prompt_template", "a.jinja"
            ),
            "metric": Given("--metric wer", f"{OPTIONS}.task_settings.metric", "wer"),
            "lower_is_better": Given("--lower-is-better", f"{OPTIONS}.task_settings.lower_is_better", True),
            "trust_metric_code": Given("--trust-metric-code", f"{OPTIONS}.task_settings.trusts_metric_code", True),
            "fallback_bits": Given("--fallback-bits 2", f"{OPTIONS}.fallback_bits", 2),
            "prune": Given("--keep-experts", f"{OPTIONS}.prune", False),
            "swaps": Given("--swaps 12", f"{OPTIONS}.swaps", 12),
            "path_keys": Given("--set path-keys=pairs", f"{OPTIONS}.path_keys", "pairs"),
            "modes": Given(f"--modes '{MODES}'", "request.measure_modes", ModesMeasurement(MODES)),
            "limit": Given("--limit 13", f"{OPTIONS}.limit", 13),
            "seed": Given("--seed 4", f"{OPTIONS}.seed", 4),
            "comparisons": Given("--no-comparisons", f"{OPTIONS}.comparisons", False),
            "popularity": Given("--popularity {folder}/text.txt", "request.popularity", Path("{folder}/text.txt")),
            "memory": Given("--memory 5GiB", "request.memory_bytes", 5 << 30),
            "cluster": Given("--cluster 10.0.0.1:6379", "request.cluster", "10.0.0.1:6379"),
            "resume": Given("--resume", "request.resume", True),
            "measurements": Given("--measurements {folder}/kept", "request.measurements", Path("{folder}/kept")),
            "overwrite": Given("--overwrite", "request.overwrite", True),
            "model": Given("", "request.source", "{folder}/model"),
            "": Given("", "request.open_runtime", open_partial),
        },
    ),
    "compile, templates": Line("compile", COMPILE, {"": Given("", "request.templates.__name__", "of_model")}, UNIFORM),
    "compile, as edgemoe": Line(
        "compile",
        COMPILE,
        {"preset": Given("--as edgemoe", f"{OPTIONS}.search", "edgemoe")},
        f"--loss 2% --data x {LAPTOP}",
    ),
    "compile, as hobbit": Line(
        "compile",
        COMPILE,
        {"": Given("--as hobbit", "request.fit_eviction", fit_to_texts)},
        f"--kl 0.25 --data x {LAPTOP}",
    ),
    "compile, card": Line("compile", COMPILE, {"": Given("", "request.draw_card", draw_card)}, UNIFORM),
    "compile, pruned": Line(
        "compile",
        COMPILE,
        {
            "kl": Given("--kl 0.25", f"{OPTIONS}.target", Target("kl", 0.25)),
            "prune": Given("--prune-experts", f"{OPTIONS}.prune", True),
        },
        f"--data x {LAPTOP}",
    ),
    "compile, edgemoe": Line(
        "compile",
        COMPILE,
        {
            "bits_per_weight": Given("--bits-per-weight 3.5", f"{OPTIONS}.target", Target("bits_per_weight", 3.5)),
            "search": Given("--search edgemoe", f"{OPTIONS}.search", "edgemoe"),
            "plan_only": Given("--plan-only", "request.plan_only", True),
        },
        f"--data x {LAPTOP}",
    ),
    "compile, size": Line(
        "compile", COMPILE, {"size": Given("--size 3MiB", f"{OPTIONS}.target", Target("size", 3 << 20))}, LAPTOP
    ),
    "compile, uniform": Line(
        "compile",
        COMPILE,
        {
            "uniform": Given("--uniform 4", f"{OPTIONS}.target", Target("uniform", 4)),
            "symmetric": Given("--symmetric", f"{OPTIONS}.symmetric", True),
            "threads": Given("--threads 3", "request.open_runtime.keywords", {"threads": 3}),
        },
        LAPTOP,
    ),
    "compile, sweep": Line(
        "compile", COMPILE, {"sweep": Given("--sweep 1%,2%", "request.sweep", (0.01, 0.02))}, f"--data x {LAPTOP}"
    ),
    "compile, estimate": Line(
        "compile",
        "moec.compiler.forecast.forecast",
        {"estimate": Given("--estimate", f"{OPTIONS}.target", Target("loss", 0.03)), "loss": LOSS},
        f"--data x {LAPTOP}",
    ),
}
