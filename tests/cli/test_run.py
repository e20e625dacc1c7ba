"""`moec run`: text on stdout, mode and statistics on stderr, and refusals in one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from tests.listed_file import add_listed

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
    assert lines[0].startswith("mode: streaming, exact; expert cache")
    names = ("first token (TTFT)", "per token (TPOT)", "expert cache", "read per token", "stall", "prefetch", "peak")
    for name in names:
        assert any(line.startswith(name) for line in lines[1:]), name
    assert "rereads" in result.stderr and "recall" in result.stderr and "tokens/s" in result.stderr


def test_json_is_one_object_with_all_counts(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 6, "--expert-cache", "40%", "--json")
    assert result.stdout.count("\n") == 1
    values = json.loads(result.stdout)
    assert set(values) == {"text", "token_ids", "finish_reason", "mode", "code_path", "memory", "statistics"}
    statistics = values["statistics"]
    assert statistics["prompt_tokens"] == len(PROMPT) and statistics["tokens"] == len(values["token_ids"])
    assert statistics["lookups"] == statistics["misses"] + round(statistics["hit_rate"] * statistics["lookups"])
    assert statistics["bytes_read"] > 0 and statistics["peak_memory_bytes"] > 1 << 20
    assert 0 <= statistics["prefetch_recall"] <= 1 and 0 <= statistics["prefetch_precision"] <= 1
    assert values["memory"]["budget_bytes"] is None, "a size of the cache alone is no budget"


def test_the_plan_of_a_budget_adds_up(invoke: Invoke, bundle: Path) -> None:
    asked = ("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 2, "--json")
    plan = json.loads(invoke(*asked, "--memory", "64GiB", "--expert-cache", "40%").stdout)["memory"]
    assert plan["budget_bytes"] == 64 << 30
    budget = plan["floor_bytes"] + (256 << 20)  # this process may have grown until the next plan
    plan = json.loads(invoke(*asked, "--memory", budget).stdout)["memory"]
    others = {"budget_bytes", "floor_bytes", "minimum_expert_bytes", "cache_bytes", "logical_cache_bytes"}
    parts = {name: size for name, size in plan.items() if name.endswith("_bytes") and name not in others}
    fixed, experts = sum(parts.values()), open_bundle(bundle).manifest.cost.expert_padded_bytes
    assert all(parts[name] > 0 for name in ("process_bytes", "dense_bytes", "kv_bytes", "scratch_bytes"))
    assert plan["budget_bytes"] == budget and plan["floor_bytes"] == fixed + plan["minimum_expert_bytes"] <= budget
    assert plan["cache_bytes"] == min(budget - fixed, experts) >= plan["minimum_expert_bytes"]


def test_a_stop_text_ends_the_answer_and_is_not_shown(invoke: Invoke, bundle: Path) -> None:
    whole = text_of(invoke, bundle)
    stop = whole[4:6]
    result = invoke(
        "run", bundle, "--prompt", PROMPT, "--max-new-tokens", 12, "--json", "--stop", stop, "--stop", "#" * 9
    )
    values = json.loads(result.stdout)
    assert values["text"] == whole[: whole.index(stop)] and values["finish_reason"] == "stop"


def test_beams_come_best_first(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 6, "--beams", 3, "--json")
    beams = json.loads(result.stdout)["beams"]
    assert len(beams) == 3 and [b["score"] for b in beams] == sorted((b["score"] for b in beams), reverse=True)
    shown = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 6, "--beams", 3)
    assert shown.stdout == beams[0]["text"] + "\n" and "beam 3:" in shown.stderr


def test_a_chat_goes_through_the_template(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    add_listed(copy, "chat_template.jinja", b"{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}!")
    said = invoke("run", copy, "--prompt", "hi", "--chat", "--system", "be brief", "--max-new-tokens", 6, "--json")
    plain = invoke("run", bundle, "--prompt", "[system] be brief[user] hi!", "--max-new-tokens", 6, "--json")
    assert json.loads(said.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    refused = invoke("run", bundle, "--prompt", "hi", "--chat")
    assert refused.exit_code == 1 and "has no chat template" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--system", "x"), "`--system` has no effect without `--chat`"),
        (("--length-penalty", 2), "`--length-penalty` has no effect with one beam"),
        (("--beams", 2, "--temperature", 1), "`--beams` finds the most probable answer"),
        (("--beams", 2, "--stop", "x"), "`--beams` finds the most probable answer"),
        (("--beams", 99), "beams must be 1 to 64"),
        (("--min-p", 0.1), "no effect at temperature 0"),
    ],
)
def test_what_does_not_go_together(invoke: Invoke, bundle: Path, options: tuple[object, ...], message: str) -> None:
    result = invoke("run", bundle, "--prompt", PROMPT, *options)
    assert result.exit_code == 1 and message in result.stderr and result.stdout == ""


def test_prompt_from_stdin(invoke: Invoke, bundle: Path) -> None:
    given = invoke("run", bundle, "--prompt", PROMPT, "--max-new-tokens", 6)
    piped = invoke("run", bundle, "--prompt", "-", "--max-new-tokens", 6, stdin=PROMPT + "\n")
    assert piped.exit_code == 0 and piped.stdout == given.stdout


def test_forced_kernels_are_reported(invoke: Invoke, bundle: Path) -> None:
    result = invoke("run", bundle, "--prompt", "x", "--max-new-tokens", 2, "--set", "kernels=numpy")
    assert result.exit_code == 0 and "kernels numpy" in result.stderr.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "code", "sentence", "hint"),
    [
        (("--top-k", 5), 1, "have no effect at temperature 0", "`--temperature`"),
        (("--accelerator", "cuda:999"), 1, "`--accelerator cuda:999`: torch", "leave it out"),
        (("--temperature", 1, "--repetition-penalty", 1e-40), 1, "must be 0.01 to 100, found 1e-40", "try 1.1"),
        (("--set", "kernels=mmx"), 1, "no kernels `mmx` here", ""),
    ],
)
def test_bad_options(
    invoke: Invoke, bundle: Path, options: tuple[object, ...], code: int, sentence: str, hint: str
) -> None:
    result = invoke("run", bundle, "--prompt", PROMPT, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert sentence in result.stderr and hint in result.stderr and "Traceback" not in result.stderr


def test_what_is_no_bundle_is_refused(invoke: Invoke, checkpoint: Path, tmp_path: Path) -> None:
    missing = invoke("run", tmp_path / "nowhere", "--prompt", "x")
    assert missing.exit_code == 1 and "does not exist, expected a bundle folder" in missing.stderr
    (tmp_path / "file.moec").write_bytes(b"x")
    packed = invoke("run", tmp_path / "file.moec", "--prompt", "x")
    assert packed.exit_code == 1 and "moec unpack" in packed.stderr
    other = invoke("run", checkpoint, "--prompt", "x")
    assert other.exit_code == 1 and "holds no bundle: `moec.json` is missing" in other.stderr
    assert "or DIR/current of `moec pull`" in missing.stderr and "or DIR/current of `moec pull`" in other.stderr


def test_the_folder_of_a_device_is_refused_with_its_bundle(invoke: Invoke, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(bundle)
    refused = invoke("run", tmp_path, "--prompt", "x")
    assert refused.exit_code == 1 and f"hint: name the bundle: {tmp_path / 'current'}\n" in refused.stderr


@pytest.mark.parametrize("command", ["run", "generate", "eval"])
def test_help_tells_what_a_context_changes_in_longrope_models(invoke: Invoke, command: str) -> None:
    text = " ".join(invoke(command, "--help").stdout.split())
    assert "--context N Longest sequence. A longrope model takes its long form throughout" in text


@pytest.mark.parametrize("command", ["run", "serve"])
def test_help_explains_what_a_newcomer_does_not_know(invoke: Invoke, command: str) -> None:
    text = " ".join((invoke(command, "--help-all").stdout + invoke("settings").stdout).split())
    assert (
        "Lossy modes: A lossy mode changes the answers" in text and "A missed expert is one that a token needs" in text
    )
    for name in ("lru", "lfu", "lrfu", "edgemoe", "hobbit", "lookahead", "path", "popularity", "direct", "buffered"):
        assert f"`{name}`" in text


def test_help_shows_first_what_people_use_first(invoke: Invoke) -> None:
    text = invoke("run", "--help-all").stdout
    first, _, rest = text.partition("Generation:")
    options = re.findall(r"^  (?:-h, )?--([a-z-]+)", first, re.M)
    assert {"prompt", "max-new-tokens", "memory", "expert-cache", "context", "json"} <= set(options)
    assert len(options) <= 15
    sections = re.findall(r"^([A-Z][a-z ]+):", rest, re.M)
    assert sections == ["Memory and cache", "Machine", "Lossy modes", "Accelerator"]


EXAMPLE = Path(__file__).parents[2] / "examples" / "bundle"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--set", "prefetch=path"), "`prefetch=path` begins"),
        (
            ("--set", "prefetch=popularity", "--set", "policy=edgemoe"),
            "`prefetch=popularity` and `policy=edgemoe` begins",
        ),
        ((), ""),
    ],
)
def test_options_without_statistics(options: tuple[str, ...], named: str, invoke: Invoke, bundle: Path) -> None:
    arguments = ("--prompt", "a", "--max-new-tokens", 1, "--expert-cache", "50%", *options)
    said = invoke("run", bundle, *arguments)
    assert said.exit_code == 0, said.stderr
    assert ("compiled without data and has no statistics" in said.stderr) == bool(named) and named in said.stderr
    with_statistics = invoke("run", EXAMPLE, *arguments)
    assert "has no statistics" not in with_statistics.stderr
