"""Tiny bundles for later versions, each packed into one file, with the logits of their code on numpy.

`python -m tests.gates.released_bundles FOLDER [NAME ...]` writes all of them, or the named ones, as
`format-VERSION-NAME.moec` next to a `.json`. Weights are random. All bundles together have every format and nearly
every field.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from moec.compiler.bundle.emit import BundleContent
from moec.compiler.checkpoint.opening import open_checkpoint
from moec.compiler.families import Lowering, lower
from moec.compiler.quantization.packing import pack
from moec.compiler.quantization.quantized import QuantizedMatrix
from moec.compiler.request.plan import CompilePlan, with_low_versions
from moec.compiler.request.uniform import uniform_plan
from moec.manifests.bundle import EVICTION_NAME
from moec.manifests.codec import canonical_json
from moec.manifests.model import ExpertKey, RouterSpec, StaticRouting, UnitKey
from moec.manifests.quant import QuantSpec
from moec.runtime import kernels, load
from moec.runtime.bundle.archive import pack_bundle
from moec.runtime.bundle.open_bundle import open_bundle
from moec.runtime.kernels import reference
from tests.gates.bundles import DEVICE, publish_plan
from tests.tiny_compile import compile_tiny, save_texts
from tests.tiny_families import LONGROPE, YARN, TinyFamily, save_tiny_family
from tests.tiny_models import VOCABULARY, TinyMixtral, save_tiny_qwen3_moe
from tests.tiny_switch import TinySwitch, save_tiny_switch

TEXT = "What it said, it says."
TOKENS = np.random.default_rng(12).integers(4, VOCABULARY, 10).tolist()
STEP = 24  # one logit of so many is kept
TOLERANCE = 1e-5  # share of the largest logit; instruction sets differ by 3e-7
NOISE, TRIALS = 1e-6, 12  # share of activations; the order of sums changes them by a tenth of that
LEAST_CHANGE = 1e-3  # share of the largest logit, by which a second run must differ
LARGE_BITWIDTH = 8  # wider formats occur once in a bundle
EXACT = {"expert_cache": "1MiB", "context": 64}
LOW = {**EXACT, "cache_state": "cold", "prefetch": "off", "policy": "lru", "lossy": "dynamic-precision 0,1"}
_SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1, "routed_scaling_factor": 1.5, "num_hidden_layers": 2, "rope_theta": None,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_SINKS = {"num_local_experts": 3, "head_dim": 16, "sliding_window": 5, "swiglu_limit": 0.5, "num_hidden_layers": 2}
_VERSIONS = {
    "moe_intermediate_size": 64, "num_experts": 4, "shared_expert_intermediate_size": 32, "num_hidden_layers": 2,
}  # fmt: skip
_NORMS = {
    "num_local_experts": 3, "num_hidden_layers": 2, "attention_bias": True, "lm_head_bias": True,
    "router_jitter_noise": 0.2, "rope_theta": None, "max_position_embeddings": 256,
    "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128},
}  # fmt: skip
_ENCODER = {
    "d_model": 32, "d_ff": 32, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 2, "expert_capacity": 4,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "router_bias": True,
}  # fmt: skip
_FORMATS = (
    "q2g32b", "q1g32", "q1.6g64s", "q3g32b", "mxfp4", "q4g32b", "q8s", "q1.6s", "q1g32b", "q3s", "q2s", "q8g32",
)  # fmt: skip
_WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "num_local_experts": 3, "num_hidden_layers": 1}
_GATES = {
    "num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 3,
    "mlp_layer_types": ["sparse", "dense", "sparse"], "num_key_value_heads": 2, "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "rope_theta": None,
    "num_attention_heads_per_layer": [2, 4, 2], "moe_routed_scaling_factor": 2.5,
}  # fmt: skip
_AFTER = {
    "num_experts": 5, "num_shared_experts": 1, "head_dim": 16, "num_hidden_layers": 3, "num_key_value_heads": 1,
    "sliding_window": 5, "global_attn_every_n_layers": 2, "mup_enabled": True, "route_scale": 1.5,
}  # fmt: skip
_DELTA = {
    "num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 2,
    "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
}  # fmt: skip
_TAPS = {
    "num_experts": 4, "num_hidden_layers": 3, "num_dense_layers": 1, "num_key_value_heads": 1,
    "layer_types": ["conv", "full_attention", "conv"], "routed_scaling_factor": 1.5,
}  # fmt: skip
_BRANCHES = {
    "num_experts": 4, "top_k_experts": 2, "num_hidden_layers": 2, "enable_moe_block": True, "rope_theta": None,
    "hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2,
    "num_global_key_value_heads": 1, "attention_k_eq_v": True, "final_logit_softcapping": 2.0, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
_FITTED_FORMATS = ("q4g32", "q3g32", "q2g32", "q4s")
FITTED_WEIGHTS = {"hobbit": {"lru": 0.25, "lfu": 0.5, "lhu": 0.125, "fld": 0.125}}
_WIDE_FORMATS = ("q5g64b", "q6g32", "q5s", "q6s", "q5g32", "q6g64")


def compiled(root: Path, seed: int) -> Path:
    """Qwen3-MoE from the whole compile: tables of calibration, formats by search, a certificate."""
    shape = TinyMixtral(
        layers=3, hidden_size=32, width=32, heads=2, kv_heads=1, head_size=16, experts=3, tied=True, seed=seed
    )
    model, texts = save_tiny_qwen3_moe(root / "tiny", shape), save_texts(root / "texts")
    options = {"data": str(texts), "bits": (2, 3, 4, 8, 16), "dense_bits": 4, "path_keys": "pairs"}
    compile_tiny(model, root / "bundle", "bits_per_weight", 3.5, **options)
    return root / "bundle"


def latent(root: Path, seed: int) -> Path:
    """DeepSeek-V3: latent attention, a stretched rotary embedding, groups, corrections, shared and plain experts."""
    return _emit(root, save_tiny_family(root / "model", TinyFamily("DeepseekV3", {**_SMALL, **_LATENT}, seed=seed)))


def sinks(root: Path, seed: int) -> Path:
    """gpt-oss in half precision: windows, attention sinks, biases of everything, clamped experts."""
    return _emit(
        root, save_tiny_family(root / "model", TinyFamily("GptOss", {**_SMALL, **_SINKS}, "float16", seed=seed))
    )


def norms(root: Path, seed: int) -> Path:
    """Phi-3.5-MoE: layer norms, sparsemixer, a bias of the head, a long rotary form, a layer with static routing."""
    folder = save_tiny_family(root / "model", TinyFamily("Phimoe", {**_SMALL, **_NORMS}, seed=seed))
    return _emit(root, folder, _with_static_layer)


def encoder(root: Path, seed: int) -> Path:
    """Switch Transformers: an encoder with a capacity, relative positions, attention over it, no gates."""
    return _emit(root, save_tiny_switch(root / "model", TinySwitch(_ENCODER, seed=seed)))


def versions(root: Path, seed: int) -> Path:
    """Qwen2-MoE with an expert left out, low versions of others, and the stream scaled as Granite's."""
    folder = save_tiny_family(root / "model", TinyFamily("Qwen2Moe", {**_SMALL, **_VERSIONS}, seed=seed))

    def scale(lowering: Lowering) -> Lowering:
        scales = {"embedding_scale": 1.5, "residual_scale": 0.75, "logits_scale": 0.5}
        return replace(lowering, model=replace(lowering.model, **scales))

    def change_plan(plan: CompilePlan) -> CompilePlan:
        left_out = dict.fromkeys(plan.model.units_of(ExpertKey(0, 3)), QuantSpec.parse("q0"))
        return with_low_versions(replace(plan, units={**plan.units, **left_out}), QuantSpec.parse("q2g32"))

    return _emit(root, folder, scale, change_plan)


