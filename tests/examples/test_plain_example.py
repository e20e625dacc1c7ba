"""The plain example: size, shape and digests, that it answers, and that it compiles as 4 of 16 experts."""

import hashlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from moec.compiler.pipeline import compile_checkpoint  # noqa: E402
from tests.tiny_compile import make_request  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "plain_model"
sys.path.insert(0, str(EXAMPLES))

from example_model.checkpoint import read_model  # noqa: E402
from example_model.decode import answers, scores  # noqa: E402
from example_plain.measure import routing  # noqa: E402
from safetensors import safe_open  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def problems(count: int) -> list[dict[str, str]]:
    lines = (EXAMPLES / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:count]]


def test_size_and_shape() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 16_000_000
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {part.get_dtype() for part in tensors.values()} == {"BF16"}
    assert "model.layers.5.block_sparse_moe.experts.15.w2.weight" in tensors


def test_files_have_the_digests_of_the_tree() -> None:
    lines = (EXAMPLES / "plain_model.sha256").read_text(encoding="utf-8").splitlines()
    named = {name: digest for digest, name in (line.split("  ") for line in lines)}
    found = {f"plain_model/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest() for file in MODEL.iterdir()}
    assert found == named


@pytest.mark.slow
def test_it_answers_and_its_routing_is_measured() -> None:
    model, items = read_model(MODEL), problems(48)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    found = scores("gsm8k", answers(model, tokenizer, "gsm8k", items), items)
    assert sum(found) >= 0.7 * len(items)
    measured = routing(model, tokenizer, "gsm8k", items)
    assert len(measured["weights"]) == 4 and sum(measured["weights"]) == pytest.approx(1, abs=1e-3)
    assert sum(measured["use_of_each_rank"]) == pytest.approx(16, abs=0.01)
    for entropies in (measured["entropy_of_uses"], measured["entropy_of_routers"]):
        assert len(entropies) == 6 and all(0 < value <= 1 for value in entropies)


def test_it_compiles_as_four_of_sixteen(tmp_path: Path) -> None:
    found = compile_checkpoint(make_request(MODEL, tmp_path / "out", "uniform", 4, plan_only=True))
    assert [(layer.experts.count, layer.experts.top_k) for layer in found.plan.model.layers] == 6 * [(16, 4)]
