"""Tasks that are TOML files: what they read and score, and files that are no tasks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moec.evaluation.data import items_sha256, load_items
from moec.evaluation.run import compare, evaluate
from moec.evaluation.tasks import TASKS, find_task, task_name
from moec.evaluation.tasks.task_files import KEYS
from moec.manifests.errors import DataError, InputError, MissingDependency, OptionError

SUMS = """
prompt = "{context}\\nQ: {question}\\nA:"
answer = "result"
filter = "sum is (\\\\d+)"
stop = ["\\n"]
max_new_tokens = 12
document = "context"
"""
ROWS = [{"context": f"c{i}", "question": f"{i} + 1?", "result": f"The sum is {i + 1}."} for i in range(4)]


def save(folder: Path, text: str, name: str = "sums.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_task_has_prompt_answer_filter_and_stop_texts(tmp_path: Path, write, table_engine) -> None:
    task = find_task(save(tmp_path, SUMS))
    items, shots = load_items(write("a.jsonl", ROWS), task, shots=0)
    assert (task.name, task.fields, task.document_field) == ("sums", ("context", "question", "result"), "context")
    assert task.prompt(items.items[1], [items.items[0]]) == "c0\nQ: 0 + 1?\nA: The sum is 1.\n\nc1\nQ: 1 + 1?\nA:"
    answers = ["so the sum is 1\nQ:", "2", "sum is 4", "The sum is 4. sum is 5"]
    engine = table_engine({task.prompt(item): text for item, text in zip(items.items, answers, strict=True)})
    result = evaluate(task, items.items, engine, shots=shots)
    assert [item.score for item in result.items] == [1, 0, 0, 1]
    assert {(request.max_new_tokens, request.stop) for request in engine.requests} == {(12, ("\n",))}


def test_a_task_of_listed_answers(tmp_path: Path, write, table_engine) -> None:
    name = save(tmp_path, 'prompt = "{q}"\nchoices = "options"\nanswer = "right"\n', "pick.toml")
    rows = [
        {"q": "a?", "options": ["x", "yy"], "right": 1},
        {"q": "b?", "options": ["x", "z"], "right": "A"},
        {"q": "c?", "options": ["x", "z"], "right": "z"},
    ]
    task = find_task(name)
    items, _ = load_items(write("a.jsonl", rows), task)
    assert [task.given_answers(item) for item in items.items] == [
        ([("a?", " x"), ("a?", " yy")], 1),
        ([("b?", " x"), ("b?", " z")], 0),
        ([("c?", " x"), ("c?", " z")], 1),
    ]
    engine = table_engine(nll={" x": (1.0, 1), " yy": (1.5, 1), " z": (0.5, 1)})
    result = evaluate(task, items.items, engine)
    assert (result.metric, result.value, result.other_metrics) == ("accuracy", 1 / 3, {"accuracy_by_length": 2 / 3})


def test_the_perplexity_of_an_answer(table_engine) -> None:
    task = find_task("humaneval")
    item = {"prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    engine = table_engine(nll={"    return 1\n": (6.0, 3)})
    result = evaluate(task, [item], engine)
    assert engine.pairs == [("def f():\n", "    return 1\n")]
    assert (result.metric, result.value) == ("perplexity", pytest.approx(7.389, abs=1e-3))
    assert compare(task, result, result).loss == 0


def test_the_content_of_a_file_is_part_of_the_identity(tmp_path: Path) -> None:
    one, other = (find_task(save(tmp_path, text)) for text in (SUMS, SUMS.replace("12", "13")))
    assert items_sha256(one, ROWS) != items_sha256(other, ROWS)
    assert one.settings.keys() == {"task_file_sha256"} and all(not task.settings for task in TASKS.values())
    assert (task_name(save(tmp_path, SUMS)), task_name("gsm8k")) == ("sums", "gsm8k")
    (tmp_path / "link.toml").symlink_to("sums.toml")  # as in the cache of a hub
    assert find_task(str(tmp_path / "link.toml")).settings == find_task(str(tmp_path / "sums.toml")).settings


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('prompt = "{q}"\nanswer = "a"\nmetrc = "x"', InputError, "unknown key `metrc`"),
        ('prompt = "no field"\nanswer = "a"', InputError, "`prompt` must be a text with a field"),
        ('answer = "a"', InputError, "`prompt` must be"),
        ('prompt = "{q} A: "\nanswer = "a"', InputError, "`prompt` ends with a space"),
        ('prompt = "{q}"\nanswer = 1', InputError, "`answer` must be text, found 1"),
        ('prompt = "{q}"\nanswer = "a"\nstop = "x"', InputError, "`stop` must be a list of texts"),
        ('prompt = "{q}"\nanswer = "a"\nstop = [1]', InputError, "`stop` must be a list of texts"),
        ('prompt = "{q}"\nanswer = "a"\nmax_new_tokens = true', InputError, "a whole number"),
        ('prompt = "{q}"\nanswer = "a"\nmax_new_tokens = 0', InputError, "1 to 65536"),
        ('prompt = "{q}"\nanswer = "a"\nfilter = "("', InputError, "no regular expression"),
        ('prompt = "{q}"\nanswer = "a"\nfilter = "(a)(b)"', InputError, "at most one group"),
        ('prompt = "{q}"\nanswer = "a"\ncompare = "words"', InputError, "text or number"),
        ('prompt = "{q}"\nanswer = "a"\ndocument = "d"', InputError, "a field of the prompt"),
        ('prompt = "{q}"\nmetric = "exact_match"', InputError, "the key `answer` is missing"),
        ('prompt = "{q}"\nmetric = "perplexity"\nstop = ["x"]', InputError, "`stop` has no effect with perplexity"),
        ('prompt = "{q}"\nchoices = "c"\nanswer = "a"\nmetric = "rouge2"', InputError, "accuracy_by_length"),
        ('prompt = "{q}"\nchoices = "c"', InputError, "the key `answer` is missing"),
        ('prompt = "{q}"\nanswer = "a"\nmetric = "bleu"', OptionError, "--trust-metric-code"),
        ('prompt = "{q}"\nanswer = "a"\nfilter = "' + "(" * 5000 + '"', InputError, "no regular expression"),
        ('prompt = "{q}"\nanswer = "a"\nfilter = "(?=x)"', InputError, "RE2 has neither lookaround"),
        ('prompt = "{q}"\nanswer = "a"\nfilter = "(x)\\\\1"', InputError, "no regular expression that RE2 takes"),
        ('prompt = "{q}"\nanswer = "a"\nfilter = "\\\\U99999999"', InputError, "no regular expression"),
        ('prompt = "{q}"\nanswer = "a"\nfilter = "(?:a{999}){999}"', InputError, "no regular expression"),
        ('prompt = "{q}"\nanswer = "a"\nmax_new_tokens = ' + "9" * 5000, InputError, "more than 1024 characters"),
        ('prompt = "{q}"\nanswer = "a"\nmax_new_tokens = 0x' + "f" * 1000, InputError, "1 to 65536"),
        ('prompt = "{q}"\nanswer = "a"\nmax_new_tokens = nan', InputError, "a whole number"),
        ("a" + ".a" * 20000 + " = 1", InputError, "nested more than 8 deep"),
        ("prompt = ", InputError, "is not TOML"),
        ("a = " + "[" * 5000, InputError, "is not TOML"),
        ("#" * 70000, InputError, "more than the limit"),
    ],
)
def test_files_that_are_no_tasks(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error) as caught:
        find_task(save(tmp_path, text))
    assert message in str(caught.value)


@pytest.mark.gate("G10")
@pytest.mark.parametrize(
    ("pattern", "text", "answer"),
    [
        ("(?:[\\\\s\\\\S]+)+\\\\x01", "a" * 2000, ""),
        ("(a+)+$", "a" * 2000 + "b", ""),
        ("(?:a|a)*c", "a" * 2000, ""),
        ("(?i)answer: (\\\\w+)", "é The ANSWER: é2 ANSWER: x3", "x3"),
        ("a{4294967296}", "a", ""),
    ],
)
def test_a_filter_takes_no_longer_than_its_text(pattern: str, text: str, answer: str, tmp_path: Path) -> None:
    """Python's own expressions would take years for the first three."""
    task = find_task(save(tmp_path, f'prompt = "{{q}}"\nanswer = "a"\nfilter = "{pattern}"'))
    assert task.answer_text is not None and task.answer_text.prediction(text) == answer


