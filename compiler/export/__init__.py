"""A bundle as other tools read it: a Hugging Face folder, and its plan in the terms of other engines."""
