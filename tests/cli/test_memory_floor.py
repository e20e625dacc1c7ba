"""The smallest `--memory` that `inspect` and the refusal print works, and 1 MiB less is refused. In real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gates.bundles import emit_bundle
from tests.gates.damage import write_tables
from tests.gates.memory_group import memory_group
from tests.tiny_models import TinyMixtral, save_tiny_mixtral
from tests.tiny_switch import save_tiny_switch

from .conftest import Invoke

MARGIN_BYTES = 64 << 20


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("floors")
    models = {
        "many": save_tiny_mixtral(root / "many", TinyMixtral(layers=4, experts=96, seed=3)),
        "wide": save_tiny_mixtral(root / "wide", TinyMixtral(hidden_size=256, width=512, experts=8, seed=4)),
        "switch": save_tiny_switch(root / "switch"),
    }
    return {name: emit_bundle(folder, root / f"{name}-moec") for name, folder in models.items()}


def moec(*arguments: object, group: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line, in a control group if its file of processes is given."""

    def enter() -> None:
        if group is not None:
            group.write_text(str(os.getpid()))

    command = [sys.executable, "-m", "moec.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=enter, check=False)


def least_of(text: str) -> int:
    found = re.search(r"--memory (\d+)MiB", text)
    assert found is not None, text
    return int(found[1])


@pytest.mark.parametrize("name", ["many", "wide", "switch"])
def test_what_inspect_prints_runs_and_less_is_refused(bundles: dict[str, Path], name: str) -> None:
    bundle = bundles[name]
    facts = json.loads(moec("inspect", bundle, "--json").stdout)
    least = least_of(facts["memory"]["option"])
    page = moec("inspect", bundle).stdout
    assert f"`--memory {least}MiB`" in page
    run = ("run", bundle, "--prompt", "Question: 12?", "--max-new-tokens", 4)
    done = moec(*run, "--memory", f"{least}MiB", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["memory"]["floor_bytes"] == facts["memory"]["floor_bytes"]
    assert told["statistics"]["peak_memory_bytes"] <= least << 20
    refused = moec(*run, "--memory", f"{least - 1}MiB")
    assert refused.returncode == 1 and f"is under the floor of {least}MiB" in refused.stderr
    assert least_of(refused.stderr.partition("hint")[2]) == least


@pytest.mark.parametrize(
    "options",
    [("--context", "64"), ("--kv", "float16"), ("--set", "prefetch=path"), ("--set", "prefetch=off"), ("--beams", "4")],
)
def test_what_the_refusal_prints_runs_with_the_same_options(
    invoke: Invoke, bundles: dict[str, Path], options: tuple[str, ...]
) -> None:
    """In this process, whose size is in the printed number."""
    run = ("run", bundles["many"], "--prompt", "Question: 12?", "--max-new-tokens", 3, *options)
    refused = invoke(*run, "--memory", "1MiB")
    assert refused.exit_code == 1
    done = invoke(*run, "--memory", f"{least_of(refused.stderr.partition('hint')[2])}MiB")
    assert done.exit_code == 0, done.stderr


def test_the_expert_cache_is_named_in_its_own_unit(invoke: Invoke, bundles: dict[str, Path]) -> None:
    run = ("run", bundles["wide"], "--prompt", "a", "--max-new-tokens", 2)
    refused = invoke(*run, "--expert-cache", "1%")
    hint = re.search(r"hint: --expert-cache (\d+MiB)", refused.stderr)
    assert refused.exit_code == 1 and hint is not None, refused.stderr
    assert invoke(*run, "--expert-cache", hint[1]).exit_code == 0


def test_a_run_at_the_floor_stays_inside_a_control_group(bundles: dict[str, Path]) -> None:
    """The kernel counts the page cache too. With a limit 64 MiB above the printed number no process is killed."""
    least = least_of(json.loads(moec("inspect", bundles["many"], "--json").stdout)["memory"]["option"])
    with memory_group((least << 20) + MARGIN_BYTES) as group:
        run = ("run", bundles["many"], "--prompt", "Question: 12?" * 8, "--max-new-tokens", 16)
        done = moec(*run, "--memory", f"{least}MiB", "--set", "prefetch=popularity", group=group.processes)
        assert done.returncode == 0, done.stderr
        assert group.kills() == 0


def test_path_tables_are_read_where_they_are_asked_for_alone(
    invoke: Invoke, bundles: dict[str, Path], tmp_path: Path
) -> None:
    """`verify` and `--set prefetch=path` refuse a dictionary that contradicts itself. Other runs do not read it."""
    bundle = Path(shutil.copytree(bundles["many"], tmp_path / "many"))
    zeros = {"popularity": np.zeros((4, 96), np.uint32), "transitions": np.zeros((3, 96, 96), np.uint32)}
    numbers = np.arange(2 * 96 * 96, dtype=np.int32)
    keys = np.stack([2 + numbers // 96**2, numbers // 96 % 96, numbers % 96], 1).astype(np.int32)
    good = {
        "path_keys": keys,
        "path_offsets": np.arange(len(keys) + 1, dtype=np.int64),
        "path_experts": np.zeros(len(keys), np.uint16),
        "path_counts": np.ones(len(keys), np.uint32),
    }
    run = ("run", bundle, "--prompt", "a", "--max-new-tokens", 2, "--expert-cache", "20%", "--set")
    write_tables(bundle, **zeros, **good)
    assert invoke(*run, "prefetch=path").exit_code == 0
    keys[-1] = keys[0]
    write_tables(bundle, **zeros, **good)
    assert invoke(*run, "prefetch=lookahead").exit_code == invoke(*run, "prefetch=off").exit_code == 0
    for refused in (invoke(*run, "prefetch=path"), invoke("verify", bundle)):
        assert refused.exit_code == 3 and "path dictionary" in refused.stderr
