"""The memory of compiles in processes of their own: the predicted one of a layer, and all of `--memory`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moec.compiler.walker.memory import sweep_bytes
from moec.manifests.quant import QuantSpec
from moec.profiles.weight_counts import layer_weights
from tests.compiler.lowered import lowered
from tests.tiny_compile import save_model, save_texts
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
        model = lowered(folder).model
        assert peak <= sweep_bytes(model, TOKENS, 512, SPECS, os.cpu_count() or 1)


def test_eight_more_layers_take_less_than_four(peaks: dict[int, tuple[int, Path]]) -> None:
    (few, folder), (many, _) = peaks[2], peaks[10]
    model = lowered(folder).model
    assert many - few < 4 * 4 * layer_weights(model, 0)


OPTIONS = ("--bits", "4,16", "--group-size", "32", "--dense-bits", "8", "--swaps", "0", "--no-comparisons")
COMMAND = "from moec.cli.main import main; main()"


def resident_bytes(process: int) -> int:
    """Return the memory of a process and of all that it has started, each shared page counted once."""
    total = 0
    with contextlib.suppress(OSError):  # it has ended
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        total += int(re.findall(r"^Pss: +(\d+) kB", rollup, re.MULTILINE)[0]) * 1024
        for task in Path(f"/proc/{process}/task").iterdir():
            total += sum(map(resident_bytes, map(int, (task / "children").read_text().split())))
    return total


def compiled(*arguments: object) -> tuple[int, str, int]:
    """Return code, messages and largest resident memory of a compile in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", COMMAND, "compile", *map(str, arguments)]
    most = 0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            most = max(most, resident_bytes(process.pid))
            time.sleep(0.02)
        assert process.stderr is not None
        return process.returncode, process.stderr.read(), most


@pytest.mark.in_ci
def test_all_processes_of_a_compile_stay_within_its_memory(tmp_path: Path) -> None:
    model = save_model(tmp_path / "tiny", layers=2, experts=4, hidden_size=256, width=256)
    texts = save_texts(tmp_path / "texts", train=60, validation=30, test=30)
    arguments = (model, "--kl", "1", "--data", texts, *OPTIONS, "-o", tmp_path / "out", "--memory")
    code, said, _ = compiled(*arguments, "1MiB")
    assert code == 1, said
    least = int(re.findall(r"give `--memory (\d+)MiB`", said)[0])
    code, said, most = compiled(*arguments, f"{least}MiB")
    assert code == 0, said
    assert 200 << 20 < most <= least << 20, f"{most / 2**20:.0f} MiB under --memory {least}MiB"