def sets(root: Path, seed: int) -> Path:
    """Qwen3-MoE from the whole compile: exact sets as keys of the path tables, learned routers, a self-test."""
    shape = TinyMixtral(
        layers=3, hidden_size=32, width=32, heads=2, kv_heads=1, head_size=16, experts=3, tied=True, seed=seed
    )
    model, texts = save_tiny_qwen3_moe(root / "tiny", shape), save_texts(root / "texts", train=60)
    options = {"data": str(texts), "bits": (2, 3, 4), "dense_bits": 5, "path_keys": "best"}
    kernels.select(kernels.available()[0])  # numpy's kernels make no self-test
    compile_tiny(model, root / "bundle", "bits_per_weight", 3.5, **options)
    kernels.select(kernels.NUMPY)
    return root / "bundle"


def wide(root: Path, seed: int) -> Path:
    """Granite with formats of 5 and 6 bits."""
    folder = save_tiny_family(root / "model", TinyFamily("GraniteMoe", {**_SMALL, **_WIDE}, seed=seed))
    return _emit(root, folder, formats=_WIDE_FORMATS)


def fitted(root: Path, seed: int) -> Path:
    """Granite with fitted weights of an eviction policy."""
    folder = save_tiny_family(root / "model", TinyFamily("GraniteMoe", {**_SMALL, **_WIDE}, seed=seed))
    return _emit(root, folder, formats=_FITTED_FORMATS, learned={EVICTION_NAME: canonical_json(FITTED_WEIGHTS)})


