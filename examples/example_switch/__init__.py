"""The second example: a Switch Transformer for the dialogues. It uses the data and the tokenizer of the first."""
