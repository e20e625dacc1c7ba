"""Files of a bundle that are swapped, shortened or rewritten under an engine: the right result, or a sentence."""

from __future__ import annotations

import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from moec.manifests.bundle import DENSE_NAME, MANIFEST_NAME, TABLES_NAME
from moec.manifests.errors import BundleIncomplete, ChecksumMismatch, ExecutionError, MoecError, StorageReadFailed
from moec.runtime import kernels, load
from moec.runtime.bundle.open_bundle import open_bundle, verify_bundle
from moec.runtime.engine.engine import Engine
from moec.runtime.expert_cache.native_cache import NativeCache
from moec.runtime.expert_cache.python_cache import PythonCache
from moec.runtime.options.runtime import RuntimeOptions
from moec.runtime.storage import read_verifier as read_verifier_module
from moec.runtime.storage.read_storage import open_storage
from tests.runtime.cache_kinds import Kind, caches_of
from tests.runtime.faulty_source import InTime, wait_until_settled

TOKENS = [1, 5, 9, 3, 7, 2, 8, 4, 6, 1, 3, 9]
READS = ("direct", "buffered")
every_io = pytest.mark.parametrize("io", [*READS, "mmap"])
CACHES: dict[str, Kind] = {"native": NativeCache, "python": PythonCache}


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> np.ndarray:
    with load(tiny_bundle) as engine:
        return engine.logits(TOKENS)


@contextmanager
def small_engine(path: Path, io: str, cache: str = "native") -> Iterator[Engine]:
    """An engine whose experts come and go."""
    options: dict[str, Any] = {"io": io, "expert_cache": "25%", "cache_state": "cold"}
    kind = CACHES[cache] if kernels.compiled() is not None else PythonCache
    with caches_of(kind), load(path, **options) as engine:
        assert isinstance(engine.cache, kind)
        yield engine


def expert_files(bundle: Path) -> list[Path]:
    return sorted(bundle.glob("experts-*"))


def rewrite(path: Path, change: int) -> None:
    """Write every byte again in place, xor `change`."""
    content = np.frombuffer(path.read_bytes(), np.uint8) ^ np.uint8(change)
    with path.open("r+b") as file:
        file.write(content.tobytes())


# -- swapped ---------------------------------------------------------------------------------------------------


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # endless zeros
    except PermissionError:
        pytest.skip("NOT RUN: making a device needs root")


def make_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(f"/proc/self/fd/{folder}/{path.name}")  # names of sockets are short
    os.close(folder)


SWAPS: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: None,
    "pipe": os.mkfifo,
    "device": make_device,
    "socket": make_socket,
    "folder": Path.mkdir,
    "link": lambda path: path.symlink_to("/dev/zero"),
    "shorter": lambda path: path.write_bytes(b"x"),
}


def swap(path: Path, kind: str) -> None:
    path.unlink()
    SWAPS[kind](path)


@pytest.mark.parametrize("kind", SWAPS)
def test_a_file_that_is_swapped_before_is_refused(copied: Path, kind: str, in_time: InTime) -> None:
    for path in sorted(copied.iterdir()):
        content = path.read_bytes()
        swap(path, kind)
        with pytest.raises(MoecError, match=path.name) as caught:
            in_time(lambda: verify_bundle(open_bundle(copied)))
        assert caught.value.exit_code == 3
        path.rmdir() if kind == "folder" else path.unlink(missing_ok=True)
        path.write_bytes(content)
    verify_bundle(open_bundle(copied))


@every_io
@pytest.mark.parametrize("kind", SWAPS)
def test_a_swap_after_the_bundle_was_opened_changes_nothing(
    copied: Path, expected: np.ndarray, io: str, kind: str, in_time: InTime
) -> None:
    bundle = open_bundle(copied)
    for path in sorted(copied.iterdir()):
        swap(path, kind)
    options = RuntimeOptions(io=io, expert_cache="25%")  # type: ignore[arg-type]

    def run() -> np.ndarray:
        verify_bundle(bundle)
        with Engine(bundle, options) as engine:
            return engine.logits(TOKENS)

    assert np.array_equal(in_time(run), expected)


