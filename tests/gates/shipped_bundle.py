"""Compare a compile of the example with the bundle of the tree. As a program: print what decides last bits here.

python -m tests.gates.shipped_bundle > examples/bundle.machine.json

Compiling is reproducible on one kind of processor and one version of torch: all bytes are equal. Products of torch
differ in their last bits between processors. Measured losses then differ a little, and the search finds another plan.
On 2026-11-25 the experts took 1,881,088 bytes on an Intel Xeon with AMX. They took 2,025,984 bytes on an AMD EPYC of
Zen 5, and 1,940,480 bytes on the same EPYC with ATEN_CPU_CAPABILITY=avx2.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from moec.manifests.bundle import EVICTION_NAME, LOOKAHEAD_NAME, LOSSES_PICTURE_NAME, MANIFEST_NAME, QUALITY_NAME
from moec.profiles.processor import instruction_sets
from tests.tiny_compile import contents

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples" / "bundle"
MACHINE = ROOT / "examples" / "bundle.machine.json"
RENEW = "`make example-bundle` renews it"
SIZE_TOLERANCE = 0.15
"""Share by which the bytes of a file with experts may differ between processors, in sum."""
BASELINE_TOLERANCE = 0.001
"""Difference of the checkpoint's score: 4 of 4,000 items."""
# What follows from checkpoint, data and options, and not from the last bits of a measurement.
FIXED_FIELDS = (
    "format_version", "producer", "name", "certified", "layout", "model", "calibration", "source", "options",
    "required_cpu_features",
)  # fmt: skip
COPIED_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
PLAN_FILES = {EVICTION_NAME, LOOKAHEAD_NAME}
"""Files that a bundle has if fitted weights are better than the default on held-out tokens. Its plan decides that."""
COMPARED_FILES = (QUALITY_NAME, LOSSES_PICTURE_NAME)
"""Files that hold or show the comparison with other formats."""
COMPARISON_TRIALS = ("uniform", "best uniform", "EdgeMoE", "plan")
"""First words of the purposes of trials that only a comparison with other formats makes."""


def machine() -> dict[str, str]:
    """Return what decides the last bits of torch's products: processor, instruction sets, version of torch."""
    processor = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        processor.setdefault(name.strip(), value.strip())
    known = {name: processor.get(name, "") for name in ("vendor_id", "cpu family", "model")}
    return {
        **known,
        "instruction set of kernels": instruction_sets()[0],
        "instruction set of torch": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def is_machine_of_bundle() -> bool:
    """Return whether this machine computes with the last bits of the one that compiled the bundle of the tree."""
    return machine() == json.loads(MACHINE.read_text(encoding="utf-8"))


def differences(fresh: Path, shipped: Path = SHIPPED) -> list[str]:
    """Return what differs between a fresh compile without comparisons and the shipped bundle, as sentences.

    On the machine of `examples/bundle.machine.json` every byte must be equal. Exceptions are `comparison` and its
    trials in `quality.json`, which the fresh compile leaves out, the picture that shows them, and the manifest's
    entries of both files.
    On any other machine the plan may differ, and the verdict with it. Equal must be: names of files except PLAN_FILES,
    copied files, and the manifest's fields in FIXED_FIELDS. The baseline may differ by BASELINE_TOLERANCE, the bytes of
    the experts by SIZE_TOLERANCE.
    """
    one, other = contents(fresh), contents(shipped)
    differing, is_same_machine = one.keys() ^ other.keys(), is_machine_of_bundle()
    if differing - (set() if is_same_machine else PLAN_FILES):
        return [f"files {sorted(differing)}"]
    if is_same_machine:
        return list(_byte_differences(one, other))
    return list(_plan_differences(one, other))


def _byte_differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    found = [f"`{name}`" for name in one if name not in (MANIFEST_NAME, *COMPARED_FILES) and one[name] != other[name]]
    if _without_comparison(one[QUALITY_NAME]) != _without_comparison(other[QUALITY_NAME]):
        found.append(f"`{QUALITY_NAME}`")
    if _without_compared(one[MANIFEST_NAME]) != _without_compared(other[MANIFEST_NAME]):
        found.append(f"`{MANIFEST_NAME}`")
    return found


def _plan_differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    found = [f"`{name}`" for name in COPIED_FILES if one[name] != other[name]]
    manifests = [json.loads(files[MANIFEST_NAME]) for files in (one, other)]
    found += [f"`{name}` of the manifest" for name in FIXED_FIELDS if manifests[0][name] != manifests[1][name]]
    qualities = [json.loads(files[QUALITY_NAME]) for files in (one, other)]
    baselines = [quality["tasks"]["gsm8k"]["baseline"] for quality in qualities]
    if abs(baselines[0] - baselines[1]) > BASELINE_TOLERANCE:
        found.append(f"the baseline: {baselines[0]}, shipped {baselines[1]}")
    sizes = [quality["sizes"]["expert_packed_bytes"] for quality in qualities]
    if max(sizes) > (1 + SIZE_TOLERANCE) * min(sizes):
        found.append(f"the bytes of the experts: {sizes[0]}, shipped {sizes[1]}")
    return found


def _without_comparison(data: bytes) -> dict[str, Any]:
    """Return `quality.json` without the comparison and the trials that it took."""
    quality = json.loads(data)
    trials = [trial for trial in quality["trials"] if not trial["purpose"].startswith(COMPARISON_TRIALS)]
    return {**quality, "comparison": None, "trials": trials}


def _without_compared(data: bytes) -> dict[str, Any]:
    """Return the manifest without its own digest and the entries of COMPARED_FILES."""
    manifest = json.loads(data)
    files = [entry for entry in manifest["files"] if entry["name"] not in COMPARED_FILES]
    return {**manifest, "files": files, "manifest_sha256": ""}


if __name__ == "__main__":
    print(json.dumps(machine(), indent=1))
