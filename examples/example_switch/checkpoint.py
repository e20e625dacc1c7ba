"""Reading and writing the checkpoint: a Switch Transformer in Hugging Face layout.

A complete file is renamed into place.
"""

import os
import shutil
from pathlib import Path

import torch
from example_model.checkpoint import WEIGHTS, read_weights, write_json
from example_model.make_tokenizer import MODEL as FIRST_MODEL
from safetensors.torch import save_file

from example_switch.model import SwitchModel, SwitchShape, query_scale

MODEL = FIRST_MODEL.with_name("switch_model")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def config_of(shape: SwitchShape, end: int, pad: int) -> dict[str, object]:
    """Return the content of ``config.json``. end, pad: token ids."""
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        "d_ff": shape.width,
        "d_kv": shape.head_size,
        "d_model": shape.hidden,
        "decoder_sparse_step": shape.decoder_step,
        "decoder_start_token_id": pad,
        "dense_act_fn": "relu",
        "dropout_rate": 0.0,
        "dtype": "bfloat16",
        "encoder_sparse_step": shape.encoder_step,
        "eos_token_id": end,
        "expert_capacity": shape.capacity,
        "feed_forward_proj": "relu",
        "is_encoder_decoder": True,
        "is_gated_act": False,
        "layer_norm_epsilon": shape.epsilon,
        "n_positions": shape.context,
        "num_decoder_layers": shape.layers,
        "num_experts": shape.experts,
        "num_heads": shape.heads,
        "num_layers": shape.layers,
        "num_sparse_decoder_layers": shape.layers // shape.decoder_step,
        "num_sparse_encoder_layers": shape.layers // shape.encoder_step,
        "pad_token_id": pad,
        "relative_attention_max_distance": shape.furthest,
        "relative_attention_num_buckets": shape.buckets,
        "router_bias": False,
        "router_dtype": "float32",
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def write_configs(folder: Path, shape: SwitchShape, end: int, pad: int) -> None:
    """Write ``config.json``, ``generation_config.json``, and a copy of the tokenizer of the first example."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_of(shape, end, pad))
    generation = {"decoder_start_token_id": pad, "do_sample": False, "eos_token_id": end, "pad_token_id": pad}
    write_json(folder / "generation_config.json", generation)
    for name in TOKENIZER:
        shutil.copyfile(FIRST_MODEL / name, folder / name)


def write_weights(folder: Path, model: SwitchModel) -> None:
    """Write the weights, rounded to bfloat16."""
    tensors = {
        name: (part.detach() * query_scale(name)).to(torch.bfloat16).contiguous()
        for name, part in model.to_disk().items()
    }
    new = folder / (WEIGHTS + ".new")
    save_file(tensors, new, metadata={"format": "pt"})
    new.chmod(0o644)
    os.replace(new, folder / WEIGHTS)


def read_model(folder: Path) -> SwitchModel:
    """Return the model on disk with float32 weights."""
    model = SwitchModel(SwitchShape())
    model.from_disk(read_weights(folder))
    return model
