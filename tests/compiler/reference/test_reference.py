"""The reference model compared with transformers: text, logits, weights, and checkpoints that it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moec.compiler.reference import decode as reference_decode
from moec.compiler.reference.decode import Continuation, GreedyDecoder
from moec.compiler.reference.model import ReferenceModel
from moec.compiler.reference.network import length_batches, sorted_experts
from moec.compiler.workspace.parallel import workers
from moec.evaluation.engine import GenerationRequest
from moec.manifests.errors import CheckpointError, ContextOverflow
from moec.manifests.model import UnitKey
from tests.tiny_models import TINY_MODELS, save_tiny_mixtral

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ("Hello", "A much longer prompt than the first", "x", "Question: 12 + 7?\nAnswer:", "Two words", "é—ß")


@pytest.fixture(scope="module", params=["plain", "top1", "sharded-half", "window-heads"])
def folder(request, tmp_path_factory) -> Path:
    return save_tiny_mixtral(tmp_path_factory.mktemp(request.param), TINY_MODELS[request.param])


@pytest.fixture(scope="module")
def reference(folder) -> ReferenceModel:
    return ReferenceModel(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> ReferenceModel:
    return ReferenceModel(save_tiny_mixtral(tmp_path_factory.mktemp("plain")))


def requests(drafts, limit=12, stop=()):
    return [GenerationRequest(prompt, draft, limit, stop) for prompt, draft in zip(PROMPTS, drafts, strict=True)]


def one_by_one(folder: Path, reference: ReferenceModel, limit: int) -> list[list[int]]:
    """Return greedy tokens of transformers' generate, without batch, padding, draft and end token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for prompt in PROMPTS:
        ids = torch.tensor([reference.encode(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
        new = out[0, ids.shape[1] :].tolist()
        results.append([token for token in new if token not in reference.model.eos_token_ids])
    return results


def test_generation_is_that_of_transformers_whatever_the_draft(folder, reference):
    expected = one_by_one(folder, reference, 12)
    seen = []
    plain = reference.generate(requests([None] * len(PROMPTS)), lambda done, total: seen.append((done, total)))
    assert [g.tokens for g in plain] == [len(tokens) for tokens in expected]
    assert [g.text for g in plain] == [reference.decode(tokens) for tokens in expected]
    assert [g.prompt_tokens for g in plain] == [len(reference.encode(prompt)) for prompt in PROMPTS]
    assert seen == sorted(seen) and seen[-1] == (len(PROMPTS), len(PROMPTS))
    own = [g.text for g in plain]
    drafts = [own[0], own[1][:4] + "?" + own[1][5:], "", "nothing like it at all, and far too long", None, own[5] + "!"]
    assert reference.generate(requests(drafts)) == plain


def test_end_tokens_end_a_generation_in_and_out_of_drafts(plain):
    def run(drafts, ends):
        items = [Continuation(plain.encode(p), list(d), 12) for p, d in zip(PROMPTS, drafts, strict=True)]
        with workers(1) as pool:
            GreedyDecoder(plain.network, ends, plain.decode).run(items, pool, lambda done, total: None)
        assert all(item.done for item in items)
        return [item.tokens for item in items]

    whole = run([[]] * len(PROMPTS), ())
    assert [len(tokens) for tokens in whole] == [12] * len(PROMPTS)
    assert run(whole, ()) == whole
    end = whole[0][5]
    expected = [tokens[: tokens.index(end)] if end in tokens else tokens for tokens in whole]
    assert run([[]] * len(PROMPTS), (end,)) == expected
    assert run(whole, (end,)) == expected
    assert run(expected, (end,)) == expected
    assert run([[*tokens[:3], 7, *tokens[4:]] for tokens in whole], (end,)) == expected


def test_stop_texts_end_a_generation_at_the_same_token_with_and_without_draft(plain):
    whole = plain.generate(requests([None] * len(PROMPTS)))
    stop = (whole[1].text[3:5],)
    cut = plain.generate(requests([None] * len(PROMPTS), stop=stop))
    assert cut[1].tokens < whole[1].tokens and stop[0] in cut[1].text
    assert plain.generate(requests([g.text for g in whole], stop=stop)) == cut


def test_the_cache_grows_and_rows_leave_it(plain, monkeypatch):
    limits = (3, 20, 9, 1, 14, 30)
    some = [GenerationRequest(prompt, None, limit) for prompt, limit in zip(PROMPTS, limits, strict=True)]
    expected = plain.generate(some)
    monkeypatch.setattr(reference_decode, "GROWTH_TOKENS", 4)
    monkeypatch.setattr(reference_decode, "ROWS_PER_STEP", 4)
    assert plain.generate(some) == expected
    assert [g.tokens for g in expected] == list(limits)


def test_limits_and_context(plain):
    assert [g.tokens for g in plain.generate([GenerationRequest("ab", "anything", 0)])] == [0]
    prompt = "p" * (plain.model.max_positions - 3)
    assert plain.generate([GenerationRequest(prompt, None, 50)])[0].tokens <= 3
    with pytest.raises(ContextOverflow, match="128 tokens"):
        plain.generate([GenerationRequest("p" * plain.model.max_positions, None, 1)])
    with pytest.raises(ContextOverflow, match="0 tokens"):
        plain.generate([GenerationRequest("", None, 1)])
    with pytest.raises(ContextOverflow, match="129 tokens"):
        plain.answer_log_probs([("", "p" * (plain.model.max_positions + 2))])
    assert plain.generate([]) == []


def test_forced_logits_are_those_of_the_whole_model(folder, reference):
    pairs = reference.encode_pairs([(prompt, " answer" * (1 + i % 3)) for i, prompt in enumerate(PROMPTS)])
    logits = reference.forced_logits([*pairs, ([], [5, 6, 7]), ([3], [])])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for (prompt, answer), found in zip([*pairs, ([], [5, 6, 7]), ([3], [])], logits, strict=True):
        tokens = [*prompt, *answer, 2]
        with torch.no_grad():
            whole = model(torch.tensor([tokens])).logits[0]
        expected = whole[max(0, len(prompt) - 1) : len(tokens) - 1].numpy()
        assert found.shape == expected.shape and found.dtype == np.float32
        np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_answer_scores_are_sums_of_log_probabilities(plain):
    texts = [("Ask", " me now"), ("", "no prompt"), ("Ask", "")]
    scores = plain.answer_log_probs(texts)
    assert [score.tokens for score in scores] == [7, 8, 0]
    pair = plain.encode_pair(*texts[0])
    logits = torch.from_numpy(plain.forced_logits([pair], with_end=False)[0])
    expected = -logits.log_softmax(-1)[range(len(pair[1])), pair[1]].sum()
    assert scores[0].nll == pytest.approx(float(expected), rel=1e-5)


def test_weights_are_exchanged_and_put_back_bit_for_bit(reference):
    before = {name: p.detach().clone() for name, p in reference.network.model.named_parameters()}
    pair = [reference.encode_pair("some", " text")]
    logits = reference.forced_logits(pair)[0]
    shape = reference.original_weight("layers.0.query").shape
    names = [UnitKey(0, 1, "gate"), UnitKey(1, 0, "up"), UnitKey(1, 2, "down"), "layers.0.router", "lm_head"]
    names += ["embedding", "final_norm", "layers.1.attention_norm", "layers.1.experts_norm"]
    names += [f"layers.1.{part}" for part in ("query", "key", "value", "output")]
    changed = {name: torch.full_like(reference.original_weight(name), 0.25) for name in names}
    with reference.weights(changed):
        assert not np.allclose(reference.forced_logits(pair)[0], logits)
        assert torch.equal(reference.original_weight(names[0]), before_gate(before))
        with pytest.raises(RuntimeError, match="stop"), reference.weights({names[0]: changed[names[0]] * 2}):
            raise RuntimeError("stop")
        assert float(reference.network.experts[0].gate_up_proj[1, 0, 0]) == 0.25
    for name, parameter in reference.network.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    reference.set_weight(names[2], changed[names[2]])
    reference.set_weight("layers.0.query", torch.zeros(shape))
    reference.restore()
    np.testing.assert_array_equal(reference.forced_logits(pair)[0], logits)


def before_gate(before):
    fused = before["model.layers.0.mlp.experts.gate_up_proj"][1]
    return fused[: fused.shape[0] // 2]


def test_units_are_named_as_on_disk(plain, tmp_path):
    on_disk = load_file(save_tiny_mixtral(tmp_path) / "model.safetensors")
    for projection, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        weight = on_disk[f"model.layers.1.block_sparse_moe.experts.3.{name}.weight"]
        assert torch.equal(plain.original_weight(UnitKey(1, 3, projection)), weight.float())


def test_unknown_names_and_wrong_shapes_are_refused(plain):
    for name in (UnitKey(0, 99, "gate"), UnitKey(9, 0, "gate"), UnitKey(0, 0, "middle"), "layers.0.nothing"):
        with pytest.raises(KeyError):
            plain.original_weight(name)
    with pytest.raises(ValueError, match="has shape"):
        plain.set_weight(UnitKey(0, 0, "gate"), torch.zeros(2, 2))


def test_sorted_experts_compute_what_transformers_computes(reference):
    module = reference.network.experts[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, reference.model.hidden_size, generator=generator)
    top_k = reference.model.layers[0].experts.top_k
    index = torch.rand(37, module.num_experts, generator=generator).topk(top_k).indices
    index[:, 0].clamp_(max=1)  # leaves some experts with few tokens or none
    weights = torch.rand(37, top_k, generator=generator)
    expected = type(module).forward.__wrapped__(module, hidden, index, weights)
    torch.testing.assert_close(sorted_experts(module, hidden, index, weights), expected, atol=1e-5, rtol=1e-5)
    assert reference.network.model.config._experts_implementation == "moec_sorted"


def test_float32_checkpoints_are_rounded_to_16_bits(tmp_path):
    folder = save_tiny_mixtral(tmp_path)
    weights = load_file(folder / "model.safetensors")
    noise = {name: w.float() + 1e-4 * torch.ones_like(w, dtype=torch.float32) for name, w in weights.items()}
    save_file(noise, folder / "model.safetensors", {"format": "pt"})
    for parameter in ReferenceModel(folder).network.model.parameters():
        assert torch.equal(parameter.bfloat16().float(), parameter)


def test_damaged_checkpoints_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no folder"):
        ReferenceModel(tmp_path / "absent")
    folder = save_tiny_mixtral(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        ReferenceModel(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no `tokenizer\.json`"):
        ReferenceModel(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 weights are missing .* `model\.norm\.weight`"):
        ReferenceModel(folder)
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing or have another shape|cannot load"):
        ReferenceModel(folder)


def test_length_batches_cover_everything_within_the_bound():
    lengths = [3, 9, 1, 30, 9, 2, 2]
    batches = length_batches(lengths, 18, max_rows=3)
    assert sorted(i for batch in batches for i in batch) == list(range(7))
    assert batches[0] == [3]
    for batch in batches[1:]:
        assert len(batch) <= 3 and len(batch) * max(lengths[i] for i in batch) <= 18
    assert length_batches([], 10) == []
