"""Commands from checkpoint to bundle."""
