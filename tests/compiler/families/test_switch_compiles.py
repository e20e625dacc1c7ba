"""Switch Transformers through the whole compile: answers of the checkpoint, search and certificate."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.cli.measuring.text_engines import checkpoint_engine
from moec.compiler.checkpoint.checkpoint import WEIGHTS_NAME
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.walker.texts import divided_pairs
from moec.evaluation.engine import GenerationRequest, in_order
from moec.evaluation.text_pairs import encode_pairs
from moec.manifests.errors import InputError
from moec.runtime import load
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.options.runtime import RuntimeOptions
from tests.compiler.lowered import lowered, walked_logits
from tests.exact_runs import WAYS
from tests.tiny_compile import SUMMARY, check_bundle, compile_tiny, contents, little_memory, save_dialogues
from tests.tiny_models import VOCABULARY, tiny_tokenizer
from tests.tiny_switch import START, TINY_SWITCHES, Oracle, TinySwitch, save_tiny_switch

pytestmark = pytest.mark.oracle

TEXTS = [
    ("a lamp near a ", "box"),
    ("seven green pens and two red ones", "two red ones"),
    ("tall", " of the box under"),
]
BITS = (3, 4, 16)  # 2 bits take four fifths of a tiny compile, because their scales are fitted several times
KL = 0.02
TOKENS = np.random.default_rng(4).integers(4, 260, 40).tolist()


@pytest.fixture(
    scope="module",
    params=["switch", "switch-capacity", pytest.param("switch-all-routed-half", marks=pytest.mark.slow)],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_switch(tmp_path_factory.mktemp(request.param) / "model", TINY_SWITCHES[request.param])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_switch(tmp_path_factory.mktemp("plain") / "model")


# -- the layers and the checkpoint -------------------------------------------------------------------------------------


def test_logits_of_whole_answers_are_those_of_single_steps(folder: Path) -> None:
    """In batches of prompts and answers with different lengths."""
    lowering, oracle = lowered(folder), Oracle(folder)
    pairs = encode_pairs(load_tokenizer(folder), TEXTS, is_joint=False)
    prompts, rows = [prompt for prompt, _ in pairs], [[START, *answer] for _, answer in pairs]
    for prompt, row, found in zip(prompts, rows, walked_logits(lowering, rows, prompts), strict=True):
        expected = oracle.logits(prompt, row)
        assert np.abs(found.numpy() - expected).max() <= 1e-4 * np.abs(expected).max()
    with pytest.raises(InputError, match="a prompt is empty"):
        divided_pairs(lowering.model, [([], [5, 6])])


def test_the_checkpoint_generates_what_transformers_generates(folder: Path) -> None:
    """In `moec eval`, for all drafts, in batches of prompts with different lengths."""
    oracle, tokenizer = Oracle(folder), load_tokenizer(folder)
    prompts, ends = [prompt for prompt, _ in TEXTS], set(lowered(folder).model.eos_token_ids)
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    answers = [[token for token in oracle.greedy(ids, 12) if token not in ends] for ids in encoded]
    expected = [tokenizer.decode(answer) for answer in answers]
    with checkpoint_engine(folder, RuntimeOptions(slots=2)) as engine:
        for drafts in ([None] * 3, expected, [text[:4] + "x" for text in expected]):
            requests = [GenerationRequest(p, draft, 12) for p, draft in zip(prompts, drafts, strict=True)]
            found = in_order(engine.generate, requests)
            assert [generation.text for generation in found] == expected
            assert [generation.prompt_tokens for generation in found] == [len(ids) for ids in encoded]


# -- compiles ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint that answers every dialogue with its summary, and the dialogues.

    It is not trained. The layers disturb the embedding of each letter. The output matrix maps it to the next letter.
    """
    root = tmp_path_factory.mktemp("answering")
    folder = save_tiny_switch(root / "model", TinySwitch({"tie_word_embeddings": False}, seed=5))
    tensors, tokenizer = load_file(folder / WEIGHTS_NAME), tiny_tokenizer()
    chain = [START, *tokenizer.encode(SUMMARY, add_special_tokens=False), 2]
    assert len({*chain}) == len(chain)
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"):
        tensors[f"{name}.weight"] *= 5
    tensors["lm_head.weight"] *= 0.1
    for before, after in pairwise(chain):
        tensors["lm_head.weight"][after] = tensors["shared.weight"][before]
    save_file(tensors, folder / WEIGHTS_NAME)
    return folder, save_dialogues(root / "samsum", validation=24)