def gates(root: Path, seed: int) -> Path:
    """Laguna: softplus gates, in the last layer sigmoid gates; heads and rotation by layer."""
    folder = save_tiny_family(root / "model", TinyFamily("Laguna", {**_SMALL, **_GATES}, seed=seed))

    def change(lowering: Lowering) -> Lowering:
        *before, last = lowering.model.layers
        gated = replace(last, attention=replace(last.attention, output_gate="sigmoid"))
        return replace(lowering, model=replace(lowering.model, layers=(*before, gated)))

    return _emit(root, folder, change)


def after(root: Path, seed: int) -> Path:
    """AFMoE: norms before and after, gates of features, a layer without positions, one with corrected logits."""
    folder = save_tiny_family(root / "model", TinyFamily("Afmoe", {**_SMALL, **_AFTER}, seed=seed))

    def change(lowering: Lowering) -> Lowering:
        *before, last = lowering.model.layers
        experts = replace(last.experts, router=replace(last.experts.router, corrects_logits=True))
        return replace(lowering, model=replace(lowering.model, layers=(*before, replace(last, experts=experts))))

    return _emit(root, folder, change)


def delta(root: Path, seed: int) -> Path:
    """Qwen3-Next: a layer with the gated delta rule, one with gated attention, norms stored minus one."""
    return _emit(root, save_tiny_family(root / "model", TinyFamily("Qwen3Next", {**_SMALL, **_DELTA}, seed=seed)))


def taps(root: Path, seed: int) -> Path:
    """LFM2-MoE: short convolutions, with attention between them, and a number added to the sum of weights."""
    folder = save_tiny_family(root / "model", TinyFamily("Lfm2Moe", {**_SMALL, **_TAPS}, seed=seed))

    def change(lowering: Lowering) -> Lowering:
        *before, last = lowering.model.layers  # a larger number, so that a reader that lacks it is seen
        experts = replace(last.experts, router=replace(last.experts.router, least_sum=0.25))
        return replace(lowering, model=replace(lowering.model, layers=(*before, replace(last, experts=experts))))

    return _emit(root, folder, change)


def branches(root: Path, seed: int) -> Path:
    """Gemma 4: a dense branch, norms and factors of routers, values that are keys, GELU, bounded logits."""
    return _emit(root, save_tiny_family(root / "model", TinyFamily("Gemma4Text", {**_SMALL, **_BRANCHES}, seed=seed)))


def _with_static_layer(lowering: Lowering) -> Lowering:
    """Set the experts of each token in the last layer. Its router gives their weights."""
    *before, last = lowering.model.layers
    order = np.tile(np.arange(last.experts.count), (lowering.model.vocab_size, 1))
    taken = np.random.default_rng(47).permuted(order, axis=1)[:, : last.experts.top_k]
    router = RouterSpec("softmax", True, static=StaticRouting(tuple(taken.reshape(-1).tolist())))
    layers = (*before, replace(last, experts=replace(last.experts, router=router)))
    return replace(lowering, model=replace(lowering.model, layers=layers))


def _emit(
    root: Path,
    folder: Path,
    change: Callable[[Lowering], Lowering] = lambda lowering: lowering,
    change_plan: Callable[[CompilePlan], CompilePlan] = lambda plan: plan,
    formats: Sequence[str] = _FORMATS,
    learned: Mapping[str, bytes] | None = None,
) -> Path:
    """Emit a bundle whose units have one format after the other. Dense weights have 2 bits.

    learned: content of further files by name.
    """
    lowering = change(lower(open_checkpoint(str(folder))))
    plan = uniform_plan(lowering.model, QuantSpec(4, 32), QuantSpec(2, 32), lowering.float_type)
    shapes = {unit: plan.model.unit_shape(unit.layer, unit.projection) for unit in plan.units}
    specs, units = [QuantSpec(16, float_type=lowering.float_type), *map(QuantSpec.parse, formats)], {}
    for unit, (_, columns) in shapes.items():
        units[unit] = spec = next(spec for spec in specs if spec.fits(columns))
        specs.remove(spec)
        if spec.bitwidth < LARGE_BITWIDTH:
            specs.append(spec)
    plan = change_plan(replace(plan, units=units))

    def floats(unit: UnitKey, spec: QuantSpec) -> np.ndarray | None:
        """Return weights of 4-bit floats, which no quantizer makes."""
        if not spec.is_mxfp4:
            return None
        draw, (rows, columns) = torch.Generator().manual_seed(46), shapes[unit]
        codes = torch.randint(0, 16, (rows, columns), generator=draw, dtype=torch.uint8)
        exponents = torch.randint(121, 125, (rows, spec.groups(columns)), generator=draw, dtype=torch.uint8)
        return pack(QuantizedMatrix(spec, codes, exponents, None))

    return publish_plan(lowering, BundleContent(plan, DEVICE), root / "bundle", floats, learned)


