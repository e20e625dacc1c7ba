"""Serve a bundle over HTTP: the OpenAI API, a chat page, metrics.

`engine/` runs many requests on one engine. `api/` turns HTTP requests into them. docs/design/serving.md describes both.
"""
