"""Lines of JSON that every reader takes, whatever a model or a harness has said."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from moec.cli.commands.measuring.lm_eval import write_results
from moec.cli.options.paths import sound_json, write_json_lines

HALF = "\ud83d"
ROWS = {
    "sound": ({"é\u2028": 1.5, "deep": [[None, True]]}, {"é\u2028": 1.5, "deep": [[None, True]]}),
    "numbers": ({"a": math.nan, "b": [math.inf, (-math.inf, 2)]}, {"a": None, "b": [None, [None, 2]]}),
    "half a pair": ({"a": f"x{HALF}y", HALF: [HALF]}, {"a": "x\ufffdy", "\ufffd": ["\ufffd"]}),
    "a pair in halves": ({"a": "\ud83d\ude00"}, {"a": "😀"}),
    "both": ({"a": {"b": [{"c": math.nan, "d": HALF}]}}, {"a": {"b": [{"c": None, "d": "\ufffd"}]}}),
    "a name that is no text": ({math.nan: 1, 2: 3}, {"nan": 1, "2": 3}),
}  # fmt: skip


def strict(line: str) -> object:
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("name", ROWS)
def test_a_line_is_sound(name: str, tmp_path: Path) -> None:
    row, expected = ROWS[name]
    write_json_lines(tmp_path / "rows", [row, {}])
    lines = (tmp_path / "rows").read_text(encoding="utf-8").split("\n")
    assert [strict(line) for line in lines[:-1]] == [expected, {}] and lines[-1] == ""
    assert "\\ud83d" not in lines[0]
    assert strict(sound_json(row, indent=1).decode()) == expected


def test_results_and_items_of_a_harness_are_sound(tmp_path: Path) -> None:
    found = {"results": {"t": {"acc": math.nan}}, "samples": {"t": [{"doc_id": 0, "resps": [[HALF, -math.inf]]}]}}
    write_results(found, tmp_path / "out", tmp_path / "items")
    assert strict((tmp_path / "out").read_text(encoding="utf-8")) == {"results": {"t": {"acc": None}}}
    (line,) = (tmp_path / "items").read_text(encoding="utf-8").splitlines()
    assert "\\ud83d" not in line and strict(line)
