"""G15 on wheels: one pip command installs them without a compiler, and they compute what was certified.

The suite writes a wheel around the extension that it has. MOEC_FULL_GATES=1 builds the wheels of `make wheels` for
Python 3.11 and 3.12. It runs them with the Pythons of Debian 12 and 13, those for ARM under qemu: self-test, tokens and
kernels.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moec.runtime import kernels
from moec.runtime.kernels.native.wheels.targets import PackagesUnavailable, unpack_packages
from moec.runtime.kernels.native.wheels.wheel_file import EXTENSION_FOLDER, add_extension, plain_wheel

ROOT = Path(__file__).parents[2]
EMULATOR = "qemu-aarch64"
RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
"""Releases of Debian by their Python."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
TEST_TOOLS = ("pytest>=8.2", "hypothesis>=6.150")
BUNDLE = ROOT / "examples" / "bundle"
PROMPT = "Question: 6 dolls cost 30 dollars. How much do 2 dolls cost?\nAnswer:"
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
MAX_RESIDENT_BYTES = 60 << 20
BOTH = ("x86_64", "aarch64")
ARM_KERNELS = {"max": ("neon-i8mm", "neon-dot", "neon", "scalar"), "cortex-a72": ("neon", "scalar")}
"""Kernels by processor of qemu. The Cortex-A72 is that of a Raspberry Pi 4."""
RESIDENT = """
import json
import moec.cli.commands.running.run, moec.cli.options.opening, moec.runtime.engine.open_engine
from moec.profiles.probe import resident_set_bytes
from moec.runtime import kernels, load
names = kernels.available()
print(json.dumps([names, resident_set_bytes(), moec.cli.commands.running.run.__file__]))
"""
needs_extension = pytest.mark.skipif(kernels.loaded() is None, reason="NOT RUN: the extension is not built")
full = pytest.mark.skipif(os.environ.get("MOEC_FULL_GATES") != "1", reason="an hour: MOEC_FULL_GATES=1")
pytestmark = [pytest.mark.gate("G15"), needs_extension]


@dataclass(frozen=True)
class Installed:
    """An installed wheel.

    python: words of a command that starts its interpreter.
    environment: variables of its processes; the path holds no compiler.
    """

    python: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Start the interpreter with these words, outside of the tree."""
        command = [*self.python, *map(str, words)]
        folder = self.environment["HOME"]
        return subprocess.run(command, env=self.environment, cwd=folder, capture_output=True, text=True, check=False)

    def moec(self, *words: str | Path) -> str:
        """Run a command of moec. Returns its output. It must succeed."""
        done = self.run("-m", "moec.cli.main", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout


def bare_environment(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment with an empty folder as path and home."""
    empty = folder / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    return {"PATH": str(empty), "HOME": str(empty), "MOEC_WARNINGS": "1", **more}


def install_here(wheel: Path, folder: Path, with_needs: bool) -> Installed:
    """Install a wheel in an environment of its own, with a path that holds no compiler.

    with_needs: also install what moec needs, from the package index; otherwise take it from the running environment.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python, environment = folder / "venv" / "bin" / "python", bare_environment(folder)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--only-binary", ":all:"]
    if with_needs:
        pip += ["-c", str(ROOT / "constraints.txt")]
    else:
        pip += ["--no-deps", "--no-index"]
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        (site / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    without_compilers = {**os.environ, "PATH": environment["PATH"]}
    done = subprocess.run([*pip, str(wheel)], env=without_compilers, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Installed((str(python),), environment)


def install_on_debian(wheel: Path, folder: Path, python: str, processor: str, emulated: str = "max") -> Installed:
    """Install a wheel for a Python of Debian, which is unpacked apart from the system. ARM runs under qemu-user.

    python: a key of RELEASES.
    processor: x86_64 or aarch64.
    emulated: name of a processor that qemu has.
    Skips the test where a tool or the network is missing.
    """
    if processor == "aarch64" and shutil.which(EMULATOR) is None:
        pytest.skip(f"NOT RUN: wheels for ARM, because {EMULATOR} is missing: apt-get install qemu-user")
    try:
        packages = [f"python{python}-minimal", f"libpython{python}-stdlib", "libstdc++6"]  # numpy needs the last one
        kept = ROOT / "build" / "wheels" / "debian"
        root = unpack_packages(packages, RELEASES[python], processor, kept, with_needs=True)
    except PackagesUnavailable as error:
        pytest.skip(f"NOT RUN: wheels under Debian's Python, because it cannot be had: {error}")
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")  # in Debian 13 no package has this link
    site, program = folder / "site", root / "usr" / "bin" / f"python{python}"
    _install_into(site, python, processor, [str(wheel), *TEST_TOOLS])
    environment = bare_environment(folder, PYTHONPATH=str(site), PYTHONDONTWRITEBYTECODE="1")
    if processor == "aarch64":
        return Installed((str(shutil.which(EMULATOR)), "-cpu", emulated, "-L", str(root), str(program)), environment)
    libraries = ":".join(str(root / each / "x86_64-linux-gnu") for each in ("usr/lib", "lib"))
    loader = next(root.glob("**/lib64/ld-linux-x86-64.so.2"))  # below `usr` from Debian 13 on
    environment["PYTHONHOME"] = str(root / "usr")
    return Installed((str(loader), "--library-path", libraries, str(program)), environment)


def _install_into(site: Path, python: str, processor: str, packages: Sequence[str]) -> None:
    """Let pip install packages for a Python and a processor into a folder. Skips the test if it cannot fetch them."""
    version = f"cp{python.replace('.', '')}"
    chosen = ["--python-version", python, "--implementation", "cp"]
    chosen += [f"--abi={abi}" for abi in (version, "abi3", "none")]
    chosen += [f"--platform={name}_{processor}" for name in PLATFORMS]
    chosen += ["--only-binary", ":all:", "-c", str(ROOT / "constraints.txt")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), *chosen, *packages]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if "No matching distribution" in done.stderr and "Retrying" in done.stderr:
        pytest.skip(f"NOT RUN: wheels under Debian's Python, because pip cannot fetch: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr


def answer(installed: Installed, *words: str) -> str:
    """Return the text that a run of the example writes."""
    return installed.moec("run", BUNDLE, "--memory", "256MiB", "--max-new-tokens", "40", "--prompt", PROMPT, *words)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel around the extension of this environment."""
    folder, extension = tmp_path_factory.mktemp("wheel"), kernels.loaded()
    assert extension is not None and extension.__file__ is not None
    library = Path(extension.__file__)
    tag = f"{PYTHON}-{PYTHON}-linux_{platform.machine()}"
    return add_extension(plain_wheel(ROOT, folder), library, tag, library.name, folder / "dist")