MODELS: dict[str, tuple[Callable[[Path, int], Path], list[dict[str, Any]]]] = {
    "compiled": (compiled, [EXACT]),
    "latent": (latent, [EXACT]),
    "sinks": (sinks, [EXACT]),
    "norms": (norms, [EXACT, {**EXACT, "context": 256}]),
    "encoder": (encoder, [EXACT]),
    "versions": (versions, [EXACT, LOW]),
    "sets": (sets, [EXACT]),
    "wide": (wide, [EXACT]),
    "fitted": (fitted, [EXACT]),
    "gates": (gates, [EXACT]),
    "after": (after, [EXACT]),
    "delta": (delta, [EXACT]),
    "taps": (taps, [EXACT]),
    "branches": (branches, [EXACT]),
}
"""Name -> function that makes the bundle, and the options of its runs."""


def logits_of(bundle: Path, options: dict[str, Any], prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Return one logit in STEP of every token, float32 [T x V / STEP]. The first index differs from token to token.

    The first pass takes the prompt. With lossy modes it takes only the first token, because modes decide after it.
    """
    with load(bundle, **options) as engine:
        engine.begin_sequence()
        (known,) = engine.begin_texts([0], [prompt])
        first = len(known) if engine.is_exact else 1
        rows = [*engine.model.logits(engine.prefill(known[:first]))]
        for at, token in enumerate([*known, *tokens][first:], first):
            rows += [*engine.decode([token], [0], [at])]
    return np.concatenate([row[at % STEP :: STEP] for at, row in enumerate(rows)])


def differ(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def _uses_all(bundle: Path, prompt: Sequence[int]) -> bool:
    """Return whether every expert affects the logits."""
    with load(bundle, **EXACT, cache_state="cold", prefetch="off") as engine:
        stored = [entry for entry in engine.bundle.manifest.experts if not entry.is_pruned]
        engine.begin_sequence()
        (known,) = engine.begin_texts([0], [prompt])
        engine.prefill([*known, *TOKENS])
        return engine.cache.stats.misses == len(stored)


def _are_apart(said: Sequence[np.ndarray]) -> bool:
    """Return whether all runs differ, so that low versions and the long form were used."""
    return all(differ(one, other) > LEAST_CHANGE for one, other in combinations(said, 2))


def _is_steady(bundle: Path, options: dict[str, Any], prompt: Sequence[int], expected: np.ndarray) -> bool:
    """Return whether logits stay equal if the last bits of activations change.

    Then no activation is close to another 8-bit value, and no token is close to another choice of experts. Either would
    change logits by a hundredth.
    """
    draw, exact = np.random.default_rng(0), reference.round_activations

    def disturbed(x: np.ndarray) -> np.ndarray:
        return exact(x * draw.uniform(1 - NOISE, 1 + NOISE, x.shape).astype(np.float32))

    with patch.object(reference, "round_activations", disturbed):
        return all(differ(logits_of(bundle, options, prompt, TOKENS), expected) <= TOLERANCE for _ in range(TRIALS))


def _is_native(bundle: Path, options: dict[str, Any], prompt: Sequence[int], expected: np.ndarray) -> bool:
    """Return whether the extension gives the logits of numpy."""
    kernels.select(next(name for name in kernels.available() if name != kernels.NUMPY))
    try:
        return differ(logits_of(bundle, options, prompt, TOKENS), expected) <= TOLERANCE
    finally:
        kernels.select(kernels.NUMPY)


def write(name: str, folder: Path) -> None:
    """Write the bundle of the first suitable seed, and its results."""
    make, runs = MODELS[name]
    for seed in count():
        with TemporaryDirectory() as root:
            bundle = make(Path(root), seed)
            with load(bundle, **EXACT) as engine:
                prompt = engine.encode(TEXT)
            said = [(options, logits_of(bundle, options, prompt, TOKENS)) for options in runs]
            is_steady = all(
                _is_native(bundle, options, prompt, logits) and _is_steady(bundle, options, prompt, logits)
                for options, logits in said
            )
            if is_steady and _uses_all(bundle, prompt) and _are_apart([logits for _, logits in said]):
                target = folder / f"format-{open_bundle(bundle).manifest.format_version}-{name}.moec"
                pack_bundle(bundle, target)
                break
    plain = [{"options": options, "logits": base64.b64encode(logits).decode()} for options, logits in said]
    expected = {"text": TEXT, "prompt": prompt, "tokens": TOKENS, "runs": plain}
    target.with_suffix(".json").write_text(json.dumps(expected) + "\n")
    print(f"{target}: seed {seed}")


if __name__ == "__main__":
    kernels.select(kernels.NUMPY)
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    for chosen in sys.argv[2:] or MODELS:
        write(chosen, Path(sys.argv[1]))
