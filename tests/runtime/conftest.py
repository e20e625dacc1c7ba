"""One tiny bundle for the tests of this folder, and a way to fail instead of hanging."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.faulty_source import PATIENCE_S


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of six experts, formats mixed; read only."""
    import torch

    from tests.gates.bundles import emit_bundle
    from tests.tiny_models import TinyMixtral, save_tiny_mixtral

    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("tiny")
    folder = save_tiny_mixtral(root / "model", TinyMixtral(layers=3, experts=6, top_k=2, seed=5))
    return emit_bundle(folder, root / "bundle", mixed=True)


@pytest.fixture
def copied(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the bundle, which a test may change."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copied"))


@pytest.fixture
def in_time() -> Callable[..., Any]:
    """Call a function; fail if it does not come back."""

    def call(function: Callable[[], Any]) -> Any:
        outcome: list[tuple[bool, Any]] = []

        def run() -> None:
            try:
                outcome.append((True, function()))
            except BaseException as error:
                outcome.append((False, error))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        if not outcome:
            pytest.fail(f"no answer within {PATIENCE_S} s")
        is_done, value = outcome[0]
        if not is_done:
            raise value
        return value

    return call
