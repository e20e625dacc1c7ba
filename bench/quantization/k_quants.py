"""KL of plans and of llama.cpp's K-quants at equal bytes.

    python -m bench.quantization.k_quants

Takes ten minutes on two cores.

llama.cpp quantizes the routed experts of the example in its own mixtures. Its importance data come from the train
split, counted as by its own tool: mean squares of the inputs of each expert. The quantized weights are read back and
put into the layers of the unquantized model. The side of moec is the plan of `moec compile --bits-per-weight` for the
same bytes of the same tensors, calibrated on the same texts. All other weights keep 16 bits.

The figure is KL(reference || quantized) in nats per answer token, teacher-forced, with paired 95 % intervals. The test
items were seen by neither side. Only weights are quantized; activations are float32 on both sides. Prints one JSON
object per line. Needs the extra `bench`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import torch
from torch import Tensor

from moec.cli.commands.compile import open_partial
from moec.compiler.checkpoint.checkpoint import open_checkpoint
from moec.compiler.checkpoint.tokenizer import load_tokenizer
from moec.compiler.families import Lowering, lower
from moec.compiler.preflight.preparation import prepare
from moec.compiler.reference.expert_module import intermediate
from moec.compiler.request.options import CompileOptions
from moec.compiler.request.plan import CompilePlan
from moec.compiler.request.request import CompileRequest
from moec.compiler.request.targets import Target
from moec.compiler.sensitivity.answer_walk import AnswerWalk
from moec.compiler.stages.compile_context import open_for_plan
from moec.compiler.stages.planning import make_plan
from moec.compiler.walker.loaded_layer import LoadedLayer
from moec.compiler.walker.texts import AnswerTexts, TextStates, TokenTexts
from moec.compiler.workspace.parallel import workers
from moec.evaluation.data import SplitData, load_splits
from moec.evaluation.engine import no_progress
from moec.evaluation.text_pairs import TokenPair, encode_pairs, forced_rows
from moec.manifests.model import ModelSpec, UnitKey
from moec.profiles.loading import load_profile

MIXTURES = {"Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "IQ2_XS": 20, "IQ3_XXS": 23}  # enum llama_ftype
TENSORS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
PARTS = {
    "attn_norm": "attention_norm", "attn_q": "query", "attn_k": "key", "attn_v": "value", "attn_output": "output",
    "ffn_norm": "experts_norm", "ffn_gate_inp": "router",
}  # fmt: skip
TEST_ITEMS = 500
RESAMPLES = 2_000


def importance_of(lowering: Lowering, rows: list[list[int]]) -> dict[str, np.ndarray]:
    """Return mean squares of the inputs of each expert, [E, K] per layer and projection, as llama.cpp counts them.

    They go by the name of the tensor in a GGUF file. An expert without tokens has ones.
    """
    slot, found, held = LoadedLayer(lowering), dict[str, np.ndarray](), list[tuple[Tensor, Tensor]]()
    states = TextStates.begin(TokenTexts(rows), slot.embed, tokens_per_batch=1)  # so that no padding is counted
    for layer in range(lowering.model.num_layers):
        slot.load(layer)
        module, sums, held = slot.experts, dict[str, Tensor](), []
        handle = module.register_forward_pre_hook(lambda _, given, held=held: held.append(given[:2]))
        with workers(1) as pool:
            slot.run([states], pool)
        handle.remove()
        inputs, chosen = (torch.cat(parts) for parts in zip(*held, strict=True))
        counts = torch.bincount(chosen.flatten(), minlength=module.num_experts).unsqueeze(1)
        for expert in range(module.num_experts):
            read = inputs[torch.where(chosen == expert)[0]]
            gated = intermediate(module, expert, read)
            for projection, values in (("gate", read), ("up", read), ("down", gated)):
                sums.setdefault(projection, torch.zeros(module.num_experts, values.shape[1]))
                sums[projection][expert] = values.square().sum(0)
        for projection, squares in sums.items():
            mean = torch.where(counts > 0, squares / counts.clamp(min=1), 1.0)
            found[f"blk.{layer}.{TENSORS[projection]}.weight"] = mean.numpy().astype(np.float32)
    return found


def write_gguf(lowering: Lowering, target: Path) -> None:
    """Write the checkpoint in float32, which keeps every bfloat16 value, for llama.cpp to quantize."""
    model, layer = lowering.model, lowering.model.layers[0]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(model.num_layers)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden_size)
    writer.add_feed_forward_length(layer.experts.width)
    writer.add_head_count(layer.attention.num_heads)
    writer.add_head_count_kv(layer.attention.num_kv_heads)
    writer.add_rope_dimension_count(layer.attention.rope.rotary_size)
    writer.add_layer_norm_rms_eps(model.norm_eps)
    writer.add_expert_count(layer.experts.count)
    writer.add_expert_used_count(layer.experts.top_k)
    writer.add_vocab_size(model.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    dense = {"token_embd": "embedding", "output_norm": "final_norm", "output": "lm_head"}
    for index in range(model.num_layers):
        dense.update({f"blk.{index}.{name}": f"layers.{index}.{own}" for name, own in PARTS.items()})
    for name, own in dense.items():
        writer.add_tensor(f"{name}.weight", lowering.dense_weight(own).float().numpy())
    for index in range(model.num_layers):
        for projection, name in TENSORS.items():
            units = [lowering.unit(UnitKey(index, expert, projection)).float() for expert in range(layer.experts.count)]
            writer.add_tensor(f"blk.{index}.{name}.weight", torch.stack(units).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, mixture: int, importance: Mapping[str, np.ndarray]) -> None:
    """Quantize a GGUF file with llama.cpp and importance data."""
    entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()  # the list ends with an empty name
    kept = []
    for entry, (name, values) in zip(entries, importance.items(), strict=False):
        flat = np.ascontiguousarray(values.reshape(-1))
        kept += [flat, name.encode()]
        entry.name, entry.size = kept[-1], flat.size
        entry.data = flat.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread, options.imatrix = mixture, torch.get_num_threads(), entries
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)) != 0:
        raise SystemExit(f"llama.cpp cannot quantize to mixture {mixture}")


def read_back(path: Path) -> tuple[dict[UnitKey, Tensor], int, dict[str, int]]:
    """Return the routed experts as float32, their bytes in the file, and the number of tensors of each type."""
    units: dict[UnitKey, Tensor] = {}
    total, types = 0, dict[str, int]()
    projections = {name: projection for projection, name in TENSORS.items()}
    for tensor in gguf.GGUFReader(path).tensors:
        parts = tensor.name.split(".")
        if parts[0] != "blk" or parts[2] not in projections:
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        total += int(tensor.n_bytes)
        types[tensor.tensor_type.name] = types.get(tensor.tensor_type.name, 0) + 1
        for expert, matrix in enumerate(values):
            units[UnitKey(int(parts[1]), expert, projections[parts[2]])] = torch.from_numpy(matrix.copy())
    return units, total, types


def plan_for(model: str, data: str, bits_per_weight: float) -> tuple[CompilePlan, dict[UnitKey, Tensor]]:
    """Return the plan of `moec compile --bits-per-weight`, and its weights below 16 bits as float32."""
    options = CompileOptions(Target("bits_per_weight", bits_per_weight), data=data, dense_bits=16, comparisons=False)
    with tempfile.TemporaryDirectory() as folder:
        request = CompileRequest(
            model, Path(folder) / "out", options, profile=load_profile("laptop"), open_runtime=open_partial,
            plan_only=True,
        )  # fmt: skip
        with open_for_plan(prepare(request)) as bench:
            planned = make_plan(bench)
            if planned.searched is None:
                raise RuntimeError("a plan of a number of bits is searched")
            store, plan = planned.searched.measured.store, planned.plan
            return plan, {unit: store.weight(unit, spec) for unit, spec in plan.units.items() if spec.bitwidth < 16}


def scored_answers(model: ModelSpec, pairs: list[TokenPair]) -> AnswerTexts:
    """Return texts with every token of their answers scored, the end token included."""
    rows, answers, counts = forced_rows(pairs, model.eos_token_ids[:1])
    targets = [answer[len(answer) - count :] for answer, count in zip(answers, counts, strict=True)]
    return AnswerTexts(TokenTexts(rows), counts, targets, pairs, [len(pairs)])


def item_kl(walk: AnswerWalk, units: Mapping[Any, Tensor]) -> np.ndarray:
    """Return the sum of KL over the answer tokens of each item."""
    starts = np.cumsum([0, *walk.answers.counts[:-1]])
    return np.add.reduceat(walk.measure(units.get).kl, starts)


def interval(ours: np.ndarray, theirs: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of means, by a bootstrap that draws items in pairs."""
    draws = np.random.default_rng(0).integers(0, len(tokens), (RESAMPLES, len(tokens)))
    ratios = ours[draws].sum(1) / theirs[draws].sum(1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)


