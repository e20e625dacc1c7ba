"""What a `tokenizer.json` may hold and cost."""
