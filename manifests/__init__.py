"""The bundle format: dataclasses, strict codec, JSON Schema, sizes, errors. Standard library only."""
