"""`moec report`: the page next to a bundle, with and without a trace, and refusals that write nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moec.profiles.device import DeviceProfile
from moec.profiles.loading import load_profile
from tests.tiny_compile import contents

from .conftest import Invoke

TEXT = "one byte of this text is one token, so it is long enough for a few dozen of them"


@pytest.fixture
def trace(invoke: Invoke, mixed_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record a trace of 20 tokens, with the rates of a shipped profile in place of a probe, which takes seconds."""
    profile: DeviceProfile = load_profile("laptop")
    monkeypatch.setattr("moec.profiles.probe.probe_host", lambda storage, request_bytes: profile)
    monkeypatch.setattr("moec.runtime.memory.bandwidth.read_bytes_per_s", lambda size, threads: 8_000_000_000)
    text, path = tmp_path / "text.txt", tmp_path / "run.trace"
    text.write_text(TEXT)
    arguments = ("bench", mixed_bundle, "--text", text, "--prompt-tokens", 7, "--tokens", 20, "--expert-cache", "40%")
    assert invoke(*arguments, "--trace-out", path).exit_code == 0
    return path


def test_the_page_lies_next_to_the_bundle(invoke: Invoke, own_bundle: Path) -> None:
    before = contents(own_bundle)
    result = invoke("report", own_bundle)
    page = own_bundle.with_name("own-moec.report.html")
    assert result.exit_code == 0 and result.stdout == "" and str(page) in result.stderr
    assert "The quality was not measured" in page.read_text() and contents(own_bundle) == before
    assert invoke("report", own_bundle, "-o", "-").stdout == page.read_text()


def test_a_trace_adds_caches_and_one_token(invoke: Invoke, mixed_bundle: Path, trace: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    arguments = ("report", mixed_bundle, "--trace", trace, "--profile", "raspberry-pi-4b-sd", "-o", target)
    assert invoke(*arguments, "--expert-cache", "40%").exit_code == 0
    page = target.read_text()
    same = ("--trace", trace, "--profile", "raspberry-pi-4b-sd", "--expert-cache", "50%", "--json")
    told = json.loads(invoke("simulate", mixed_bundle, *same).stdout)
    for row in told["rows"]:
        assert f"{row['policy']}, 50%: {100 * row['hits'] / row['lookups']:.1f} %" in page
    assert "raspberry-pi-4b-sd, with a cache of 40%" in page
    total = re.search(r"experts: ([0-9.]+) ms, of it ([0-9]+)% waiting", page)
    assert total is not None and float(total[1]) > 0 and 0 < int(total[2]) < 100


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--profile", "laptop"), "`--profile` has no effect without a trace"),
        (("--expert-cache", "10%"), "`--expert-cache` has no effect without a trace"),
        (("--curve", "{text}"), "expected the JSON of a sweep"),
        (("--curve", "{text}.missing"), "text.txt.missing` is missing"),
        (("--curve", "/dev/zero"), "`/dev/zero` is a device"),
        (("--trace", "{text}"), "text.txt"),
    ],
)
def test_a_refusal_writes_nothing(
    invoke: Invoke, own_bundle: Path, tmp_path: Path, more: tuple[str, ...], told: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    given = [word.format(text=tmp_path / "text.txt") for word in more]
    before = sorted(tmp_path.iterdir())
    result = invoke("report", own_bundle, *given)
    assert result.exit_code == 1 and told in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_damaged_certificate_is_told_in_one_sentence(invoke: Invoke, own_bundle: Path) -> None:
    (own_bundle / "moec.json").write_text("{}")
    result = invoke("report", own_bundle)
    assert result.exit_code == 3 and not own_bundle.with_name("own-moec.report.html").exists()
