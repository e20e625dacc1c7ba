"""The parts of `make wheels`: names, headers, checks. Whole wheels are in tests/gates/test_g15_wheels.py."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from moec.runtime.kernels.native.wheels.targets import PackagesUnavailable, Target, find_headers
from moec.runtime.kernels.native.wheels.wheel_file import MAX_BYTES, CompileFailed, WheelRefused, check_wheel, find_gcc

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def headers_in(folder: Path, processor: str = "") -> Path:
    """Write headers of a Python; with a processor, divided as Debian does it."""
    folder.mkdir(parents=True)
    (folder / "Python.h").touch()
    name = f"{processor}-linux-gnu/{folder.name}/pyconfig.h"
    (folder / "pyconfig.h").write_text(f"#include <{name}>\n" if processor else "#define SIZEOF_LONG 8\n")
    if processor:
        (folder.parent / name).parent.mkdir(parents=True)
        (folder.parent / name).touch()
    return folder


@pytest.mark.parametrize(
    ("python", "processor", "tag", "extension"),
    [
        ("3.10", "x86_64", "cp310-cp310-manylinux_2_28_x86_64", "_native.cpython-310-x86_64-linux-gnu.so"),
        ("3.11", "aarch64", "cp311-cp311-manylinux_2_28_aarch64", "_native.cpython-311-aarch64-linux-gnu.so"),
        ("3.12", "aarch64", "cp312-abi3-manylinux_2_28_aarch64", "_native.abi3.so"),
    ],
)
def test_names_say_what_a_wheel_is_for(python: str, processor: str, tag: str, extension: str) -> None:
    target = Target(python, processor)
    assert (target.tag, target.extension) == (tag, extension)


def test_a_wheel_without_headers_fails_only_if_it_was_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moec.runtime.kernels.native.wheels", "-o", str(tmp_path / "dist"), "--offline"]
    command += ["--build", str(tmp_path / "build"), "--headers", f"3.12={tmp_path}"]
    asked = subprocess.run([*command, "--python", "3.12"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert asked.returncode == 1 and f"error: `{tmp_path}` holds no Python.h" in asked.stderr
    assert not (tmp_path / "dist").exists()


def test_given_headers_come_first_and_later_ones_serve_the_stable_abi(tmp_path: Path) -> None:
    given = {"3.14": headers_in(tmp_path / "python3.14"), "3.10": headers_in(tmp_path / "python3.10")}
    for python, version in (("3.12", "3.14"), ("3.10", "3.10")):
        found = find_headers(Target(python, "aarch64"), given, None)
        assert found is not None and (found.version, found.folder) == (version, given[version])


def test_headers_of_debian_serve_one_processor(tmp_path: Path) -> None:
    given = {"3.10": headers_in(tmp_path / "python3.10", "x86_64")}
    found = find_headers(Target("3.10", "x86_64"), given, None)
    assert found is not None and found.folder == given["3.10"]
    with pytest.raises(PackagesUnavailable, match="for aarch64"):
        find_headers(Target("3.10", "aarch64"), given, None)


@pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").exists(), reason="NOT RUN: no headers of Python"
)
def test_the_running_python_has_headers() -> None:
    found = find_headers(Target(HERE, "x86_64"), {}, None)
    assert found is None or (found.version, found.source) == (HERE, sys.executable)


def test_large_wheels_and_missing_compilers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = tmp_path / "moec-0.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(WheelRefused, match=f"has {MAX_BYTES + 1} bytes"):
        list(check_wheel(large, Target("3.11", "x86_64")))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompileFailed, match="apt-get install g\\+\\+-aarch64-linux-gnu"):
        find_gcc("aarch64")
