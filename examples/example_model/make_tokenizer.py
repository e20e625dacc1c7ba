"""Train and write the tokenizer: ``python -m example_model.make_tokenizer [FOLDER]``."""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from example_model.decode import END, PAD
from example_model.items import SEED, TrainingText, training_texts

MODEL = Path(__file__).parents[1] / "model"
VOCABULARY = 1_536
TEXTS = 20_000
UNKNOWN = "<unk>"


def train_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer. Every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts: list[TrainingText] = training_texts("gsm8k", TEXTS) + training_texts("samsum", TEXTS)
    random.Random(SEED).shuffle(texts)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[UNKNOWN, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.prompt + text.answer for text in texts), trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "pad_token": PAD,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL)