def test_the_folder_can_be_renamed_and_replaced(copied: Path, expected: np.ndarray) -> None:
    bundle = open_bundle(copied)
    copied.rename(copied.with_name("elsewhere"))
    copied.mkdir()
    with Engine(bundle, RuntimeOptions()) as engine:
        assert np.array_equal(engine.logits(TOKENS), expected)


@pytest.mark.parametrize("name", [DENSE_NAME, TABLES_NAME])
def test_a_file_that_has_become_shorter_is_refused(copied: Path, name: str) -> None:
    bundle = open_bundle(copied)
    os.truncate(copied / name, 4096)
    for verify in (False, True):
        with pytest.raises(MoecError, match=name) as caught:
            Engine(bundle, RuntimeOptions(verify=verify))
        assert caught.value.exit_code == 3


# -- opened once, and closed -------------------------------------------------------------------------------------


def open_files(bundle: Path) -> int:
    """Return the number of descriptors of this process for the folder and its files."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(str(bundle) in os.readlink(link) for link in links if os.path.islink(link))


def test_files_of_a_bundle_are_read_by_name(copied: Path) -> None:
    with open_bundle(copied) as bundle:
        name = "tokenizer.json"
        content = (copied / name).read_bytes()
        assert bundle.read_file(name, len(content), verify=True) == content
        assert bundle.read_file(MANIFEST_NAME, 1 << 20) == (copied / MANIFEST_NAME).read_bytes()
        with pytest.raises(BundleIncomplete, match=f"more than the limit of {len(content) - 1}"):
            bundle.read_file(name, len(content) - 1)
        assert bundle.has_file(name) and not bundle.has_file("nothing")
        with pytest.raises(BundleIncomplete, match="nothing` is missing"):
            bundle.read_file("nothing", 1)
        rewrite(copied / name, 1)
        assert bundle.read_file(name, len(content)) != content
        with pytest.raises(ChecksumMismatch, match=name):
            bundle.read_file(name, len(content), verify=True)
        os.truncate(copied / name, 5)
        with pytest.raises(BundleIncomplete, match=f"has 5 bytes, expected {len(content)}"):
            bundle.read_file(name, len(content))
    with pytest.raises(ExecutionError, match="is closed"):
        bundle.read_file(name, len(content))


@every_io
def test_no_file_stays_open(copied: Path, io: str) -> None:
    open_bundle(copied)
    assert open_files(copied) == 0
    with open_bundle(copied) as bundle:
        assert open_files(copied) > len(expert_files(copied))
    assert open_files(copied) == 0
    bundle.close()
    engine = load(copied, io=io)
    engine.logits(TOKENS)
    engine.close()
    mappings = len(expert_files(copied)) if io == "mmap" else 0  # until the last view is gone
    assert open_files(copied) == mappings
    del engine
    assert open_files(copied) == 0


def test_a_bundle_that_was_handed_in_serves_several_engines(copied: Path, expected: np.ndarray) -> None:
    with open_bundle(copied) as bundle:
        for _ in range(2):
            with Engine(bundle, RuntimeOptions()) as engine:
                assert np.array_equal(engine.logits(TOKENS), expected)
        assert len(bundle.tables().popularity) == bundle.manifest.model.num_layers
    del engine
    assert open_files(copied) == 0


def test_no_file_stays_open_after_a_failure(copied: Path) -> None:
    os.truncate(copied / DENSE_NAME, 1)
    try:
        open_bundle(copied)
    except BundleIncomplete:
        pass
    else:
        pytest.fail("no error")
    assert open_files(copied) == 0


LIMITED = """
import resource, sys
from moec.runtime import load
from moec.manifests.errors import MoecError
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
try:
    with load(sys.argv[1]) as engine:
        engine.logits([1, 2, 3])
    print("ran", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except MoecError as error:
    print(type(error).__name__, error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(("soft", "hard"), [(10, 4096), (10, 10)])
def test_the_limit_of_open_files(copied: Path, soft: int, hard: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("NOT RUN: the hard limit is lower")
    command = [sys.executable, "-c", LIMITED, str(copied), str(soft), str(hard)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    if hard > soft:
        assert (done.returncode, done.stdout.split()[0]) == (0, "ran"), done.stderr
        assert soft < int(done.stdout.split()[1]) <= hard
    else:
        assert done.returncode == 1 and "Too many open files" in done.stdout and "ulimit" in done.stdout, done.stderr


# -- rewritten ---------------------------------------------------------------------------------------------------


@every_io
@pytest.mark.parametrize("cache", CACHES)
def test_bytes_that_change_after_the_first_read_are_not_computed_with(
    copied: Path, expected: np.ndarray, io: str, cache: str
) -> None:
    with small_engine(copied, io, cache) as engine:
        for _ in range(3):
            assert np.array_equal(engine.logits(TOKENS), expected)
        for path in expert_files(copied):
            rewrite(path, change=1)
        with pytest.raises((ChecksumMismatch, StorageReadFailed), match=r"experts-\d+.safetensors`"):
            engine.logits(TOKENS)


@every_io
@pytest.mark.parametrize("cache", CACHES)
def test_a_file_that_changes_all_the_time(copied: Path, expected: np.ndarray, io: str, cache: str) -> None:
    """Right logits, or an error: whenever the change happens."""
    for number in range(8):
        with small_engine(copied, io, cache) as engine:
            for path in expert_files(copied):
                rewrite(path, change=0)
            if io != "mmap":
                assert np.array_equal(engine.logits(TOKENS), expected)
            rewrite(expert_files(copied)[number % 3], change=1)
            with pytest.raises((ChecksumMismatch, StorageReadFailed), match=r"experts-\d+.safetensors`"):
                engine.logits(TOKENS)
            rewrite(expert_files(copied)[number % 3], change=1)


@every_io
@pytest.mark.parametrize("cache", CACHES)
def test_a_change_of_mode_or_of_another_name_ends_nothing(
    copied: Path, expected: np.ndarray, io: str, cache: str, tmp_path: Path
) -> None:
    with small_engine(copied, io, cache) as engine:
        for number in range(3):
            assert np.array_equal(engine.logits(TOKENS), expected)
            for path in expert_files(copied):
                path.chmod(0o600 + number)
                os.link(path, tmp_path / f"{number}-{path.name}")
        assert np.array_equal(engine.logits(TOKENS), expected)


def test_a_mapped_file_that_was_written_to_is_refused_even_if_it_is_the_same(copied: Path) -> None:
    with small_engine(copied, "mmap") as engine:
        engine.logits(TOKENS)
        rewrite(expert_files(copied)[0], change=0)
        with pytest.raises(StorageReadFailed, match="was changed while it was in use"):
            engine.logits(TOKENS)


@pytest.mark.parametrize("io", READS)
@pytest.mark.parametrize("cache", CACHES)
def test_what_has_not_changed_is_compared_once(
    tiny_bundle: Path, io: str, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native cache leaves the rest to no Python at all."""
    wait_until_settled(tiny_bundle)
    compared, real = list[int](), xxhash.xxh3_128_hexdigest
    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", lambda data: compared.append(len(data)) or real(data))
    with small_engine(tiny_bundle, io, cache) as engine:
        compared.clear()
        engine.logits(list(range(40)))
        first, reads = len(compared), engine.cache.stats.reads
        assert 0 < first <= engine.cache.stats.reads
        for _ in range(3):
            engine.logits(list(range(40)))
        count = len(engine.bundle.manifest.stored_experts)
        assert engine.cache.stats.reads > 2 * reads and len(compared) <= 2 * count


@pytest.mark.parametrize("io", [*READS, "mmap"])
def test_a_file_younger_than_its_time_stamps_can_tell_is_compared_again(
    copied: Path, io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_verifier_module, "SETTLED_NS", 10**18)
    compared, real = list[int](), xxhash.xxh3_128_hexdigest
    storage = open_storage(open_bundle(copied), io, verify=True)  # type: ignore[arg-type]
    monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", lambda data: compared.append(len(data)) or real(data))
    for _ in range(3):
        storage.load(4)
    assert len(compared) == 3
    storage.close()
