"""A Hugging Face model folder."""
