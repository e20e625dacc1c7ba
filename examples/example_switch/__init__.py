"""The second example: a Switch Transformer for the dialogues, with the data and the tokenizer of the first."""