@pytest.fixture(scope="module")
def here(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """This wheel, installed."""
    return install_here(wheel, tmp_path_factory.mktemp("here"), with_needs=False)


def test_a_wheel_holds_the_packages_and_no_sources(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        record = file.read(next(name for name in names if name.endswith("RECORD"))).decode()
    assert sorted(line.partition(",")[0] for line in record.splitlines()) == sorted(names)
    assert [name for name in names if "native/" in name or name.endswith((".cpp", ".h", ".pyc"))] == []
    assert [name for name in names if name.startswith(f"{EXTENSION_FOLDER}/_native")] != []
    packages = {name.split("/")[1] for name in names if name.startswith("moec/")}
    assert {"cli", "compiler", "evaluation", "manifests", "profiles", "runtime", "shipping"} <= packages


def test_writing_a_wheel_twice_gives_equal_bytes(wheel: Path, tmp_path: Path) -> None:
    """Even if the plain wheel has other times."""
    plain = next((wheel.parents[1] / "plain").glob("*.whl"))
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(tmp_path / plain.name, "w") as later:
        for name in source.namelist():
            later.writestr(zipfile.ZipInfo(name, (2030, 1, 1, 0, 0, 0)), source.read(name))
    library, tag = Path(str(getattr(kernels.loaded(), "__file__", ""))), wheel.stem.split("-", 2)[2]
    again = add_extension(tmp_path / plain.name, library, tag, library.name, tmp_path / "dist")
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


def test_an_installed_wheel_computes_what_was_certified(here: Installed) -> None:
    told = json.loads(here.moec("verify", BUNDLE, "--self-test", "--json"))
    assert told["self_test"]["kernels"] == kernels.available()[0]
    assert "#### 10" in answer(here)


def test_a_run_takes_at_most_60_mib_before_weights(here: Installed) -> None:
    done = here.run("-c", RESIDENT)
    assert done.returncode == 0, done.stderr
    names, resident, place = json.loads(done.stdout)
    assert "site-packages" in Path(place).parts and list(kernels.available()) == names
    print(f"{resident / 2**20:.1f} MiB resident before weights")
    assert resident <= MAX_RESIDENT_BYTES


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The wheels of `make wheels`, by tag of Python and processor."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "moec.runtime.kernels.native.wheels", "-o", str(folder)]
    command += ["--python", "3.11", "--python", "3.12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "is missing" in done.stderr:
        pytest.skip(f"NOT RUN: wheels, because a tool is missing: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return {(tag, name): next(folder.glob(f"moec-*-{tag}-*_{name}.whl")) for tag in ("cp311", "cp312") for name in BOTH}


@full
@pytest.mark.slow
def test_one_pip_command_installs_a_built_wheel(built: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    """With all that it needs, from the package index, and without a compiler on the path."""
    tag = PYTHON if (PYTHON, platform.machine()) in built else "cp312"
    here = install_here(built[tag, platform.machine()], tmp_path, with_needs=True)
    assert json.loads(here.moec("verify", BUNDLE, "--self-test", "--json"))["self_test"]["texts"] == 3
    assert "#### 10" in answer(here)


@full
@pytest.mark.slow
@pytest.mark.parametrize("emulated", ARM_KERNELS)
@pytest.mark.parametrize(("tag", "python"), [("cp311", "3.11"), ("cp312", "3.13")])
def test_built_wheels_compute_the_same_on_both_processors(
    built: dict[tuple[str, str], Path], here: Installed, tmp_path: Path, tag: str, python: str, emulated: str
) -> None:
    expected = answer(here)
    x86 = install_on_debian(built[tag, "x86_64"], tmp_path / "x86", python, "x86_64")
    arm = install_on_debian(built[tag, "aarch64"], tmp_path / "arm", python, "aarch64", emulated)
    for installed, names in ((x86, ("scalar",)), (arm, ARM_KERNELS[emulated])):
        for name in names:
            told = json.loads(installed.moec("verify", BUNDLE, "--self-test", "--kernels", name, "--json"))
            assert told["self_test"]["kernels"] == name
            assert answer(installed, "--set", f"kernels={name}") == expected


@full
@pytest.mark.slow
@pytest.mark.gate("G8")
@pytest.mark.parametrize("part", ["test_linear.py", "test_experts.py", "test_rows.py", "test_elementary.py"])
def test_kernels_of_the_arm_wheel_agree(built: dict[tuple[str, str], Path], tmp_path: Path, part: str) -> None:
    arm = install_on_debian(built["cp311", "aarch64"], tmp_path, "3.11", "aarch64")
    tests = ROOT / "tests" / "kernels" / part
    done = arm.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", ROOT, tests)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
