"""Convert between tokens and text: tokenizer, chat template, sampling."""
