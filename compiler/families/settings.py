"""Access to config.json that accounts for every key, so that no setting with an effect is overlooked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from moec.manifests.bundle import TOKENIZER_NAME
from moec.manifests.errors import CheckpointError
from moec.manifests.tokenizer.special_tokens import token_text

from ..checkpoint.model_files import CONFIG_NAME, GENERATION_CONFIG_NAME, ModelFiles
from ..checkpoint.tokenizer import load_tokenizer, tokenizer_texts

# Keys that do not change a forward pass of transformers in evaluation mode: identity, training, optional outputs,
# token ids other than the end token, and generation defaults of older configurations.
_HARMLESS = (
    "model_type architectures torch_dtype dtype transformers_version use_cache initializer_range "
    "attention_dropout bos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id tokenizer_class "
    "id2label label2id num_labels problem_type finetuning_task task_specific_params return_dict "
    "output_hidden_states output_attentions torchscript use_bfloat16 pruned_heads chunk_size_feed_forward "
    "output_router_logits router_aux_loss_coef router_jitter_noise max_length min_length do_sample "
    "early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p "
    "repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix "
    "tf_legacy_loss hidden_dropout hidden_dropout_prob embd_pdrop resid_pdrop attn_pdrop classifier_dropout "
    "router_z_loss_coef aux_loss_alpha seq_aux ep_size pretraining_tp attn_implementation num_nextn_predict_layers "
    "num_mtp_layers max_window_layers transformers.js_config"
)
HARMLESS_KEYS = frozenset(_HARMLESS.split())
TOOL_PREFIXES = ("_", "unsloth_")
"""Beginnings of keys that transformers and training tools write for themselves."""
# Keys that may have only these values, or null, in a family that does not read them: switched off.
FIXED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (None,),
    "auto_map": (None, {}),
    "qkv_bias": (False,),
    "use_bias": (False,),
    "lm_head_bias": (False,),
    "router_bias": (False,),
    "use_qk_norm": (False,),
    "clip_qkv": (None,),
    "sliding_window": (None, 0),
    "use_sliding_window": (False,),
    "final_logit_softcapping": (None, 0),
    "attn_logit_softcapping": (None, 0),
    "first_k_dense_replace": (0,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "moe_layer_freq": (1,),
    "shared_expert_intermediate_size": (0,),
    "n_shared_experts": (0,),
    "num_shared_experts": (0,),
    "moe_num_shared_experts": (0,),
    "n_group": (1,),
    "topk_group": (1,),
    "routed_scaling_factor": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
}
_MISSING = object()


class Settings:
    """Typed access to the keys of config.json. Every failure is a CheckpointError that names the key."""

    def __init__(self, checkpoint: ModelFiles) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._read: set[str] = set()

    @property
    def checkpoint(self) -> ModelFiles:
        """The model folder."""
        return self._checkpoint

    def passed_over(self, *keys: str) -> None:
        """Mark keys of this family that do not affect a forward pass."""
        self._read.update(keys)

    def fail(self, key: str, expected: str, remedy: str = "use the config.json that came with the weights") -> NoReturn:
        """Raise CheckpointError for one key."""
        value = self._config.get(key, _MISSING)
        stated = "nothing" if value is _MISSING else f"`{str(value)[:80]}`"
        raise CheckpointError(
            f"`{self._checkpoint.settings_file}`: key `{key}`: expected {expected}, found {stated}", remedy
        )

    def raw(self, key: str) -> Any:
        """Return the value, or None if the key is absent."""
        self._read.add(key)
        return self._config.get(key)

    def integer(self, key: str, most: int = 1 << 28) -> int:
        """Return a whole number from 1 to `most`."""
        value = self.raw(key)
        if type(value) is not int or not 1 <= value <= most:
            self.fail(key, f"a whole number from 1 to {most}")
        return value

    def is_given(self, key: str) -> bool:
        """Return whether the key is there, with null or another value."""
        return key in self._config

    def optional_integer(self, key: str, absent: int | None = None) -> int | None:
        """Return a positive whole number, None if it is null, or `absent` if the key is absent."""
        if not self.is_given(key):
            return absent
        return None if self.raw(key) is None else self.integer(key)

    def either_integer(self, key: str, other: str = "", most: int = 1 << 28) -> int:
        """Return a whole number that has two names in configurations of different age. Both must agree."""
        if not other or self.raw(other) is None:
            return self.integer(key, most)
        if self.raw(key) not in (None, self.raw(other)):
            self.fail(key, f"the {self.raw(other)} of `{other}`")
        return self.integer(other, most)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number, or `default` if the key is absent and a default is given."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not value > 0:
            self.fail(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return true or false, or `default` if the key is absent, as transformers does."""
        value = self.raw(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.fail(key, "true or false")
        return bool(value)

    def one_of(self, key: str, values: Sequence[str]) -> str:
        """Return a text from a list of values."""
        value = self.raw(key)
        if value not in values or not isinstance(value, str):
            self.fail(key, f"one of {', '.join(f'`{name}`' for name in values)}", "compile another checkpoint")
        return str(value)

    def rope_theta(self, default: float | None = None) -> float:
        """Return the rotary base from `rope_theta` or `rope_parameters`, or `default` if both lack it."""
        parameters = self.raw("rope_parameters") or {}
        nested = parameters.get("rope_theta")
        if nested is None:
            return self.number("rope_theta", default)
        if type(nested) not in (int, float) or not nested > 0:
            self.fail("rope_parameters", "a positive `rope_theta`")
        if self.raw("rope_theta") not in (None, nested):
            self.fail("rope_theta", f"the {nested} of `rope_parameters`")
        return float(nested)

    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a generation.

        generation_config.json takes precedence over config.json. The tokenizer's `eos_token`, which ends a turn of a
        chat, is added.
        """
        stated = self._checkpoint.generation_config.get("eos_token_id")
        of_config = self._token_ids(CONFIG_NAME, self.raw("eos_token_id"), is_used=stated in (None, []))
        generation = self._token_ids(GENERATION_CONFIG_NAME, stated, is_used=True)
        return tuple(dict.fromkeys((*(generation or of_config), *self._end_of_turn())))

    def _end_of_turn(self) -> tuple[int, ...]:
        """Return the token that the tokenizer's files name as `eos_token`, if the model has it."""
        root = self._checkpoint.root
        token = token_text(tokenizer_texts(root).get("eos_token"))
        if not token or not (root / TOKENIZER_NAME).is_file():
            return ()
        try:
            number = load_tokenizer(root).token_to_id(token)
        except CheckpointError:  # preflight names its problems
            return ()
        vocabulary = self._config.get("vocab_size")
        return (number,) if number is not None and type(vocabulary) is int and number < vocabulary else ()

    def _token_ids(self, file: str, value: Any, is_used: bool) -> tuple[int, ...]:
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and token >= 0 for token in tokens):
            raise CheckpointError(
                f"`{self._checkpoint.root / file}`: key `eos_token_id`: expected token ids, found `{str(value)[:80]}`",
                "repair the file",
            )
        vocabulary = self._config.get("vocab_size")
        beyond = [token for token in tokens if type(vocabulary) is int and token >= vocabulary]
        if beyond and is_used:
            raise CheckpointError(
                f"`{self._checkpoint.root / file}`: key `eos_token_id`: eos token {beyond[0]} outside the vocabulary "
                f"of {vocabulary} tokens",
                f"remove it from `{file}`, or use the file that came with the weights",
            )
        return tuple(dict.fromkeys(tokens))

    def finish(self, of_family: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> None:
        """Reject keys that were not read, unless they are harmless, null, switched off or of a tool. Call it last.

        of_family: keys that may have only these values, because the family computes nothing else.
        """
        fixed = {**FIXED_KEYS, **of_family}
        for key, values in fixed.items():
            if key in self._config and key not in self._read and self._config[key] not in (*values, None):
                self.fail(key, f"`{values[0]}`", "compile a checkpoint without it")
        known = HARMLESS_KEYS | fixed.keys() | self._read
        unknown = sorted(
            key
            for key, value in self._config.items()
            if key not in known and value is not None and not key.startswith(TOOL_PREFIXES)
        )
        if unknown:
            self.fail(
                unknown[0],
                f"only keys whose effect is known (unknown: {', '.join(unknown)[:200]})",
                "remove the key if it does not change the computation",
            )
