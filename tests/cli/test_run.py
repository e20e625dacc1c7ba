"""`moec run`: text on stdout, mode and statistics on stderr, the same text whatever the cache does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moec.runtime import load

from .conftest import Invoke

PROMPT = "Once upon a time"


def text_of(invoke: Invoke, bundle: Path, *options: object) -> str:
    result = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 12, "--json", *options)
    assert result.exit_code == 0, result.stderr
    values = json.loads(result.stdout)
    assert len(values["token_ids"]) <= 12
    return str(values["text"])


def test_text_goes_to_stdout_and_talk_to_stderr(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 8, "--expert-cache", "50%")
    assert result.exit_code == 0
    with load(bundle, expert_cache="50%") as engine:
        expected = "".join(step.text for step in engine.generate(PROMPT, 8))
    assert result.stdout == expected + "\n"
    lines = result.stderr.splitlines()
    assert lines[0].startswith("mode: streaming, lossless; expert cache")
    names = ("first token (TTFT)", "per token (TPOT)", "expert cache", "read per token", "stall", "prefetch", "peak")
    for name in names:
        assert any(line.startswith(name) for line in lines[1:]), name
    assert "rereads" in result.stderr and "recall" in result.stderr and "tokens/s" in result.stderr


def test_json_is_one_object_with_all_counts(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 6, "--expert-cache", "40%", "--json")
    assert result.stdout.count("\n") == 1
    values = json.loads(result.stdout)
    assert set(values) == {"text", "token_ids", "finish_reason", "mode", "memory", "statistics"}
    statistics = values["statistics"]
    assert statistics["prompt_tokens"] == len(PROMPT) and statistics["tokens"] == len(values["token_ids"])
    assert statistics["lookups"] == statistics["misses"] + round(statistics["hit_rate"] * statistics["lookups"])
    assert statistics["bytes_read"] > 0 and statistics["peak_memory_bytes"] > 1 << 20
    assert 0 <= statistics["prefetch_recall"] <= 1 and 0 <= statistics["prefetch_precision"] <= 1
    assert (
        values["memory"]["cache_bytes"] < values["memory"]["budget_bytes"] if values["memory"]["budget_bytes"] else True
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--expert-cache", "30%", "--policy", "lru"),
        ("--expert-cache", "30%", "--policy", "lfu", "--prefetch", "path"),
        ("--expert-cache", "60%", "--io", "mmap", "--threads", 1),
        ("--expert-cache", "60%", "--io", "buffered", "--prefetch", "off", "--no-verify"),
        ("--context", 64),
    ],
)
def test_no_option_changes_the_text(invoke: Invoke, bundle: Path, options: tuple[object, ...]) -> None:
    assert text_of(invoke, bundle, *options) == text_of(invoke, bundle, "--expert-cache", "100%")


def test_a_seed_fixes_the_sample(invoke: Invoke, bundle: Path) -> None:
    sampled = [text_of(invoke, bundle, "--temperature", 1.5, "--top-k", 50, "--seed", seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_prompt_from_stdin(invoke: Invoke, bundle: Path) -> None:
    given = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 6)
    piped = invoke("run", bundle, "--prompt", "-", "--max-new-tokens", 6, stdin=PROMPT + "\n")
    assert piped.exit_code == 0 and piped.stdout == given.stdout


def test_forced_kernels_are_reported(invoke: Invoke, bundle: Path) -> None:
    script = "from moec.cli.main import cli; cli.main(prog_name='moec')"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "run",
            str(bundle),
            "--prompt",
            "x",
            "--max-new-tokens",
            "2",
            "--kernels",
            "numpy",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0 and "kernels numpy" in done.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "code", "sentence", "hint"),
    [
        (("--memory", "1MiB"), 1, "is under the floor of", "raise it"),
        (("--memory", "2G"), 1, "`2G` is not a size", "`2GiB`"),
        (("--expert-cache", "0%"), 1, "`0%` is not a share", "`50%`"),
        (("--context", 4), 1, "the prompt has 16 tokens, the context holds 4", "`--context`"),
        (("--context", 100_000), 1, "is longer than the 128 positions", "ask for less"),
        (("--top-k", 5), 1, "have no effect at temperature 0", "`--temperature`"),
        (("--max-new-tokens", 0), 1, "max_new_tokens must be at least 1", ""),
        (("--threads", 100_000), 1, "threads must be at most", "leave it out"),
        (("--kernels", "mmx"), 1, "no kernels `mmx` here", ""),
    ],
)
def test_bad_options(
    invoke: Invoke, bundle: Path, options: tuple[object, ...], code: int, sentence: str, hint: str
) -> None:
    result = invoke("run", bundle, "--prompt", PROMPT, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert sentence in result.stderr and hint in result.stderr and "Traceback" not in result.stderr


def test_an_empty_prompt_is_refused(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, "--prompt", "")
    assert result.exit_code == 1 and "the prompt is empty" in result.stderr


def test_what_is_no_bundle_is_refused(invoke: Invoke, checkpoint: Path, tmp_path: Path) -> None:
    missing = invoke("run", tmp_path / "nowhere", "--prompt", "x")
    assert missing.exit_code == 1 and "does not exist, expected a bundle folder" in missing.stderr
    (tmp_path / "file.moec").write_bytes(b"x")
    packed = invoke("run", tmp_path / "file.moec", "--prompt", "x")
    assert packed.exit_code == 1 and "moec unpack" in packed.stderr
    other = invoke("run", checkpoint, "--prompt", "x")
    assert other.exit_code == 1 and "holds no bundle: `moec.json` is missing" in other.stderr
