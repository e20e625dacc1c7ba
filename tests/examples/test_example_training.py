"""Training the example model: a run that is stopped goes on as if it had not been."""

import shutil
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from example_model.items import drills, training_texts  # noqa: E402
from example_model.train import Run, Sequence, rate_at, tensors_of, tokenise  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    shutil.copy(EXAMPLES / "model" / "tokenizer.json", tmp_path)
    return tmp_path


def batches(folder: Path) -> list[list[Sequence]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sequences = tokenise(tokenizer, training_texts("gsm8k", 12))
    return [sequences[start : start + 4] for start in (0, 4, 8)]


def test_a_run_that_is_stopped_goes_on_exactly(model_folder: Path) -> None:
    state, log = model_folder / "state", model_folder / "log"
    whole = Run(state, log, model_folder)
    for batch in batches(model_folder):
        whole.learn(batch)
    first = Run(state, log, model_folder)
    for batch in batches(model_folder)[:2]:
        first.learn(batch)
        first.write(loss=1.0)
    first.save()
    first.learn(batches(model_folder)[2])
    first.write(loss=1.0)
    second = Run(state, log, model_folder)
    assert second.step == 2
    assert len(log.read_text(encoding="utf-8").splitlines()) == 2
    second.learn(batches(model_folder)[2])
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_plain_example_starts_with_equal_channels(tmp_path: Path) -> None:
    from example_plain.train import PlainRun

    plain = PlainRun(tmp_path / "state", tmp_path / "log", tmp_path / "model").model
    first = plain.blocks[0]
    assert (first.shape.experts, first.shape.top_k) == (16, 4)
    assert torch.equal(first.experts_norm, torch.ones_like(first.experts_norm))
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (EXAMPLES / "model" / "tokenizer.json").read_bytes()


def test_loss_is_taken_on_answers_and_on_the_results_of_drills(model_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    text = training_texts("gsm8k", 1)[0]
    (sequence,) = tokenise(tokenizer, [text])
    _, _, targets = tensors_of([sequence])
    assert tokenizer.decode(targets.tolist()[:-1]) == text.answer
    assert targets[-1] == tokenizer.token_to_id("</s>")
    drill = drills(1)[0]
    (sequence,) = tokenise(tokenizer, [drill])
    _, _, targets = tensors_of([sequence])
    expected = "".join(part.split("=")[1] + "." for part in drill.answer.split(".")[:-1])
    assert tokenizer.decode(targets.tolist()) == expected


def test_the_rate_warms_up_stays_and_ends_near_nothing() -> None:
    from example_model.train import DECAY, RATE, STEPS, WARM_UP

    assert rate_at(0) == RATE / WARM_UP
    assert rate_at(WARM_UP) == rate_at(STEPS - DECAY) == RATE
    assert rate_at(STEPS - 1) == pytest.approx(RATE / DECAY)
