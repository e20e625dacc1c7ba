"""A bundle as a model of lm-evaluation-harness (package `lm_eval`), inside this process."""
