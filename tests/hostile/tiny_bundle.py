"""The bundle that seeds change: two layers of Mixtral with four experts, a few ten thousand bytes. And other bundles.

A token of its tokenizer is a byte, so every text can be encoded and every token has a text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from moec.manifests.bundle import QUALITY_NAME, BundleManifest
from moec.manifests.model import AttentionSpec, ExpertKey, ExpertsSpec, LayerSpec, ModelSpec, RopeSpec, RouterSpec
from moec.manifests.quant import QuantSpec
from tests.hostile.bundle_writer import BF16, BundlePlan, Weights, write_bundle

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
VOCABULARY = len(SPECIAL_TOKENS) + 256
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"
ATTENTION = AttentionSpec(2, 1, 16, RopeSpec(10000.0, 16))
EXPERTS = ExpertsSpec(4, 2, 32, "silu", RouterSpec("softmax", True))
MODEL = ModelSpec(
    family="mixtral",
    hidden_size=32,
    vocab_size=VOCABULARY,
    max_positions=512,
    norm_eps=1e-5,
    tie_embeddings=False,
    layers=(LayerSpec(ATTENTION, EXPERTS),) * 2,
    eos_token_ids=(2,),
)


def write_tiny_bundle(folder: Path, model: ModelSpec = MODEL, left_out: Sequence[ExpertKey] = ()) -> BundleManifest:
    """Write the bundle to the new folder.

    left_out: experts that are left out.
    """
    packed = QuantSpec.parse("q8g32")
    dense = {
        name: packed if len(shape) == 2 and not name.endswith("router") and packed.fits(shape[1]) else BF16
        for name, shape in model.dense_shapes().items()
    }
    experts = {
        key: dict.fromkeys(
            model.layers[key.layer].experts.projections, QuantSpec.parse("q0" if key in left_out else "q4g32")
        )
        for key in model.expert_keys()
    }
    files = {
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": b"{}\n",
        "chat_template.jinja": CHAT_TEMPLATE.encode(),
        "generation_config.json": b"{}\n",
        "README.md": b"# A tiny model\n",
        QUALITY_NAME: b"{}\n",
    }
    return write_bundle(folder, BundlePlan(model, dense, experts, files=files), Weights(random.Random(28)))


def tokenizer_json() -> bytes:
    """Return a tokenizer with a token for every byte, after the special tokens."""
    tokens = [*SPECIAL_TOKENS, *_byte_letters()]
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL_TOKENS)
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<unk>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [],
    }
    bytes_of_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": bytes_of_text,
        "post_processor": None,
        "decoder": bytes_of_text,
        "model": model,
    }
    return json.dumps(plain, ensure_ascii=False).encode()


def _byte_letters() -> list[str]:
    """Return a printable letter for each byte, sorted, as ByteLevel of the tokenizers library does. Source: GPT-2."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [value for value in range(256) if value not in printable]
    letters = [chr(value) for value in printable]
    return sorted([*letters, *(chr(256 + number) for number in range(len(others)))])
