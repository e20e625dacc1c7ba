"""Answers from config.json, before a download and without torch: what a model needs, and how fast it would be."""
