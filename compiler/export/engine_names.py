"""Names of weights in other engines: tensors of llama.cpp, modules of mlx-lm and of GPTQModel.

Sources: gguf-py, constants.py and tensor_mapping.py; mlx-lm 0.32, models/; GPTQModel 7.7, models/definitions/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from moec.manifests.errors import OptionError
from moec.manifests.model import ModelSpec

from .engine_formats import ENGINES, GPTQMODEL, LLAMA_CPP, MLX

_LLAMA_CPP_FAMILIES = frozenset({
    "deepseek", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "gpt_oss",
    "granitemoe", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
})  # fmt: skip
"""Families whose stacked experts llama.cpp converts. It knows MiniCPM only without experts."""
_SWITCH = "mlp.switch_mlp"
_MLX_STACKS = {
    **dict.fromkeys((*_LLAMA_CPP_FAMILIES, "exaone_moe"), _SWITCH),
    **dict.fromkeys(("granitemoe", "minimax_m2", "mixtral", "phimoe"), "block_sparse_moe.switch_mlp"),
    **dict.fromkeys(("afmoe", "dots1", "gpt_oss"), "mlp.experts"),
}
"""Module of the stacks of a layer, by family. mlx-lm knows MiniCPM only without experts."""
_OWN_PROJECTION = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_EITHER_PROJECTION = {"gate": "(gate_proj|w1)", "up": "(up_proj|w3)", "down": "(down_proj|w2)"}
_GPTQMODEL_EXPERTS = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe"),
        (r"mlp\.experts\.{experts}\.{projection}", _OWN_PROJECTION),
    ),
    # Names of transformers 5, and those on disk, which earlier releases have.
    **dict.fromkeys(
        ("mixtral", "phimoe"), (r"(mlp|block_sparse_moe)\.experts\.{experts}\.{projection}", _EITHER_PROJECTION)
    ),
    "granitemoe": (
        r"block_sparse_moe\.{projection}\.{experts}\.linear",
        {"gate": "input_linear", "up": "input_linear", "down": "output_linear"},
    ),
}
"""Pattern of the modules of experts, and names of the projections in it."""
_FAMILIES = {
    LLAMA_CPP: _LLAMA_CPP_FAMILIES,
    MLX: _MLX_STACKS.keys(),
    GPTQMODEL: _GPTQMODEL_EXPERTS.keys(),
}


def require_family(engine: str, family: str) -> None:
    """Raise OptionError if a plan cannot name the experts of this family in an engine."""
    if family in _FAMILIES[engine]:
        return
    others = [name for name in ENGINES if family in _FAMILIES[name]]
    remedy = f"take `--for {' or '.join(others)}`" if others else "export the weights: `moec export`"
    raise OptionError(
        f"no plan for {engine} covers the family `{family}`, expected one of {', '.join(sorted(_FAMILIES[engine]))}",
        remedy,
    )


def shares_gate_and_up(family: str) -> bool:
    """Return whether gate and up of an expert are one module in GPTQModel, so that they have one format."""
    names = _GPTQMODEL_EXPERTS[family][1]
    return names["gate"] == names["up"]


def llama_cpp_stack(layer: int, projection: str) -> str:
    """Return the tensor that holds one projection of all experts of a layer."""
    return f"blk.{layer}.ffn_{projection}_exps.weight"


def llama_cpp_dense(group: str) -> str:
    """Return a regular expression of the tensors of a dense group.

    group: name of a DenseGroup.
    """
    layer = _layer_of(group)
    if layer is None:
        return {"embedding": r"^token_embd\.weight$", "lm_head": r"^output\.weight$"}[group]
    modules = "attn_" if group.endswith(".attention") else r"ffn_(gate|up|down)(_shexp)?\.weight$"
    return rf"^blk\.{layer}\.{modules}"


def mlx_stack(family: str, layer: int, projection: str) -> str:
    """Return the module that holds one projection of all experts of a layer."""
    return f"model.layers.{layer}.{_MLX_STACKS[family]}.{projection}_proj"


def mlx_dense(model: ModelSpec, group: str) -> list[str]:
    """Return the modules of a dense group, or the module right above them.

    group: name of a DenseGroup.
    """
    layer = _layer_of(group)
    if layer is None:
        return ["model.embed_tokens" if group == "embedding" else "lm_head"]
    prefix = f"model.layers.{layer}"
    if group.endswith(".attention"):
        return [f"{prefix}.self_attn"]
    if model.layers[layer].experts.count:
        return [f"{prefix}.mlp.shared_expert{'' if model.family == 'qwen2_moe' else 's'}"]
    return [f"{prefix}.mlp.{projection}_proj" for projection in ("gate", "up", "down")]


def gptqmodel_experts(family: str, layer: int, projection: str, experts: Sequence[int], count: int) -> str:
    """Return a regular expression of one projection of some experts of a layer.

    count: number of experts of the layer.
    """
    pattern, projections = _GPTQMODEL_EXPERTS[family]
    chosen = r"\d+" if len(experts) == count else _alternatives(experts)
    named = pattern.format(experts=chosen, projection=projections[projection])
    return rf"^model\.layers\.{layer}\.{named}$"


def gptqmodel_dense(group: str) -> str | None:
    """Return a regular expression of the modules of a dense group; None: GPTQModel leaves them as they are.

    group: name of a DenseGroup.
    """
    layer = _layer_of(group)
    if layer is None:
        return None
    modules = r"self_attn\..*" if group.endswith(".attention") else r"mlp\.(shared_experts?\.)?(gate|up|down)_proj"
    return rf"^model\.layers\.{layer}\.{modules}$"


def _alternatives(numbers: Iterable[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"({'|'.join(texts)})"


def _layer_of(group: str) -> int | None:
    match = re.match(r"layers\.(\d+)\.", group)
    return None if match is None else int(match[1])
