"""The memory of a compile as its users measure it: what all of its processes hold, sampled while they run."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_compile import save_model, save_texts

OPTIONS = ("--bits", "4,16", "--group-size", "32", "--dense-bits", "8", "--swaps", "0", "--no-comparisons")
COMPILE = "from moec.cli.main import main; main()"


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
    command = [sys.executable, "-c", COMPILE, "compile", *map(str, arguments)]
    most = 0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None:
            most = max(most, resident_bytes(process.pid))
            time.sleep(0.02)
        assert process.stderr is not None
        return process.returncode, process.stderr.read(), most


@pytest.mark.slow
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
