"""The example checkpoint: its two tasks, its data, its tokenizer, its training and its measurement."""
