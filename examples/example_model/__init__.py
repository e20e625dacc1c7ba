"""The first example model: its tasks, data, tokenizer, training and measurement."""
