"""`moec profile-device` writes a file that `--device` reads, and replaces no existing file."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from moec.cli.main import cli
from moec.profiles.loading import load_profile


def test_the_file_is_a_profile(tmp_path: Path) -> None:
    target = tmp_path / "board.toml"
    arguments = ["profile-device", "-o", str(target), "--name", "board", "--storage", str(tmp_path), "--json"]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.exception is None
    profile = load_profile(target)
    assert profile.name == "board" and not profile.is_probed and profile.storage_bytes_per_s > 1_000_000
    assert all(text.startswith("measured: ") for text in profile.provenance.values())
    told = json.loads(done.stdout)
    assert told["sha256"] == profile.sha256 and told["threads"] == profile.threads

    before = target.read_bytes()
    again = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert "there already" in str(again.exception) and target.read_bytes() == before


def test_a_bad_name_is_refused(tmp_path: Path) -> None:
    arguments = ["profile-device", "--name", "My Board", "--storage", str(tmp_path)]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert "lower-case" in str(done.exception)
