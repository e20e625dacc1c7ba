"""`moec compile` checks target, data, tasks and devices before it imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LINES = {
    "an ambiguous target": (["--loss", "2"], "`--loss 2` is ambiguous"),
    "no target": ([], "target"),
    "a target without data": (["--loss", "2%"], "is measured on text, and none was given"),
    "data that do not exist": (["--loss", "2%", "--data", "none.csv"], "`none.csv` does not exist"),
    "a misspelt task": (["--loss", "2%", "--data", ".", "--task", "gsm9"], "task `gsm9` is not known"),
    "a missing task file": (["--kl", "0.1", "--data", ".", "--task", "none.toml"], "`none.toml` is missing"),
    "a task file with a fault": (["--kl", "0.1", "--data", ".", "--task", "words.toml"], "unknown key `promt`"),
    "an unknown device": (["--uniform", "4", "--device", "laptop,toaster"], "no device profile is called `toaster`"),
    "a sweep of nothing": (["--sweep", "x"], "--sweep"),
}
PROGRAM = """
import contextlib, io, json, sys
from moec.cli.main import cli
ends = []
for line in json.load(sys.stdin):
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            cli.main(["compile", "model", *line], prog_name="moec")
        except SystemExit as end:
            code = end.code
    heavy = {"torch", "transformers", "datasets", "pyarrow"}
    ends.append([code, error.getvalue(), sorted(heavy & {name.partition(".")[0] for name in sys.modules})])
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    """Exit code and message of each line, and the heavy packages that were loaded so far."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "words.toml").write_text('promt = "{q}"\n')
    lines = json.dumps([words for words, _ in LINES.values()])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=lines, capture_output=True, text=True, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(LINES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", LINES)
def test_a_wrong_option_is_told_before_the_import_of_torch(
    name: str, ends: dict[str, tuple[int, str, list[str]]]
) -> None:
    code, message, loaded = ends[name]
    assert (code, loaded) == (1, []) and LINES[name][1] in message, message


def test_fields_of_no_known_task_show_a_task_file(tmp_path: Path) -> None:
    """The lines that the message shows are a task of these items."""
    from moec.evaluation.data import load_items
    from moec.manifests.errors import DataError

    path = tmp_path / "tickets.csv"
    path.write_text("id,body,label\n1,It is broken.,bug\n2,Thanks!,praise\n")
    with pytest.raises(DataError) as caught:
        load_items(path)
    assert "--task NAME.toml" in str(caught.value.hint)
    lines = [line.removeprefix("- ") for line in caught.value.message.splitlines() if line.startswith("- ")]
    assert lines == ['prompt = "{body}\\nAnswer:"', 'answer = "label"', 'stop = ["\\n"]', "max_new_tokens = 32"]
    (tmp_path / "tickets.toml").write_text("\n".join(lines))
    items, _ = load_items(path, str(tmp_path / "tickets.toml"))
    assert [items.task.reference(item) for item in items.items] == ["bug", "praise"]


@pytest.mark.parametrize("row", [{"a": "x", "b\n- c": "y"}, {"body": "x"}, {"two words": "x", "ä": "y"}])
def test_the_shown_task_file_is_one_for_any_fields(row: dict[str, str], tmp_path: Path) -> None:
    from moec.evaluation.data import load_items
    from moec.manifests.errors import DataError

    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError) as caught:
        load_items(path)
    lines = [line.removeprefix("- ") for line in caught.value.message.splitlines() if line.startswith("- ")]
    (tmp_path / "own.toml").write_text("\n".join(lines))
    assert len(load_items(path, str(tmp_path / "own.toml"))[0]) == 1
