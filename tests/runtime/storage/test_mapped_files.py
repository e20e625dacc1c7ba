"""Mapped files that become shorter while kernels compute with them: an error and no signal, in child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moec.runtime import kernels

pytestmark = pytest.mark.skipif(kernels.loaded() is None, reason="no extension: the system ends the process")

RUN = """
import sys
from moec.manifests.errors import MoecError
from moec.runtime import kernels, load
kernels.select(sys.argv[2])
options = {"io": "mmap", "expert_cache": sys.argv[3], "cache_state": "cold", "threads": 2}
options["verify"] = sys.argv[4] == "yes"
with load(sys.argv[1], **options) as engine:
    print("loaded", flush=True)
    try:
        while True:
            for step in engine.generate([1, 5, 9, 3], 24):
                print(step.token_id, flush=True)
    except MoecError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(error.exit_code)
"""

PRODUCT = """
import os, sys
import numpy as np
from moec.manifests.errors import StorageReadFailed
from moec.runtime import kernels
from moec.runtime.expert_cache.bound_experts import bind_experts
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.model.dense_weights import load_dense
from moec.runtime.storage.read_storage import open_storage
kernels.select(sys.argv[2])
kernels.set_threads(3)
bundle = open_bundle(__import__("pathlib").Path(sys.argv[1]))
stored, hidden = bundle.manifest.stored_experts, bundle.manifest.model.hidden_size
storage = open_storage(bundle, "mmap", verify=sys.argv[3] == "yes")
experts = bind_experts(bundle, stored, storage, load_dense(bundle, verify=False)).experts
x, out = np.ones((64, hidden), np.float32), np.zeros((64, 1, hidden), np.float32)
rows = np.arange(64, dtype=np.int32)
all_of = lambda: np.array([1, 2, 3])
for index in all_of():
    storage.load(index)
storage.end_pass(all_of)
entry = stored[2]
os.truncate(bundle.path / entry.file, entry.offset_bytes + int(sys.argv[4]))
for index in (1, 2, 3):
    kernels.expert_ffn(experts[index], x, rows, rows * 0, out)
check = lambda: storage.end_pass(all_of)
for call in (check, lambda: storage.load(2), lambda: storage.load(3), check):
    try:
        call()
        sys.exit("no error")
    except StorageReadFailed as error:
        print(error)
storage.load(len(stored) - 1)  # of another file
"""

COMPARED = """
import os, sys
from pathlib import Path
from moec.manifests.errors import StorageReadFailed
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.storage.read_verifier import ReadVerifier
from moec.runtime.storage.read_storage import open_storage
bundle = open_bundle(Path(sys.argv[1]))
storage = open_storage(bundle, "mmap", verify=True)
plain = ReadVerifier.compare
def cut(self, index, block):
    os.truncate(bundle.path / bundle.manifest.stored_experts[index].file, 4096)
    plain(self, index, block)
ReadVerifier.compare = cut
try:
    storage.load(2)
except StorageReadFailed as error:
    print(error)
"""

CHAIN = """
import mmap, os, sys
from pathlib import Path
import numpy as np
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.storage.read_storage import open_storage
storage = open_storage(open_bundle(Path(sys.argv[1])), "mmap", verify=True)
storage.load(0)
with open(sys.argv[2], "w+b") as file:
    file.truncate(1 << 16)
    foreign = mmap.mmap(file.fileno(), 0)
    file.truncate(0)
    print("before", flush=True)
    foreign[0]
"""


def child(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("lines", [1, 60])
@pytest.mark.parametrize(("cache", "verify"), [("25%", "yes"), ("100%", "no")])
def test_a_run_ends_with_a_sentence(copied: Path, lines: int, cache: str, verify: str) -> None:
    """The file is cut after so many lines of output: before the first token, early and late."""
    command = [sys.executable, "-c", RUN, str(copied), kernels.active(), cache, verify]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for _ in range(lines):
            running.stdout.readline()
        for path in copied.glob("experts-*"):
            os.truncate(path, 8192)
        rest = running.stdout.read()
    assert running.returncode == 1, rest[-300:]
    assert "StorageReadFailed" in rest and "experts-" in rest.splitlines()[-1]


@pytest.mark.parametrize(
    "name", [name for name in kernels.available() if name in (kernels.available()[0], "scalar", "numpy")]
)
@pytest.mark.parametrize("verify", ["yes", "no"])
@pytest.mark.parametrize("kept_bytes", [0, 5000])
def test_products_with_missing_pages(copied: Path, name: str, verify: str, kept_bytes: int) -> None:
    """In the caller and in other threads of the pool: every page that is missing, after it was there."""
    done = child(PRODUCT, copied, name, verify, kept_bytes)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    assert len(done.stdout.splitlines()) == 4 and all("experts-" in line for line in done.stdout.splitlines())


def test_a_file_that_is_cut_while_it_is_compared_has_become_shorter(copied: Path) -> None:
    """Its missing pages read as zeros, which have another checksum."""
    done = child(COMPARED, copied)
    assert done.returncode == 0 and "has become shorter" in done.stdout, (done.stdout, done.stderr[-2000:])


@pytest.mark.parametrize("first", ["", "import faulthandler; faulthandler.enable()\n"])
def test_other_mappings_end_the_process_as_before(copied: Path, tmp_path: Path, first: str) -> None:
    done = child(first + CHAIN, copied, tmp_path / "foreign")
    assert done.returncode == -7 and done.stdout == "before\n"
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(first)