def test_a_filter_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(MissingDependency, match=r"`filter` of a task file needs the package `re2`"):
        find_task(save(tmp_path, SUMS))


def test_names_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.toml"):
        find_task(str(tmp_path / "none.toml"))
    with pytest.raises(InputError, match="the file's name is the name of the task"):
        find_task(save(tmp_path, SUMS, "two words.toml"))
    with pytest.raises(OptionError, match=r"`sums` is not known .*NAME\.toml"):
        find_task("sums")


def test_rows_that_do_not_fit_a_task(tmp_path: Path, write) -> None:
    task = find_task(save(tmp_path, SUMS))
    with pytest.raises(DataError, match=r"a\.jsonl:1`: the field `result` of task `sums` is missing"):
        load_items(write("a.jsonl", [{"context": "c", "question": "q"}]), task)
    number = find_task(save(tmp_path, 'prompt = "{q}"\nanswer = "a"\ncompare = "number"', "number.toml"))
    with pytest.raises(DataError, match="holds no number"):
        load_items(write("b.jsonl", [{"q": "q", "a": "none"}]), number)


VALUES = st.sampled_from(
    ['"{q}"', '"a"', '"rouge2"', '"perplexity"', '"accuracy"', '"("', "1", "0", "-5", "true", "[]"]
)
LINES = st.tuples(st.sampled_from([*KEYS, "name", "a.b"]), VALUES | st.just('["x"]')).map(" = ".join)


@given(st.binary(max_size=60) | st.lists(LINES, max_size=6).map(lambda lines: "\n".join(lines).encode()))
def test_any_file_is_a_task_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.toml"
    path.write_bytes(content)
    try:
        task = find_task(str(path))
    except (InputError, OptionError) as error:
        assert error.hint
    else:
        assert task.name == "any" and task.metrics and task.input_fields
