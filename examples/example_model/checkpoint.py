"""Reading and writing the checkpoint: a Mixtral in Hugging Face layout. A complete file is renamed into place."""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from example_model.model import ExampleModel, Shape

WEIGHTS = "model.safetensors"


def config_of(shape: Shape, end: int, pad: int) -> dict[str, object]:
    """Return the content of ``config.json``. end, pad: token ids."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.width,
        "max_position_embeddings": shape.context,
        "num_attention_heads": shape.heads,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "output_router_logits": False,
        "rms_norm_eps": shape.epsilon,
        "rope_parameters": {"rope_theta": shape.theta, "rope_type": "default"},
        "rope_theta": shape.theta,
        "router_aux_loss_coef": 0.01,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def write_json(path: Path, value: object) -> None:
    """Write a JSON file and rename it into place."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(new, path)


def write_configs(folder: Path, shape: Shape, end: int, pad: int) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config_of(shape, end, pad))
    write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": pad})


def write_weights(folder: Path, model: ExampleModel) -> None:
    """Write the weights, rounded to bfloat16."""
    tensors = {name: part.detach().to(torch.bfloat16).contiguous() for name, part in model.to_disk().items()}
    new = folder / (WEIGHTS + ".new")
    save_file(tensors, new, metadata={"format": "pt"})
    new.chmod(0o644)
    os.replace(new, folder / WEIGHTS)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights on disk as float32."""
    return {name: part.float() for name, part in load_file(folder / WEIGHTS).items()}


def read_shape(folder: Path) -> Shape:
    """Return the sizes that ``config.json`` names."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Shape(
        vocabulary=config["vocab_size"],
        hidden=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        experts=config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        width=config["intermediate_size"],
        epsilon=config["rms_norm_eps"],
        theta=config["rope_theta"],
        context=config["max_position_embeddings"],
    )


def read_model(folder: Path) -> ExampleModel:
    """Return the model on disk with float32 weights."""
    model = ExampleModel(read_shape(folder))
    model.from_disk(read_weights(folder))
    return model
