"""The console script and the processes that it starts: interrupts, standard streams, warnings, foreign folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moec.cli.bundle_check import check_bundle, own_command
from tests.interrupts import hear_interrupts

SCRIPT = [str(Path(sys.executable).with_name("moec"))]
MODULE = [sys.executable, "-m", "moec.cli.main"]


def start(command: list[str], *arguments: object, packages: Path | None = None, **environment: str) -> list[str]:
    """Start a command line with environment variables.

    packages: a folder that is searched before installed packages.
    """
    path = {} if packages is None else {"PYTHONPATH": str(packages)}
    variables = [f"{name}={value}" for name, value in {**path, **environment}.items()]
    return ["env", *variables, *command, *map(str, arguments)]


def moec(*arguments: object, packages: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    line = start(SCRIPT, *arguments, packages=packages, **environment)
    return subprocess.run(line, capture_output=True, text=True, check=False)


def shell(command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script of the shell. `"$@"` in it is the command line of moec."""
    line = ["bash", "-c", command, "bash", *SCRIPT, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
CONVERTED = (
    "import os, signal, time\n"
    "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
    "except KeyboardInterrupt as problem:\n    raise ImportError('cannot load the extension') from problem\n"
)


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
@pytest.mark.parametrize(
    ("package", "content"),
    [("click", INTERRUPT), ("tokenizers", INTERRUPT), ("numpy", INTERRUPT), ("tokenizers", CONVERTED)],
)
def test_an_interrupt_while_modules_are_loaded(
    bundle: Path, tmp_path: Path, command: list[str], package: str, content: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(content)
    line = start(command, "run", bundle, "--prompt", "x", packages=tmp_path)
    done = subprocess.run(line, capture_output=True, text=True, check=False, preexec_fn=hear_interrupts)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "interrupted")


DROPPED = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept:\n    pass\n"
DROPPED_LATER = f"{DROPPED}import time\ntime.sleep(60)\n"
DROPPED_OFTEN = (
    f"{DROPPED}import time\nfor _ in range(3):\n    try:\n        time.sleep(60)\n    except:\n        pass\n"
)


@pytest.mark.parametrize("content", [DROPPED_LATER, DROPPED_OFTEN])
@pytest.mark.parametrize("command", ["run", "compile", "export", "eval"])
def test_an_import_that_drops_an_interrupt_ends_the_command(
    bundle: Path, tmp_path: Path, command: str, content: str
) -> None:
    for package in ("numpy", "torch"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(content)
    (tmp_path / "texts.txt").write_text("a")
    options = {
        "run": ("--prompt", "x"),
        "compile": ("--uniform", "4", "-o", tmp_path / "out"),
        "export": ("-o", tmp_path / "out"),
        "eval": ("--data", tmp_path / "texts.txt"),
    }
    line = start(SCRIPT, command, bundle, *options[command], packages=tmp_path)
    done = subprocess.run(line, capture_output=True, text=True, check=False, preexec_fn=hear_interrupts, timeout=50)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip().endswith("interrupted") and "Traceback" not in done.stderr


LATE_INTERRUPT = """
import os, signal, sys
from moec.cli.main import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)

late = Late()  # is deleted after the handlers of signals
sys.argv = ["moec", "--version"]
main()
"""


def test_an_interrupt_after_the_end_changes_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", LATE_INTERRUPT], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("moec ")


def test_an_interrupt_that_is_ignored_stays_ignored(bundle: Path) -> None:
    """Background jobs of a script ignore interrupts."""
    done = shell("trap '' INT; PYTHONSTARTUP= \"$@\" & sleep 0.05; kill -INT $!; wait $!; echo $?", "--version")
    assert done.stdout.splitlines()[-1] == "0" and done.stderr == ""


@pytest.mark.parametrize("options", [("--prompt", "x", "--max-new-tokens", 2), ("--prompt", "x", "--json")])
def test_a_full_disk_at_standard_output(bundle: Path, options: tuple[object, ...]) -> None:
    done = shell('"$@" > /dev/full; echo $?', "run", bundle, *options)
    assert done.stdout == "1\n"
    assert "error: standard output cannot be written: No space left on device\n" in done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_help_for_a_full_disk() -> None:
    done = shell('"$@" > /dev/full; echo $?', "--help")
    assert done.stdout == "1\n" and "No space left" in done.stderr and "Exception" not in done.stderr


def test_a_closed_standard_output(bundle: Path, tmp_path: Path) -> None:
    done = shell('"$@" >&-; echo $?', "run", bundle, "--prompt", "x", "--max-new-tokens", 2)
    assert done.stdout == "1\n" and "error: standard output is closed\n" in done.stderr
    assert "Traceback" not in done.stderr
    done = shell('"$@" <&- 2>&-; echo $?', "inspect", bundle)
    assert done.stdout.endswith("0\n") and "bundle" in done.stdout
    done = shell('"$@" >&-; echo $?', "bench", bundle, "--tokens", 2, "--prompt", "x", "--trace-out", "-")
    assert done.stdout == "1\n" and "standard output is closed" in done.stderr


@pytest.mark.parametrize("place", ["2> /dev/full", "2>&-"])
def test_a_standard_error_that_refuses_loses_talk_alone(bundle: Path, tmp_path: Path, place: str) -> None:
    done = shell(f'"$@" {place}; echo $?', "run", bundle, "--prompt", "x", "--max-new-tokens", 2)
    assert done.stdout.endswith("0\n") and done.stderr == ""
    done = shell(f'"$@" {place}; echo $?', "pack", bundle, tmp_path / "packed")
    assert done.stdout.endswith("0\n") and done.stderr == ""


def test_a_prompt_from_a_standard_input_that_is_closed_or_no_text(bundle: Path) -> None:
    done = shell('"$@" <&-', "run", bundle, "--prompt", "-")
    assert done.returncode == 1 and "the prompt is empty" in done.stderr
    done = shell('printf "ab\\377c" | "$@"', "run", bundle, "--prompt", "-")
    assert done.returncode == 1 and "the prompt is not UTF-8 at byte 2" in done.stderr


def test_a_reader_that_leaves_ends_the_command_in_silence(bundle: Path) -> None:
    line = start(SCRIPT, "inspect", bundle)
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(line, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, "")


LOUD = """
import logging, sys, warnings
from fsspec.implementations.local import LocalFileSystem

warnings.warn("loud while it is loaded", FutureWarning)

class LoudFileSystem(LocalFileSystem):
    protocol = "loud"

    def ls(self, path, detail=False, **options):
        warnings.warn("loud in its own name", UserWarning)
        for level in range(1, 12):
            try:
                warnings.warn("loud in the name of its caller", FutureWarning, stacklevel=level)
            except ValueError:
                break
        logging.getLogger("loud").warning("loud in a log")
        return super().ls(path, detail, **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("loud://"))
"""


def test_warnings_of_other_packages_are_hidden_unless_asked_for(checkpoint: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    (packages / "loud-1.0.dist-info").mkdir(parents=True)
    (packages / "loud-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (packages / "loud-1.0.dist-info" / "entry_points.txt").write_text("[fsspec.specs]\nloud = loud.LoudFileSystem\n")
    (packages / "loud.py").write_text(LOUD)
    arguments = ("compile", f"loud://{checkpoint}", "--uniform", 8, "--group-size", 32, "--device", "laptop", "-o")
    quiet = moec(*arguments, tmp_path / "quiet", packages=packages, HOME=str(tmp_path))
    assert quiet.returncode == 0, quiet.stderr
    assert "arn" not in quiet.stderr and "loud in" not in quiet.stderr and "loud while" not in quiet.stderr
    shown = moec(*arguments, tmp_path / "loud", packages=packages, HOME=str(tmp_path), MOEC_WARNINGS="1")
    assert shown.returncode == 0, shown.stderr
    for text in ("while it is loaded", "in its own name", "in the name of its caller", "in a log"):
        assert f"loud {text}" in shown.stderr, text


def test_warnings_of_our_own_modules_are_shown() -> None:
    script = (
        "import warnings; from moec.cli.group import hide_foreign_warnings\n"
        "hide_foreign_warnings()\n"
        "import numpy as np\n"
        "own = 'import warnings\\ndef f(): warnings.warn(\"ours\", UserWarning)\\n'\n"
        "foreign = 'import warnings\\ndef f(): warnings.warn(\"theirs\", UserWarning, stacklevel=2)\\n'\n"
        "caller = 'def f(): theirs()\\n'\n"
        "extension = 'def f(): numpy.float32(1) / numpy.float32(0)\\n'\n"
        "spaces = {name: {'__name__': name, 'numpy': np} for name in ('moec.a', 'other', 'moec.b', 'moec.c')}\n"
        "for name, text in zip(spaces, (own, foreign, caller, extension)): exec(text, spaces[name])\n"
        "spaces['moec.b']['theirs'] = spaces['other']['f']\n"
        "for name in ('moec.a', 'moec.b', 'moec.c'): spaces[name]['f']()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "UserWarning: ours" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_character_that_the_terminal_lacks_is_escaped(bundle: Path, tmp_path: Path) -> None:
    done = moec("pack", bundle, tmp_path / "\u4e16.moec", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0 and r"\u4e16.moec" in done.stdout, done.stderr


EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that modules in the current folder write when they are imported."""
    mark, folder = tmp_path / "imported", tmp_path / "foreign"
    (folder / "moec").mkdir(parents=True)
    for name in ("json.py", "runpy.py", "numpy.py", "sitecustomize.py", "moec/__init__.py"):
        (folder / name).write_text(f"open({str(mark)!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return mark


def test_the_self_test_in_a_foreign_folder(marked: Path) -> None:
    assert "self-test: the logits of" in check_bundle(EXAMPLE)
    assert not marked.exists()


def test_the_command_line_in_a_foreign_folder(marked: Path) -> None:
    command = own_command("moec.cli.main", "installed", "nothing here")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "`nothing here` is no folder of installed bundles" in done.stderr
    assert not marked.exists()


WAITING = """
import sys
from moec.cli import bundle_check
work = f"import os, pathlib, time; pathlib.Path({sys.argv[1]!r}).write_text(str(os.getpid())); time.sleep(100)"
own_command = bundle_check.own_command
bundle_check.own_command = lambda *given: own_command("timeit", "-n", "1", "-r", "1", work)
bundle_check.check_bundle("a bundle")
"""
"""A self-test that writes its number into a file, and does not end."""


def is_running(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


@pytest.mark.gate("G13")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_self_test_ends_with_the_process_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    note = tmp_path / "number"
    with subprocess.Popen(
        [sys.executable, "-c", WAITING, note],
        stderr=subprocess.DEVNULL,
        preexec_fn=hear_interrupts,  # noqa: PLW1509
    ) as parent:
        while not note.is_file() or not note.read_text():
            assert parent.poll() is None
            time.sleep(0.01)
        child = int(note.read_text())
        assert is_running(child)
        parent.send_signal(number)
        parent.wait(60)
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline, "the self-test runs on"
        time.sleep(0.01)
