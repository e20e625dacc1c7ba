"""A tiny checkpoint, bundles made from it, and a function that calls the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from moec.cli.main import cli
from moec.profiles.loading import load_profile
from tests.gates.bundles import emit_bundle
from tests.tiny_models import TinyMixtral, save_tiny_mixtral

Invoke = Callable[..., Result]
InvokeIn = Callable[[Path, tuple[object, ...]], Result]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    return save_tiny_mixtral(folder, TinyMixtral(layers=3, experts=8, seed=21))


@pytest.fixture(scope="session")
def bundle(checkpoint: Path) -> Path:
    """A bundle at 16 bits, which computes the same as the checkpoint."""
    return emit_bundle(checkpoint, checkpoint.parent / "tiny-moec")


@pytest.fixture(scope="session")
def mixed_bundle(checkpoint: Path) -> Path:
    return emit_bundle(checkpoint, checkpoint.parent / "mixed-moec", mixed=True)


@pytest.fixture(scope="session")
def two_version_bundle(checkpoint: Path) -> Path:
    """A bundle with four experts per token at 8 bits, and low versions at 2 bits."""
    folder = checkpoint.parent / "versions"
    save_tiny_mixtral(folder, TinyMixtral(layers=3, experts=8, top_k=4, seed=5))
    return emit_bundle(folder, checkpoint.parent / "versions-moec", bitwidth=8, low="q2g32")


@pytest.fixture
def own_bundle(mixed_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(mixed_bundle, tmp_path / "own-moec"))


@pytest.fixture
def invoke() -> Invoke:
    """Return a function that calls `moec` with arguments. It keeps stdout and stderr apart."""

    def call(*arguments: object, stdin: str | None = None, **environment: str | None) -> Result:
        return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin, env=environment)

    return call


@pytest.fixture
def invoke_in(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> InvokeIn:
    """Return a function that calls a command in a folder. The command must succeed.

    `compile` gets `model` of the folder, other commands get `bundle`.
    """

    def call(folder: Path, arguments: tuple[object, ...]) -> Result:
        monkeypatch.chdir(folder)
        command, *options = arguments
        result = invoke(command, "model" if command == "compile" else "bundle", *options)
        assert result.exit_code == 0, result.stderr
        if "--json" in options:
            json.loads(result.stdout)
        return result

    return call


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of a shipped profile in place of a probe of this machine, which takes seconds."""
    profile = load_profile("laptop")
    monkeypatch.setattr("moec.profiles.probe.probe_host", lambda storage, request_bytes: profile)
    monkeypatch.setattr("moec.runtime.memory.bandwidth.read_bytes_per_s", lambda size, threads: 8_000_000_000)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Plain texts of different lengths. One has a single token."""
    path = tmp_path / "texts.jsonl"
    rows = ["A first text, rather short.", "x", "Another text that is a little longer, with more words in it."]
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    rows = [{"question": f"What is {n} plus {n}?", "answer": f"<<{n}+{n}={2 * n}>>\n#### {2 * n}"} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
