"""A plainly trained example: 4 of 16 experts, no planted sensitivity. Data and tokenizer are those of the first."""
