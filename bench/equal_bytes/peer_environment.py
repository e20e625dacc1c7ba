"""Quantizers of other projects, each in an environment of its own.

An environment has a script of this folder, which runs there without moec: `hqq_script.py`, `gptqmodel_script.py`,
`autoround_script.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from moec.manifests.model import UnitKey

REQUIREMENTS = {
    "hqq": ("torch==2.13.0", "hqq==0.2.8.post1", "numpy", "safetensors"),
    "gptqmodel": ("torch==2.13.0", "gptqmodel==7.6.0", "safetensors"),
    "autoround": ("torch==2.13.0", "auto-round==0.16.1", "safetensors"),
}


def environment(name: str, folder: Path) -> Path:
    """Return the interpreter of an environment, which is made if it is absent.

    name: of REQUIREMENTS.
    """
    place = folder / f"environment-{name}"
    ready = place / ".ready"
    python = place / "bin" / "python"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS[name]], check=True)
        ready.touch()
    return python


def rounded_by(
    name: str,
    folder: Path,
    units: Mapping[UnitKey, Tensor],
    bits: int,
    group_size: int,
    moments: Mapping[tuple[int, str], Tensor] | None = None,
) -> dict[UnitKey, Tensor]:
    """Return matrices after quantization in another project, bfloat16.

    folder: holds the environment and the matrices of the call.
    moments: second moments of the inputs of all experts, [E, K, K], by layer and projection; None if not needed.
        `gate` and `up` share theirs.
    """
    names = {unit: f"{unit.layer}.{unit.expert}.{unit.projection}" for unit in units}
    tensors = {names[unit]: matrix.float().contiguous() for unit, matrix in units.items()}
    shared = dict[str, str]()
    if moments is not None:
        for unit in units:
            key = f"{unit.layer}.{unit.expert}.{'middle' if unit.projection == 'down' else 'input'}.moment"
            shared[names[unit]] = key
            if key not in tensors:
                tensors[key] = moments[unit.layer, unit.projection][unit.expert].contiguous()
    result = _run_script(name, folder, tensors, {"moments": json.dumps(shared)}, bits, group_size)
    return {unit: result[names[unit]] for unit in units}


def tuned_by_autoround(
    folder: Path, model: Path, tokens: Tensor, units: Iterable[UnitKey], bits: int, group_size: int
) -> dict[UnitKey, Tensor]:
    """Return matrices after AutoRound, bfloat16. It tunes the layers of the checkpoint one after the other.

    folder: holds the environment and the matrices of the call.
    model: the checkpoint.
    tokens: calibration texts, int64 [texts, length].
    """
    result = _run_script("autoround", folder, {"tokens": tokens.contiguous()}, {}, bits, group_size, model)
    return {unit: result[f"{unit.layer}.{unit.expert}.{unit.projection}"] for unit in units}


def _run_script(
    name: str,
    folder: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    bits: int,
    group_size: int,
    *more: Path,
) -> dict[str, Tensor]:
    """Run the script of an environment on tensors, and return what it makes of them."""
    python = environment(name, folder)
    source, target = folder / "matrices.safetensors", folder / "rounded.safetensors"
    save_file(dict(tensors), source, metadata=dict(metadata))
    script = Path(__file__).with_name(f"{name}_script.py")
    threads = str(torch.get_num_threads())
    # GPTQModel prints a banner on stdout, where the table goes.
    subprocess.run(
        [python, script, source, target, str(bits), str(group_size), threads, *more], check=True, stdout=sys.stderr
    )
    source.unlink()
    found: dict[str, Tensor] = load_file(target)
    return found


def peer_seconds(folder: Path) -> float:
    """Return the processor time of the last call of a quantizer in a folder, without reading and writing."""
    with safe_open(folder / "rounded.safetensors", framework="pt") as file:
        return float(file.metadata()["seconds"])
