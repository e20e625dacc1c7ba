"""`moec compile --threads` limits torch and the runtime, and only while it compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from moec.cli.commands.compiling.partial_bundle import open_partial
from moec.cli.main import cli
from moec.compiler.request.request import CompileRequest

pytestmark = pytest.mark.usefixtures("one_thread")


def test_torch_and_the_runtime_compute_with_as_many_threads(
    mixed_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[int]()

    def compiled(request: CompileRequest) -> None:
        with request.open_runtime(mixed_bundle, 0) as engine:
            seen.extend([torch.get_num_threads(), engine.engine.options.threads])
        raise RuntimeError("this is all")

    monkeypatch.setattr("moec.compiler.pipeline.compile_checkpoint", compiled)
    arguments = ["compile", str(tmp_path), "--uniform", "4", "--device", "laptop", "-o", str(tmp_path / "out")]
    CliRunner().invoke(cli, [*arguments, "--threads", "3"])
    assert seen == [3, 3] and torch.get_num_threads() == 1, "torch's own number is back, also after an error"
    CliRunner().invoke(cli, arguments)
    assert seen == [3, 3, 1, 0], "without the option both keep their defaults"


def test_a_partial_bundle_opens_with_all_processors(mixed_bundle: Path) -> None:
    with open_partial(mixed_bundle) as engine:
        assert engine.engine.options.threads == 0