@pytest.mark.parametrize("has_memory", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_loss_target_is_searched_and_certified(
    answering: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    if not has_memory:
        little_memory(monkeypatch.setattr)
    model, data = answering
    result = compile_tiny(model, tmp_path / "out", "loss", 0.3, data=str(data), tasks=("samsum",))
    quality = check_bundle(tmp_path / "out")
    assert quality["tasks"]["samsum"]["baseline"] > 0.9
    assert quality["tasks"]["samsum"]["verdict"]["status"] == "supported"
    assert result.plan.bits_per_weight < 12, result.plan.bits_per_weight
    assert {unit.projection for unit in result.plan.units} == {"up", "down"}


@pytest.mark.gate("G3")
@pytest.mark.gate("G2")
@pytest.mark.gate("G1")
def test_a_searched_bundle_runs_with_a_fraction_of_its_experts(folder: Path, tmp_path: Path) -> None:
    data = save_dialogues(tmp_path / "samsum", train=4, validation=4, test=4)
    result = compile_tiny(
        folder, tmp_path / "out", "bits_per_weight", 4.5, data=str(data), tasks=("samsum",), bits=BITS
    )
    assert len({spec.bitwidth for spec in result.plan.units.values()}) > 1
    manifest = open_bundle(tmp_path / "out").manifest

    def logits(cache: str, **way: Any) -> tuple[np.ndarray, int, int]:
        with load(tmp_path / "out", expert_cache=cache, context=64, **way) as engine:
            engine.cache.finish_warming()
            steps = [engine.logits([START, *TOKENS[:9]], TOKENS)]
            for position, token in enumerate(TOKENS[20:], 10):
                steps.append(engine.model.logits(engine.step([token], [0], [position])))
            return np.concatenate(steps), engine.cache.stats.evictions, engine.cache.stats.prefetch_used

    whole, none, _ = logits("100%", prefetch="off")
    assert whole.shape == (30, VOCABULARY) and none == 0
    least = manifest.cost.minimum_expert_bytes
    for way in WAYS:
        part, evictions, _ = logits(f"{least}", **way)
        assert evictions > 0 and np.array_equal(part, whole)
        # With cache space for the next routed layer, advice is used and changes no result. The rule has a fixed share,
        # because with random weights the rule `likely` stops prefetching.
        part, evictions, used = logits(f"{3 * least}", prefetch_rule="spread", **way)
        assert evictions > 0 and np.array_equal(part, whole) and (used > 0) == (way["prefetch"] != "off")


@pytest.mark.gate("G4")
def test_compiling_twice_gives_the_same_bytes(plain: Path, tmp_path: Path) -> None:
    """With one thread and with two. The passes of two threads use the same routers at the same time."""
    data = save_dialogues(tmp_path / "samsum", train=4, validation=4, test=6)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = tmp_path / f"threads-{threads}" / "out"
            out.parent.mkdir()
            compile_tiny(plain, out, "bits_per_weight", 4.5, data=str(data), tasks=("samsum",), bits=BITS)
    finally:
        torch.set_num_threads(before)
    assert contents(tmp_path / "threads-1") == contents(tmp_path / "threads-2")


@pytest.mark.gate("G4")
def test_little_memory_changes_no_weight(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a KL: searched, and certified with the encoder's and the decoder's layers loaded one after the other."""
    data = save_dialogues(tmp_path / "samsum", train=4, validation=6, test=6)
    options: dict[str, Any] = {"data": str(data), "tasks": ("samsum",), "bits": BITS, "swaps": 0, "dense_bits": 16}
    compile_tiny(plain, tmp_path / "all", "kl", KL, **options)
    little_memory(monkeypatch.setattr)
    result = compile_tiny(plain, tmp_path / "few", "kl", KL, **options)
    assert len({spec.bitwidth for spec in result.plan.units.values()}) > 1
    few, every = check_bundle(tmp_path / "few"), check_bundle(tmp_path / "all")
    for name in ("sensitivity", "trials", "sizes", "target"):
        assert few[name] == every[name], name
    measured = [trial["kl"]["mean"] for trial in few["trials"]]
    assert min(measured) <= KL < max(measured)
    held_out, task = few["held_out_kl"]["samsum"], every["tasks"]["samsum"]
    assert held_out["items"] == task["n"] == 6 and held_out["mean"] == task["kl"]["mean"] < 4 * KL
    weights = [{name: data for name, data in contents(tmp_path / folder).items() if name.endswith(".safetensors")}
               for folder in ("few", "all")]  # fmt: skip
    assert weights[0] == weights[1] and len(weights[0]) > 1


def test_experts_are_left_out(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 bits in groups of 32 take 3 bits per weight, so 2.75 cannot be had with every expert."""
    little_memory(monkeypatch.setattr)
    data = save_dialogues(tmp_path / "samsum", train=8, validation=6, test=6)
    options: dict[str, Any] = {"data": str(data), "tasks": ("samsum",), "bits": (2, 3), "sensitivity": "fisher"}
    result = compile_tiny(plain, tmp_path / "out", "bits_per_weight", 2.75, prune=True, **options)
    quality, manifest = check_bundle(tmp_path / "out"), open_bundle(tmp_path / "out").manifest
    assert result.plan.bits_per_weight <= 2.75
    assert any(manifest.pruned_experts)
    walked, held_out = quality["trials"][-1]["kl"]["mean"], quality["held_out_kl"]["samsum"]["mean"]
    assert 0.2 < walked / held_out < 5, "the runtime chooses among the experts that are left, as the compile did"


def test_auto_is_proxy_exact_corrects_it_and_gradients_tell_more(plain: Path, tmp_path: Path) -> None:
    """Gradients go through the decoder into the encoder, whose units are searched as well."""
    save_dialogues(tmp_path / "data", train=8, validation=4, test=4)
    told, units = {}, {}
    for kind in ("auto", "proxy", "exact", "fisher"):
        result = compile_tiny(
            plain, tmp_path / "out", "bits_per_weight", 5, data=str(tmp_path / "data"), tasks=("samsum",), bits=BITS,
            sensitivity=kind, quantizer="rtn", plan_only=True,
        )  # fmt: skip
        told[kind], units[kind] = result.quality["sensitivity"], result.plan.units
    assert told["auto"] == told["proxy"] and not any(told["auto"]["gains"]["gate"])
    assert told["exact"]["gains"] == told["proxy"]["gains"] and told["exact"] != told["proxy"]
    first = lowered(plain).model.first_decoder_layer
    for is_decoder in (False, True):
        own = [unit for unit in units["fisher"] if (unit.layer >= first) == is_decoder]
        assert any(units["fisher"][unit] != units["proxy"][unit] for unit in own), "more than one gain per layer"
