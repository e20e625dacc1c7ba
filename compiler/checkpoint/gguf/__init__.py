"""Models in GGUF files: their settings, weights and tokenizer as if they were a Hugging Face folder."""
