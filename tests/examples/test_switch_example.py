"""The second example: size and shape, its tokenizer, its log, and that it is the model transformers makes of it."""

import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "switch_model"
sys.path.insert(0, str(EXAMPLES))

from example_model.decode import scores  # noqa: E402
from example_model.items import SPLITS, prompt_of, training_texts  # noqa: E402
from example_model.wording import normalise  # noqa: E402
from example_switch.checkpoint import TOKENIZER, read_model  # noqa: E402
from example_switch.decode import answers, decode_batch, pad_right  # noqa: E402
from example_switch.measure import round_experts  # noqa: E402
from example_switch.model import SwitchModel, SwitchShape, distance_buckets  # noqa: E402
from example_switch.train import (  # noqa: E402
    COUNT,
    DISTANCE_RATE,
    Pair,
    Run,
    places_of,
    rate_at,
    tensors_of,
    tokenise,
)
from safetensors import safe_open  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from transformers.models.switch_transformers import modeling_switch_transformers  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

END, PAD = 1, 2


def dialogues(count: int) -> list[dict[str, str]]:
    lines = (EXAMPLES / "data" / "samsum" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


@pytest.fixture(scope="module")
def theirs():  # type: ignore[no-untyped-def]
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    assert type(model).__name__ == "SwitchTransformersForConditionalGeneration"
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(prompt_of("samsum", item["dialogue"])).ids for item in dialogues(12)]


