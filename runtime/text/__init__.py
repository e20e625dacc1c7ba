"""Tokens to text and back: tokenizer, chat template, sampling."""
