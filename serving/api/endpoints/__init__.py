"""Requests that are answered with text: completions, chat, messages, responses."""
