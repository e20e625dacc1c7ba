"""G7: the runtime is light. Each check starts a fresh interpreter and lists what an import brought in."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import moec.manifests
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

ROOMS = Path(moec.manifests.__file__).parent.parent
HEAVY = {"torch", "transformers", "datasets", "optimum", "evaluate", "safetensors", "rouge_score", "matplotlib"}
# tokenizers imports huggingface_hub only where a hub name is asked for; numpy and tokenizers bring nothing else.
ALLOWED = {"moec", "numpy", "tokenizers", "xxhash"}
RUNTIME_IMPORT_S = 0.25
ENGINE_IMPORT_S = 1.0  # of a processor, measured .34 without bytecode; torch alone takes 1.1
PROBE = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
{code}
seconds = time.perf_counter() - start
names = {{name.partition(".")[0] for name in set(sys.modules) - before}}
foreign = sorted(name for name in names if name not in sys.stdlib_module_names and not name.startswith("__"))
print(json.dumps({{"foreign": foreign, "seconds": seconds, "extra": globals().get("extra")}}))
"""


def probe(code: str) -> dict[str, object]:
    """Foreign top-level modules that `code` loads in a fresh interpreter, and how long it took."""
    found: dict[str, object] = json.loads(fresh(PROBE.format(code=code)).splitlines()[-1])
    return found


def fresh(program: str) -> str:
    """Return the output of a program in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def foreign(code: str) -> set[str]:
    found = probe(code)
    names = found["foreign"]
    assert isinstance(names, list)
    print(f"{code.splitlines()[0]}: {found['seconds']:.3f} s, loads {names}")
    # Import hooks of editable installs and of coverage are there before the code; compiled parts of rooms are ours.
    return {name for name in names if not name.startswith("_")}


def seconds(code: str) -> tuple[float, float]:
    """Return the wall time and processor time of a new interpreter that runs `code`, its end included, in seconds."""
    start = time.perf_counter()
    processor = float(fresh(f"{code}\nimport time\nprint(time.process_time())"))
    return time.perf_counter() - start, processor


def more_seconds(code: str) -> tuple[float, float]:
    """Return how much more that is than without code: medians of three."""
    runs = [(*seconds(code), *seconds("")) for _ in range(3)]
    clock, processor = (statistics.median(run[at] - run[at + 2] for run in runs) for at in (0, 1))
    print(f"{code}: {clock:.3f} s more than a bare start, {processor:.3f} s of a processor")
    return clock, processor


@pytest.mark.gate("G7")
def test_an_import_of_the_runtime_takes_no_time_to_speak_of() -> None:
    """The engine, with numpy and tokenizers, comes when it is asked for; its time is a processor's, which other work
    does not lengthen.
    """
    assert more_seconds("import moec.runtime")[1] <= RUNTIME_IMPORT_S
    assert more_seconds("from moec.runtime import load")[1] <= ENGINE_IMPORT_S


@pytest.mark.gate("G7")
def test_runtime_package_loads_nothing() -> None:
    assert foreign("import moec.runtime") <= {"moec"}


@pytest.mark.gate("G7")
def test_engine_loads_numpy_and_tokenizers_only() -> None:
    found = foreign(
        "import moec.runtime.engine.engine, moec.runtime.engine.batch\n"
        "import moec.runtime.simulation.replay, moec.runtime.trace.statistics\n"
        "import moec.runtime.accelerator.open_device\n"
        "from moec.runtime import Engine, load"
    )
    assert found <= ALLOWED, f"not on the list: {sorted(found - ALLOWED)}"
    assert {"numpy", "tokenizers"} <= found


@pytest.mark.gate("G7")
def test_the_profile_of_a_bundle_is_read_without_toml() -> None:
    """A run reads it at each start."""
    code = """
import moec.runtime.bundle.device_file, moec.profiles.probe
from moec.profiles.device_json import decode_device
extra = [name for name in sys.modules if "toml" in name or name.endswith("profiles.loading")]
"""
    assert probe(code)["extra"] == []


@pytest.mark.gate("G7")
def test_nothing_of_accelerators_is_loaded_without_one(tmp_path: Path) -> None:
    bundle = emit_bundle(save_tiny_mixtral(tmp_path / "model", TinyMixtral(layers=1)), tmp_path / "bundle")
    names = "[name for name in sys.modules if name.startswith('moec.runtime.accelerator.')]"
    opened = f"load({str(bundle)!r}, context=16).close()"
    assert fresh(f"import sys\nfrom moec.runtime import load\n{opened}\nprint({names})").strip() == "[]"


@pytest.mark.gate("G7")
def test_runtime_works_without_the_extension() -> None:
    """A finder that hides `_native` stands for an install without a compiler; numpy takes over and computes."""
    code = """
import importlib.abc, importlib.util
import sys as system
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.endswith("._native"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None
hidden = importlib.util.find_spec
def find(name, package=None):
    return None if name.endswith("._native") else hidden(name, package)
importlib.util.find_spec = find
system.meta_path.insert(0, Hide())
import numpy as np
import moec.runtime.engine.engine
from moec.runtime import kernels
kernels.Path = type("NoFiles", (), {"__init__": lambda self, folder: None, "glob": lambda self, pattern: []})
out = np.empty((1, 32), np.float32)
kernels.rms_norm(np.ones((1, 32), np.float32), np.ones(32, np.float32), 0.0, out)
extra = [kernels.active(), list(kernels.available()), float(out[0, 0])]
"""
    found = probe(code)
    assert found["extra"] == ["numpy", ["numpy"], 1.0]
    assert not HEAVY & set(found["foreign"])  # type: ignore[call-overload]


@pytest.mark.gate("G7")
@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["inspect", "--help"], ["--version"]])
def test_help_loads_neither_numpy_nor_anything_heavy(arguments: list[str]) -> None:
    code = f"""
import contextlib, io
from moec.cli.main import cli
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    cli.main({arguments!r}, prog_name="moec")
"""
    found = foreign(code)
    assert not HEAVY & found
    assert found <= {"moec", "click", "colorama"}


@pytest.mark.gate("G7")
@pytest.mark.parametrize("room", ["manifests", "profiles"])
def test_light_rooms_are_standard_library_only(room: str) -> None:
    modules = [
        f"moec.{room}.{path.stem}" for path in sorted((ROOMS / room).glob("*.py")) if not path.stem.startswith("__")
    ]
    assert modules
    assert foreign(f"import {', '.join(modules)}") <= {"moec", "tomli"}
