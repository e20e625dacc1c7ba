"""A compile layer by layer takes its predicted memory, and a deeper model takes no more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.families import lower
from moec.compiler.walker.memory import layer_weights, sweep_bytes
from moec.manifests.quant import QuantSpec
from tests.tiny_compile import save_texts
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

pytestmark = pytest.mark.slow  # two compiles in new processes, 1.5 minutes of processor time
LAYER = {"hidden_size": 512, "width": 512, "experts": 8, "top_k": 2, "heads": 8, "kv_heads": 8, "head_size": 64}
SPECS = (QuantSpec(2, 32), QuantSpec(4, 32))
TOKENS = 4_000  # more tokens than the texts have
COMPILE = """
import json, sys
from pathlib import Path
from moec.runtime.trace.statistics import peak_memory_bytes
from tests.tiny_compile import compile_tiny
from moec.compiler.preflight import preparation
from moec.compiler.walker.memory import KeptLayers
preparation.choose_kept_layers = lambda *_: KeptLayers(0, holds_model=False)
model, texts, out = sys.argv[1:]
compile_tiny(Path(model), Path(out), "bits_per_weight", 4.0, data=texts, tasks=("perplexity",), quantizer="rtn")
print(json.dumps(peak_memory_bytes()))
"""


def peak_of(folder: Path, texts: Path, out: Path) -> int:
    """Compile in a new process, and return the peak of its memory."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(folder), str(texts), str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (os.getcwd(), *sys.path) if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak: int = json.loads(done.stdout.splitlines()[-1])
    return peak


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[int, Path]]:
    """Peaks of two depths."""
    root = tmp_path_factory.mktemp("memory")
    texts, found = save_texts(root / "texts", train=40), {}
    for layers in (2, 10):
        folder = save_tiny_mixtral(root / f"model-{layers}", TinyMixtral(layers=layers, **LAYER))
        found[layers] = (peak_of(folder, texts, root / f"out-{layers}"), folder)
    return found


def test_the_peak_is_within_what_was_said(peaks: dict[int, tuple[int, Path]]) -> None:
    for peak, folder in peaks.values():
        model = lower(open_checkpoint(str(folder))).model
        assert peak <= sweep_bytes(model, TOKENS, 512, SPECS, os.cpu_count() or 1)


def test_eight_more_layers_take_less_than_four(peaks: dict[int, tuple[int, Path]]) -> None:
    (few, folder), (many, _) = peaks[2], peaks[10]
    model = lower(open_checkpoint(str(folder))).model
    assert many - few < 4 * 4 * layer_weights(model, 0)
