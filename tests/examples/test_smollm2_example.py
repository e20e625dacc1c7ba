"""The example of natural weights, on a tiny network: text, division into experts, checkpoints, and training."""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from example_smollm2.checkpoint import dense_network, read_network, write_network  # noqa: E402
from example_smollm2.distil import ROWS, Distillation  # noqa: E402
from example_smollm2.measure import kept  # noqa: E402
from example_smollm2.network import Network, Shape  # noqa: E402
from example_smollm2.prose import SPLITS, Document, paragraphs_of, read_documents, split_of, write_lines  # noqa: E402
from example_smollm2.sources import SOURCES  # noqa: E402
from example_smollm2.splitting import balanced_groups, with_experts  # noqa: E402
from example_smollm2.tasks import make_tasks  # noqa: E402

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, WIDTH, HEADS, KV_HEADS, VOCABULARY = 2, 32, 96, 4, 2, 64
TOKENS = torch.randint(0, VOCABULARY, (ROWS, 24), generator=torch.Generator().manual_seed(3))
SENTENCE = "The sea was calm and the small boat went slowly along the coast towards the old harbour that day"


@dataclass(frozen=True)
class TinyGguf:
    """What `checkpoint.py` reads of a GGUF file, with random weights."""

    layers: int = LAYERS
    hidden: int = HIDDEN
    width: int = WIDTH
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    vocabulary: int = VOCABULARY
    context: int = 64
    theta: float = 10000.0
    epsilon: float = 1e-5
    end_token: int = 0
    chat_template: str = "{{ messages }}"

    def tensors(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        found = {"model.embed_tokens.weight": drawn(VOCABULARY, HIDDEN), "model.norm.weight": 1 + drawn(HIDDEN)}
        key_values = KV_HEADS * HIDDEN // HEADS
        for at in range(LAYERS):
            shapes = {
                "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (key_values, HIDDEN),
                "self_attn.v_proj": (key_values, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
                "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH),
            }  # fmt: skip
            for name, shape in shapes.items():
                values = drawn(*shape)
                found[f"model.layers.{at}.{name}.weight"] = 1 + values if len(shape) == 1 else values
        return found

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(models.BPE({str(at): at for at in range(VOCABULARY)}, []))


@pytest.fixture(scope="module")
def dense() -> Network:
    return dense_network(TinyGguf())


@pytest.fixture(scope="module")
def student(dense: Network) -> Network:
    return with_experts(dense, TOKENS, shared=32, experts=4, top_k=2, loss=0.3)


def logits(network: Network, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    with torch.inference_mode():
        return network.logits(network(tokens))


def test_folding_gains_and_balancing_norms_changes_no_logit(dense: Network) -> None:
    """A network with the file's own weights computes the same."""
    own, tensors = Network(dense.shape).requires_grad_(False), TinyGguf().tensors()
    own.embedding.data, own.norm.data = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
    names = {
        "input_norm": "input_layernorm", "norm": "post_attention_layernorm", "query": "self_attn.q_proj",
        "key": "self_attn.k_proj", "value": "self_attn.v_proj", "output": "self_attn.o_proj",
    }  # fmt: skip
    for at, layer in enumerate(own.layers):
        for name, disk in names.items():
            getattr(layer, name).data = tensors[f"model.layers.{at}.{disk}.weight"]
        for name in ("gate", "up", "down"):
            getattr(layer.feed_forward, name).data = tensors[f"model.layers.{at}.mlp.{name}_proj.weight"]
    assert torch.allclose(logits(dense), logits(own), atol=1e-5)
    assert not torch.allclose(dense.layers[0].value, own.layers[0].value)


def test_all_experts_together_are_the_dense_network(dense: Network) -> None:
    divided = with_experts(dense, TOKENS, shared=32, experts=4, top_k=4, loss=0.0)
    assert torch.allclose(logits(divided), logits(dense), atol=2e-3)


@pytest.mark.parametrize("which", ["dense", "student"])
def test_a_checkpoint_is_read_by_transformers_and_by_the_example(
    which: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    network = request.getfixturevalue(which)
    write_network(tmp_path / "model", network, TinyGguf())
    own = read_network(tmp_path / "model")
    assert own.shape == network.shape
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.inference_mode():
        expected = model(TOKENS).logits
    assert torch.allclose(logits(own), expected, atol=1e-4)
    difference = (logits(own) - logits(network)).abs().amax(-1)
    assert difference.median() < 0.05, "rounded to bfloat16, which may change the choice of experts of a few tokens"


def test_groups_have_equal_sizes_and_hold_what_is_alike() -> None:
    generator = torch.Generator().manual_seed(5)
    centres = torch.nn.functional.normalize(torch.randn(4, 20, generator=generator), dim=1)
    kinds = torch.arange(4).repeat(8)
    rows = torch.nn.functional.normalize(centres[kinds] + 0.02 * torch.randn(32, 20, generator=generator), dim=1)
    groups = balanced_groups(rows, 4)
    assert torch.bincount(groups).tolist() == [8, 8, 8, 8]
    assert all(len(set(groups[kinds == kind].tolist())) == 1 for kind in range(4))


def test_training_approaches_the_dense_network_and_continues(dense: Network, tmp_path: Path) -> None:
    def run(name: str, seconds: float) -> Distillation:
        network = with_experts(dense, TOKENS, shared=32, experts=4, top_k=2, loss=0.3)
        return Distillation(dense, network, tmp_path / f"{name}.state", tmp_path / f"{name}.log", seconds)

    trained = run("one", 1e9)
    losses = [trained.learn(TOKENS) for trained.step in range(60)]
    assert losses[-1] < 0.5 * losses[0]
    trained.save()
    again = run("one", 1e9)
    assert again.step == trained.step
    assert all(
        torch.equal(one, other)
        for one, other in zip(trained.student.state_dict().values(), again.student.state_dict().values(), strict=True)
    )


def test_a_pause_of_the_training_takes_none_of_its_time(
    dense: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Over(Exception):
        pass

    network = with_experts(dense, TOKENS, shared=32, experts=4, top_k=2, loss=0.3)
    run = Distillation(dense, network, tmp_path / "state", tmp_path / "log", 1e9)

    def pause(tokens: torch.Tensor) -> float:
        if run.step == 3:
            raise Over
        time.sleep(0.5)
        return 0.0

    monkeypatch.setattr(run, "learn", pause)
    with pytest.raises(Over):
        run.run(TOKENS, TOKENS)
    assert run.step == 3 and run.seconds < 0.75, "three pauses of half a second"


def test_paragraphs_are_running_text() -> None:
    html = f"<p>{SENTENCE}.</p><pre>{SENTENCE}</pre><p>too short</p><p>{'= 1; ' * 20}</p><div>{SENTENCE} again.</div>"
    assert paragraphs_of(html) == [f"{SENTENCE}.", f"{SENTENCE} again."]


def test_splits_are_disjoint_and_depend_on_the_page_alone(tmp_path: Path) -> None:
    pages = {}
    for source in SOURCES:
        paths = []
        for at in range(30):
            path = tmp_path / f"{source.package}-{at}.html"
            path.write_text(f"<p>{SENTENCE} number {at % 28} of {source.package}.</p><p>{SENTENCE}.</p>")
            paths.append(path)
        pages[source] = paths
    splits = read_documents(pages)
    texts = [text for documents in splits.values() for document in documents for text in document.paragraphs]
    assert len(texts) == len(set(texts)) == 28 * len(SOURCES) + 1, "each text once, in one split"
    for source in SOURCES:
        assert {split_of(source, path.name) == "unseen" for path in pages[source]} == {source.is_unseen}
    found = {split_of(source, path.name) for source in SOURCES for path in pages[source]}
    assert found == set(SPLITS)


def test_tasks_are_built_from_the_text_of_their_split(tmp_path: Path) -> None:
    for split in SPLITS:
        rows: list[dict[str, object]] = []
        for at in range(40):
            first = f"{SENTENCE} in the year {at} of the {split} kind and nobody saw it. Then {SENTENCE} {split} {at}."
            document = Document("source", f"{at}.html", [first, *(f"{SENTENCE} {split} {at} {n}." for n in range(20))])
            rows.append({"source": document.source, "page": document.page, "paragraphs": document.paragraphs})
        write_lines(tmp_path / "texts" / f"{split}.jsonl", rows)
    counts = make_tasks(tmp_path / "texts", tmp_path / "data")
    from moec.evaluation.data import load_items

    for split in SPLITS:
        for task, name in (("prose", "perplexity"), ("next_sentence", "hellaswag"), ("continuation", "xsum")):
            items, _ = load_items(tmp_path / "data" / task / f"{split}.jsonl", name)
            assert len(items.items) == counts[task][split] >= 40
            assert all(split in " ".join(item.values()) for item in items.items)


def test_the_shape_of_experts_divides_the_width() -> None:
    shape = Shape(2, 32, 96, 4, 2, 64, 64, 1e4, 1e-5, shared=32, experts=4, top_k=2)
    assert shape.expert_width == 16 and replace(shape, experts=0, shared=96).expert_width == 0


def test_a_result_is_measured_once_and_a_failed_measurement_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    def fails() -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept(path, fails)
    assert not path.exists()
    assert kept(path, lambda: {"perplexity": 41.25}) == kept(path, fails) == {"perplexity": 41.25}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
