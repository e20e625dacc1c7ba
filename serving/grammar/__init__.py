"""Answers that follow a JSON schema: which tokens may come next, by the package llguidance."""