def test_size_and_shape() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 16_000_000
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["num_experts"]) == ("switch_transformers", 8)
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {part.get_dtype() for part in tensors.values()} == {"BF16"}
        sizes = {name: math.prod(part.get_shape()) for name, part in tensors.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert experts > sum(sizes.values()) / 2
    for name in ("encoder.block.1.layer.1", "decoder.block.3.layer.2"):
        assert f"{name}.mlp.experts.expert_7.wo.weight" in tensors


def test_tokenizer_is_that_of_the_first_example(tokenizer: Tokenizer) -> None:
    for name in TOKENIZER:
        assert (MODEL / name).read_bytes() == (EXAMPLES / "model" / name).read_bytes()
    assert (tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<pad>")) == (END, PAD)


def test_no_training_text_is_in_a_split() -> None:
    drawn = {normalise(text.prompt) for text in training_texts("samsum", COUNT)}
    assert len(drawn) == COUNT
    for split in SPLITS:
        lines = (EXAMPLES / "data" / "samsum" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        assert not drawn & {normalise(prompt_of("samsum", json.loads(line)["dialogue"])) for line in lines}


def test_logits_are_those_of_transformers(theirs, prompts: list[list[int]]) -> None:  # type: ignore[no-untyped-def]
    """Prompts of unequal length: padding of one changes nothing either."""
    ours = read_model(MODEL)
    tokens, is_real = pad_right(prompts, PAD)
    answer = torch.randint(3, 1_400, (len(prompts), 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=is_real.long(), decoder_input_ids=answer).logits
        found, _ = ours(tokens, is_real, answer, torch.arange(answer.numel()))
    assert (found.view_as(expected) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_greedy_answers_are_those_of_generate(theirs, prompts: list[list[int]]) -> None:  # type: ignore[no-untyped-def]
    tokens, is_real = pad_right(prompts, PAD)
    rows = theirs.generate(input_ids=tokens, attention_mask=is_real.long(), max_new_tokens=40).tolist()
    ends = [row.index(END) if END in row else len(row) for row in rows]
    expected = [row[1:end] for row, end in zip(rows, ends, strict=True)]
    assert decode_batch(read_model(MODEL), prompts, PAD, END) == expected


def test_save_pretrained_writes_the_same_weights(theirs, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    theirs.save_pretrained(tmp_path)
    with safe_open(MODEL / "model.safetensors", "pt") as ours, safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(ours.keys()) == set(file.keys())
        for name in ours.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name).float(), file.get_tensor(name))


def _batches(tokenizer: Tokenizer) -> list[list[Pair]]:
    pairs = tokenise(tokenizer, training_texts("samsum", 12))
    return [pairs[start : start + 4] for start in (0, 4, 8)]


def test_a_run_that_is_stopped_goes_on_exactly(tokenizer: Tokenizer, tmp_path: Path) -> None:
    batches, state, log = _batches(tokenizer), tmp_path / "state", tmp_path / "log"
    whole = Run(state, log, tmp_path)
    for batch in batches:
        whole.learn(batch)
    first = Run(state, log, tmp_path)
    for batch in batches[:2]:
        first.learn(batch)
        first.write(loss=1.0)
    first.save()
    first.learn(batches[2])
    first.write(loss=1.0)
    second = Run(state, log, tmp_path)
    assert (second.step, len(log.read_text(encoding="utf-8").splitlines())) == (2, 2)
    second.learn(batches[2])
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    rates = {group["lr"] / rate_at(2) for group in second.optimizer.param_groups}
    assert rates == {1, DISTANCE_RATE}, "biases by distance learn faster"


def test_the_decoder_reads_one_token_behind_what_it_is_to_write(tokenizer: Tokenizer) -> None:
    batch = _batches(tokenizer)[0]
    prompts, is_real, read, targets = tensors_of(batch, PAD)
    assert [row[real].tolist() for row, real in zip(prompts, is_real, strict=True)] == [pair.prompt for pair in batch]
    assert read[:, 0].eq(PAD).all() and targets.tolist() == [token for pair in batch for token in pair.answer]
    inner = [place for place in places_of(batch).tolist() if place % read.shape[1]]
    written = [token for pair in batch for token in pair.answer[:-1]]
    assert read.flatten()[inner].tolist() == written and all(pair.answer[-1] == END for pair in batch)


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_of_distances_are_those_of_transformers(both_ways: bool) -> None:
    ahead = torch.arange(300)[None, :] - torch.arange(300)[:, None]
    bucket = modeling_switch_transformers.SwitchTransformersAttention._relative_position_bucket
    expected = bucket(ahead, bidirectional=both_ways, num_buckets=32, max_distance=128)
    assert torch.equal(distance_buckets(300, 32, 128, both_ways), expected)


def test_every_expert_is_used_and_no_prompt_exceeds_a_capacity(
    theirs, prompts: list[list[int]], tokenizer: Tokenizer
) -> None:  # type: ignore[no-untyped-def]
    """Training and transformers compute the same only if no token is dropped."""
    used: dict[str, Counter[int]] = {}
    for prompt, item in zip(prompts, dialogues(len(prompts)), strict=True):
        answer = [PAD, *tokenizer.encode(" " + item["summary"]).ids]
        with torch.no_grad():
            out = theirs(
                input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([answer]), output_router_logits=True
            )
        for kind in ("encoder", "decoder"):
            for layer, logits in enumerate(getattr(out, f"{kind}_router_logits")):
                chosen = Counter(logits.argmax(-1).flatten().tolist())
                used.setdefault(f"{kind} {layer}", Counter()).update(chosen)
                assert max(chosen.values()) <= SwitchShape().capacity
    assert len(used) == 6
    for name, counts in used.items():
        assert len(counts) == 8 and max(counts.values()) <= 0.5 * counts.total(), name


def _score(model: SwitchModel, tokenizer: Tokenizer, items: list[dict[str, str]]) -> float:
    return sum(scores("samsum", answers(model, tokenizer, items), items)) / len(items)


def test_the_model_answers_and_two_bits_hurt(tokenizer: Tokenizer) -> None:
    """examples/README.md has the figures of all 4,000 items; 48 tell."""
    items = dialogues(48)
    found = {}
    for bits in (16, 8, 2):
        model = read_model(MODEL)
        if bits < 16:
            round_experts(model, bits)
        found[bits] = _score(model, tokenizer, items)
    assert min(found[16], found[8]) >= 0.95 and abs(found[16] - found[8]) <= 0.02
    assert found[16] - found[2] >= 0.03