def compare(model: str, splits: SplitData, data: str, mixtures: list[str]) -> None:
    """Print one line per mixture."""
    lowering, task, tokenizer = lower(open_checkpoint(model)), splits.task, load_tokenizer(Path(model))
    train, test = (
        encode_pairs(tokenizer, [(task.prompt(item, ()), task.answer(item)) for item in items])
        for items in (splits.train.items, splits.test.items[:TEST_ITEMS])
    )
    counted = importance_of(lowering, [prompt + answer for prompt, answer in train])
    answers, threads = scored_answers(lowering.model, test), torch.get_num_threads()
    walk = AnswerWalk(lambda: LoadedLayer(lowering, lowering.model.num_layers), answers, threads, no_progress)
    for index in range(lowering.model.num_layers):  # some mixtures need these tensors, which do not count here
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            columns = lowering.model.dense_shapes()[f"layers.{index}.{PARTS[name]}"][1]
            counted[f"blk.{index}.{name}.weight"] = np.ones(columns, np.float32)
    tokens = np.array(answers.counts)
    weights = sum(
        3 * layer.experts.count * layer.experts.width * lowering.model.hidden_size for layer in lowering.model.layers
    )
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.gguf"
        write_gguf(lowering, plain)
        for name in mixtures:
            file = Path(folder) / f"{name}.gguf"
            quantize(plain, file, MIXTURES[name], counted)
            peer, size, types = read_back(file)
            plan, units = plan_for(model, data, 8 * size / weights)
            theirs, ours = (item_kl(walk, found) for found in (peer, units))
            low, high = interval(ours, theirs, tokens)
            print(json.dumps({
                "mixture": name, "types": types, "bytes": size, "bits_per_weight": round(8 * size / weights, 3),
                "our_bytes": plan.expert_packed_bytes, "kl": float(theirs.sum() / tokens.sum()),
                "our_kl": float(ours.sum() / tokens.sum()), "ratio_95": [round(low, 3), round(high, 3)],
            }), flush=True)  # fmt: skip


def main() -> None:
    """Read the command line and compare."""
    parser = argparse.ArgumentParser(description="KL at equal bytes, next to llama.cpp's mixtures.")
    parser.add_argument("--model", default="examples/model")
    parser.add_argument("--data", default="examples/data/gsm8k")
    parser.add_argument("--mixtures", default=",".join(MIXTURES))
    options = parser.parse_args()
    compare(options.model, load_splits(options.data, None), options.data, options.mixtures.split(","))


if __name__ == "__main__":
    main()
